"""Compiled code on disk, found again by the source files that made it.

    <root>/<digest of configuration and compiler>/<digest of sources>.json.gz

A record says which files of the tree were imported to make it, and which were looked at in vain for
a list of configurations, with their digests. It serves every tree where these files are the same.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.metadata
import json
import os
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

KEPT_RECORDS = 20  # of a configuration


@dataclass(frozen=True)
class Tree:
    """A folder that holds `dsv4/`; `name` is for messages."""

    name: str
    folder: Path
    _digests: dict[str, str | None] = field(default_factory=dict, compare=False)

    def digest(self, file: str) -> str | None:
        """Digest of a file named relative to the folder; None when there is none."""
        if file not in self._digests:
            path = self.folder / file
            content = path.read_bytes() if path.is_file() else None
            self._digests[file] = None if content is None else _digest(content)
        return self._digests[file]


class CodeCache:
    """Codes by tree and configuration; counts what it had and what it had not."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = _default_root() if root is None else root
        self.hits = self.misses = 0
        self._lock = threading.Lock()

    def get(self, tree: Tree, arch: str, label: str, identity: str) -> dict | None:
        """{"ptx": text, "host": text}, or None when it has to be compiled."""
        for path in self._folder(arch, label, identity).glob("*.json.gz"):
            try:
                record = json.loads(gzip.decompress(path.read_bytes()))
            except (OSError, EOFError, ValueError):
                continue  # cut off or removed by another process
            if all(tree.digest(file) == digest for file, digest in record["files"].items()):
                with self._lock:
                    self.hits += 1
                return record
        with self._lock:
            self.misses += 1
        return None

    def put(self, tree: Tree, arch: str, label: str, identity: str, code: dict) -> None:
        """Keep `code`, whose "files" were imported and whose "unfit" ones were looked at."""
        files = {file: tree.digest(file) for file in [*code["files"], *code["unfit"]]}
        folder = self._folder(arch, label, identity)
        folder.mkdir(parents=True, exist_ok=True)
        record = {"arch": arch, "label": label, "files": files}
        record |= {"ptx": code["ptx"], "host": code["host"]}
        target = folder / f"{_digest(json.dumps(files).encode())}.json.gz"
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(gzip.compress(json.dumps(record).encode()))
        os.replace(file.name, target)
        records = sorted(folder.glob("*.json.gz"), key=lambda path: path.stat().st_mtime)
        for old in records[:-KEPT_RECORDS]:
            old.unlink(missing_ok=True)

    def _folder(self, arch: str, label: str, identity: str) -> Path:
        return self.root / _digest("\0".join((arch, label, identity, *_compiler())).encode())


def _default_root() -> Path:
    chosen = os.environ.get("DSV4_CACHE_DIR")
    if not chosen:
        import platformdirs

        chosen = platformdirs.user_cache_dir("dsv4")
    return Path(chosen) / "same_code"


@functools.cache
def _compiler() -> tuple[str, ...]:
    """Installed versions of the kernel compiler."""
    return tuple(
        sorted(
            f"{found.name} {found.version}"
            for found in importlib.metadata.distributions()
            if found.name.lower().startswith(("nvidia-cutlass-dsl", "apache-tvm-ffi"))
        )
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]
