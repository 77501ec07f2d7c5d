"""The stub of the CUDA runtime (runtime_stub.c) as a shared library, compiled where it is used.

It is kept in the folder of compiled kernels, $DSV4_CACHE_DIR or the user's cache folder; where that
cannot be written, in a temporary one for this process.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import platformdirs

from dsv4.simulator.errors import SimulatorError

SOURCE = Path(__file__).with_name("runtime_stub.c")
COMPILERS = ("cc", "gcc", "clang")


def c_compiler() -> list[str]:
    """Command of the C compiler: $CC, which may hold options, else the first that is found.

    Raises:
        SimulatorError: there is none, or CC names none.
    """
    chosen = os.environ.get("CC", "")
    try:
        command = shlex.split(chosen)
    except ValueError as error:
        raise SimulatorError(f"CC: got {chosen!r}, needs a command ({error})") from None
    if command and shutil.which(command[0]) is None:
        raise SimulatorError(f"CC: got {chosen!r}, there is no such program")
    command = command or [name for name in COMPILERS if shutil.which(name)][:1]
    if not command:
        raise SimulatorError(
            f"the simulator needs a C compiler ({', '.join(COMPILERS)}, or set CC): none found"
        )
    return command


def stub_library() -> str:
    """Path of the library, compiled at first use.

    Raises:
        SimulatorError: there is no C compiler, or it failed, with what it said.
    """
    root = Path(os.environ.get("DSV4_CACHE_DIR") or platformdirs.user_cache_dir("dsv4"))
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    target = root / "simulator" / f"runtime_stub_{digest}.so"
    return str(target if target.exists() else _compiled(target))


def _compiled(target: Path) -> Path:
    """Compile the library to `target`, or elsewhere if nothing can be kept there."""
    fresh = Path(_folder_of_this_process().name) / target.name
    command = [*c_compiler(), "-shared", "-fPIC", "-O1", "-o", str(fresh), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SimulatorError(f"`{shlex.join(command)}` failed: {done.stderr.strip()[:400]}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as beside:
            # Beside it first: a rename is atomic, and any number of processes may do this.
            os.replace(shutil.copy(fresh, beside), target)
    except OSError as error:
        warnings.warn(
            f"the simulator's library cannot be kept in {target.parent} ({error}), every process "
            "will compile it again; set DSV4_CACHE_DIR to a folder you can write",
            RuntimeWarning,
            stacklevel=3,
        )
        return fresh
    return target


@functools.cache
def _folder_of_this_process() -> tempfile.TemporaryDirectory:
    """Removed at exit."""
    return tempfile.TemporaryDirectory(prefix="dsv4-simulator-")
