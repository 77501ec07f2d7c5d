"""Compiled kernels: in memory, else on disk, else compiled and stored.

    <root>/v2/<arch>-<cuda flavour>-<digest of compiler versions>/
        <kernel>-<digest of key and sources>.o        the object
        <kernel>-<digest of key and sources>.json     what it is, and the checksum of the object

The sources of a kernel are its module and all that this imports, directly or not, without comments
and docstrings.

The root is $DSV4_CACHE_DIR or the user's cache folder. Writers hold a lock per object, and files
appear by renaming: any number of processes may share a folder, also over a network.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dsv4.ops.runtime.registry import CompileKey, build
from dsv4.ops.runtime.toolchain import CuteToolchain

FORMAT = "v2"
LOCK_SECONDS = 600  # far longer than a compilation takes
_COMPILING = threading.Lock()  # the kernel compiler is not thread-safe

Runner = Callable[..., None]


def cache_root() -> Path:
    """Folder of all compiled objects: $DSV4_CACHE_DIR, else the user's cache folder."""
    chosen = os.environ.get("DSV4_CACHE_DIR")
    if chosen:
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("dsv4"))


class NotKept(RuntimeWarning):
    """A compiled kernel could not be stored: every process will compile it again."""


class CompileCache:
    """Compiled kernels by key.

    Args:
        root: folder of objects; default `cache_root()` at the time of use.
        toolchain: how objects are identified, written and loaded.
    """

    def __init__(self, root: Path | None = None, toolchain: Any = None) -> None:
        self._root = root
        self._toolchain = CuteToolchain() if toolchain is None else toolchain
        self._runners: dict[CompileKey, Runner] = {}

    def get(
        self,
        key: CompileKey,
        build: Callable[[CompileKey], Any] = build,
        *,
        before_miss: Callable[[], None] | None = None,
    ) -> Runner:
        """Return the runner of `key`.

        Args:
            key: what to run.
            build: compiles `key`, called when neither memory nor disk has it.
            before_miss: called when memory does not have it. A runner cannot start cold while a
                CUDA graph is being captured; `runner.refuse_cold_capture` raises then.
        """
        runner = self._runners.get(key)
        if runner is None:
            if before_miss is not None:
                before_miss()
            runner = self._runners[key] = self._load_or_build(key, build)
        return runner

    def path(self, key: CompileKey) -> Path:
        """Where the object of `key` belongs, for this compiler and the kernel's sources."""
        versions = self._toolchain.versions
        folder = f"{key.arch}-{versions['cuda']}-{_digest(versions)}"
        identity = (key, self._toolchain.source_digest(key.kernel))
        root = cache_root() if self._root is None else self._root
        return root / FORMAT / folder / f"{key.stem}-{_digest(identity)}.o"

    def _load_or_build(self, key: CompileKey, build: Callable[[CompileKey], Any]) -> Runner:
        from filelock import FileLock

        path = self.path(key)
        # Without the lock this may see the files of a writer half way: no reason to warn.
        runner = self._load(key, path, warn=False)
        if runner is not None:
            return runner
        lock = FileLock(path.with_suffix(".lock"), timeout=LOCK_SECONDS)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except OSError as error:
            _warn_not_kept(path, error)
            return self._pass_through(key, self._compile(key, build), path.name)
        try:
            # Another process may have written it while this one waited for the lock.
            runner = self._load(key, path, warn=True)
            if runner is not None:
                return runner
            compiled = self._compile(key, build)
            try:
                return self._store(key, compiled, path)
            except OSError as error:  # a full disk
                _warn_not_kept(path, error)
            return self._pass_through(key, compiled, path.name)
        finally:
            lock.release()

    def _pass_through(self, key: CompileKey, compiled: Any, name: str) -> Runner:
        """Load what was compiled by way of a temporary folder."""
        with tempfile.TemporaryDirectory() as folder:
            return self._store(key, compiled, Path(folder) / name)

    def _load(self, key: CompileKey, path: Path, *, warn: bool) -> Runner | None:
        """Runner stored at `path`; None when there is none that can be trusted."""
        try:
            record = json.loads(path.with_suffix(".json").read_text())
            content = path.read_bytes()
            if record != self._record(key, content):
                raise ValueError("the record beside it describes something else")
            return self._toolchain.load(path)
        except FileNotFoundError:
            return None
        except Exception as error:
            # Whatever is wrong with a stored object, compiling again cures it.
            if warn:
                warnings.warn(
                    f"the compiled kernel {path} is unusable ({error}); compiling it again",
                    RuntimeWarning,
                    stacklevel=5,
                )
            return None

    def _compile(self, key: CompileKey, build: Callable[[CompileKey], Any]) -> Any:
        if self._toolchain.arch != key.arch:
            raise RuntimeError(
                f"this process compiles kernels for {self._toolchain.arch}, asked for one for "
                f"{key.arch}; run `dsv4 compile --arch {key.arch}`, or start the process with "
                f"CUTE_DSL_ARCH={key.arch}"
            )
        with _COMPILING:
            return build(key)

    def _store(self, key: CompileKey, compiled: Any, path: Path) -> Runner:
        """Store object and record at `path`, and load what was stored.

        What was compiled would run too, but through a slower wrapper; and loading proves here and
        now that the stored object works.
        """
        # The folder is on the same file system, so that a rename is atomic, and disappears with
        # whatever a crash leaves in it.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            fresh = Path(folder) / path.name
            self._toolchain.export(compiled, fresh)
            record = self._record(key, fresh.read_bytes())
            fresh.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
            os.replace(fresh, path)
            # Last: without its record an object is a miss.
            os.replace(fresh.with_suffix(".json"), path.with_suffix(".json"))
        return self._toolchain.load(path)

    def _record(self, key: CompileKey, content: bytes) -> dict[str, Any]:
        return {
            "key": asdict(key),
            "versions": self._toolchain.versions,
            "sources": self._toolchain.source_digest(key.kernel),
            "sha256": hashlib.sha256(content).hexdigest(),
        }


def _warn_not_kept(path: Path, error: OSError) -> None:
    warnings.warn(
        f"compiled kernels cannot be kept in {path.parent} ({error}), every process will compile "
        "them again; set DSV4_CACHE_DIR to a folder you can write, with room for them",
        NotKept,
        stacklevel=5,
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


# The compiled kernels of this process.
RUNNERS = CompileCache()
