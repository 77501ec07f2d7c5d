# Sourced by scripts/demo and scripts/test: makes .venv with this package in it, once, and sets $python.
#
#   DSV4_PYTHON=python3.12   interpreter for the virtual environment (default: the newest of 3.13, 3.12, 3.11)
#   DSV4_VENV=/path          where the virtual environment goes (default: .venv in the repository)
#   DSV4_VENV=system         no virtual environment: use DSV4_PYTHON or python3 as it is, install nothing
#                            (for machines that reach no package index; PYTHONPATH is set to the repository)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cpu_torch=2.13.0

fail() { echo "${0##*/}: $*" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in ${DSV4_PYTHON:-python3.13 python3.12 python3.11 python3 python}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "needs Python 3.11 or newer (set DSV4_PYTHON to one)"
}

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# Without a GPU a CPU build of torch spares gigabytes of CUDA libraries. Whichever source has one first wins;
# the last resort is whatever the configured index calls torch.
install_cpu_torch() {
  "$1" -m pip install -q "torch==$cpu_torch+cpu" 2>/dev/null ||
    "$1" -m pip install -q --retries 0 --timeout 10 "torch==$cpu_torch" \
      --index-url https://download.pytorch.org/whl/cpu 2>/dev/null ||
    "$1" -m pip install -q "torch==$cpu_torch" ||
    "$1" -m pip install -q "torch>=2.11"
}

build_environment() {
  local venv=$1 base=$2 extra=
  echo "setting up $venv (once; a few minutes)" >&2
  "$base" -m venv --clear "$venv" || fail "cannot make a virtual environment in $venv"
  # `pip install --group` came with pip 25.1.
  "$venv/bin/python" -m pip install -q --upgrade 'pip>=25.1' 2>/dev/null || fail "cannot upgrade pip in $venv"
  if has_gpu; then
    extra='[cu13]'
  elif [ "$(uname -s)" = Linux ]; then
    install_cpu_torch "$venv/bin/python" || fail "cannot install torch"
  fi
  # Build back-ends are chatty: their words matter only when the installation fails.
  if ! (cd "$root" && "$venv/bin/python" -m pip install -q --editable ".$extra" --group dev) \
    >"$venv/install.log" 2>&1; then
    cat "$venv/install.log" >&2
    fail "cannot install the package; see pip's message above"
  fi
}

# One set-up at a time, and again only when what decides it has changed.
ensure_environment() {
  if [ "${DSV4_VENV:-}" = system ]; then
    python=$(find_python)
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
    return
  fi
  local venv=${DSV4_VENV:-$root/.venv} base stamp
  base=$(find_python)
  stamp=$(cat "$root/pyproject.toml" "$root/scripts/setup.sh" <("$base" --version) <(echo "$root") | cksum)
  mkdir -p "$(dirname "$venv")"
  exec 9>"$venv.lock"
  if command -v flock >/dev/null 2>&1; then flock 9; fi
  if [ "$(cat "$venv/.dsv4-stamp" 2>/dev/null)" != "$stamp" ]; then
    build_environment "$venv" "$base"
    echo "$stamp" >"$venv/.dsv4-stamp"
  fi
  exec 9>&-
  python=$venv/bin/python
}

ensure_environment
