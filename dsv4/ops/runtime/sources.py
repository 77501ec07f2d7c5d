"""The sources of a module: its file and those of all modules of its package that it imports.

Found by parsing, so that nothing is imported: a compiled kernel is looked up by the digest of its
sources, also where the kernel compiler is missing.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path


@cache
def digest(module: str) -> str:
    """Digest of the sources of a module, by name and content; once per process."""
    total = hashlib.sha256()
    for name, path in sorted(closure(module).items()):
        total.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def closure(module: str) -> dict[str, Path]:
    """Files of a module and of what it imports from its top-level package, by module name.

    Imports inside functions count, and so do the `__init__` files of packages on the way, which run
    when a module below them is imported; that of the top-level package does not, because it leads
    to everything and kernels take nothing from it.

    Raises:
        ModuleNotFoundError: no file for `module`.
    """
    package = module.partition(".")[0]
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    if not folders or _file(Path(folders[0]), module) is None:
        raise ModuleNotFoundError(f"no source of {module} was found", name=module)
    root = Path(folders[0])
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _file(root, name)
        if name in found or name == package or path is None:
            continue
        found[name] = path
        waiting.append(name.rpartition(".")[0])
        waiting += (other for other in _imports(name, path) if other.startswith(package + "."))
    return found


def _file(root: Path, module: str) -> Path | None:
    """File of a module below the folder of its top-level package; None for what is no module."""
    place = root.joinpath(*module.split(".")[1:])
    for path in (place / "__init__.py", place.with_name(place.name + ".py")):
        if path.is_file():
            return path
    return None


def _imports(module: str, path: Path) -> Iterator[str]:
    """Absolute names that a file imports; `from a import b` may mean a module a.b."""
    base = module.split(".")
    if path.name != "__init__.py":
        base = base[:-1]
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = [] if node.level == 0 else base[: len(base) - node.level + 1]
            parent = ".".join([*start, *filter(None, [node.module])])
            yield parent
            yield from (f"{parent}.{alias.name}" for alias in node.names)
