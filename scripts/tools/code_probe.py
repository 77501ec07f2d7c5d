"""Lists and compiles the kernel configurations of the source tree that PYTHONPATH names.

    code_probe.py list                  {"configurations": [[arch, label, identity], ...]}
    code_probe.py compile ARCH LABEL    {"ptx": ..., "host": ..., "files": [...], "unfit": [...]}

The answer is JSON on stdout: the above, or {"error": one line}. `scripts/same_code` runs this
inside trees of other commits, where modules may have other names: it imports nothing of the project
but what a layout says, and layouts are tried in order. To teach it a new one, add a function to
LAYOUTS. CUTE_DSL_ARCH must be ARCH when something is compiled.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ARCHITECTURES = ("sm_90a", "sm_100a")
FIXED_SPLITS_HEADS = (128, 64, 32)  # Hopper's kernel depends on whether the number is fixed


@dataclass(frozen=True)
class Configuration:
    """One kernel that a tree can compile.

    Attributes:
        identity: everything of the configuration its code depends on, as text.
        build: compiles it with the compiler options given.
        sources: packages and modules whose files its code is made from.
    """

    arch: str
    label: str
    identity: str
    build: Callable[[str], object]
    sources: tuple[str, ...] = ("dsv4",)


# ---- layouts: each returns None for a tree that is not laid out so ----


def _operators() -> list[Configuration] | None:
    """Every operator of a tree whose operators are declared; attention's with `_OTHERS`."""
    table = _import("dsv4.ops.runtime.registry")
    if not hasattr(table, "OPS"):
        return None
    attention = table.OPS["sparse_fmha_with_swa"]
    found = _attention(attention.aot(), attention.compile_key, table.build)
    for op in table.OPS.values():
        for arch in ARCHITECTURES if op is not attention else ():
            shipped = op.aot_for(arch) if hasattr(op, "aot_for") else op.aot()
            for label, config in shipped.items() if arch in op.kernels else ():
                key = op.compile_key(config, arch)
                build = functools.partial(table.build, key)
                found.append(Configuration(arch, f"{op.name}: {label}", repr(key), build))
    # Operators say what is compiled, in the identity, and have no part in how.
    return [replace(one, sources=("dsv4.kernels", "dsv4.arch")) for one in found]


def _runtime_registry() -> list[Configuration] | None:
    return _from_table("dsv4.ops.runtime.registry")


def _kernels_table() -> list[Configuration] | None:
    return _from_table("dsv4.ops.kernels_table")


LAYOUTS = (_operators, _runtime_registry, _kernels_table)
_unfit: list[str] = []  # modules that layouts looked for, and that are absent or something else


def _from_table(name: str) -> list[Configuration] | None:
    """A module with `model_configurations()`, `runner_key(config, arch)`, `build(key, options)`."""
    table = _import(name)
    functions = ("model_configurations", "runner_key", "build")
    if not all(hasattr(table, function) for function in functions):
        _unfit.append(name)
        return None
    return _attention(table.model_configurations(), table.runner_key, table.build)


def _attention(
    models: Mapping[str, Any],
    key_of: Callable[[Any, str], Any],
    build: Callable[[Any, str], object],
) -> list[Configuration]:
    """The attention kernels of the released models, and what tests rely on beside them."""
    wanted = {(arch, label): config for arch in ARCHITECTURES for label, config in models.items()}
    for label, config in models.items():
        if config.num_query_heads in FIXED_SPLITS_HEADS:
            wanted["sm_90a", f"{label}, fixed splits"] = replace(config, num_splits=4)
    example = next(iter(models.values()))
    for label, changes in _OTHERS.items():
        for arch in ARCHITECTURES:
            wanted[arch, label] = replace(example, **changes)
    found = []
    for (arch, label), config in wanted.items():
        key = key_of(config, arch)
        found.append(Configuration(arch, label, repr(key), functools.partial(build, key)))
    return found


# What tests rely on beside the released models: the other sizes of head_dim, a number of heads that
# fills no tile, and the other sink.
def _other(head_dim: int, heads: int, window: str, sink_mode: str) -> tuple[str, dict]:
    label = f"{heads} heads of {head_dim}, {window}, {sink_mode}"
    causal = window == "causal"
    changes = {"head_dim": head_dim, "num_query_heads": heads}
    return label, changes | {"is_causal": causal, "sink_mode": sink_mode}


_OTHERS = dict(
    (
        _other(64, 64, "ring", "swa_gate"),
        _other(64, 16, "causal", "softmax"),
        _other(128, 128, "causal", "swa_gate"),
        _other(256, 64, "ring", "softmax"),
        _other(512, 72, "causal", "swa_gate"),
        _other(512, 24, "ring", "swa_gate"),
        _other(512, 8, "ring", "swa_gate"),
        _other(512, 128, "ring", "swa_gate"),
    )
)


def _import(name: str):
    """The module, or None where the tree has none of that name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            return None
        raise


def configurations() -> list[Configuration]:
    """What the tree can build.

    Raises:
        LookupError: no layout fits.
    """
    for layout in LAYOUTS:
        found = layout()
        if found is not None:
            return found
    raise LookupError(
        f"no list of kernel configurations in this tree (looked for {', '.join(_unfit)}); a new "
        "layout is taught to scripts/tools/code_probe.py"
    )


def compile_one(arch: str, label: str) -> dict:
    """PTX and host module of one configuration, and the source files that made them."""
    chosen = next(c for c in configurations() if (c.arch, c.label) == (arch, label))
    with tempfile.TemporaryDirectory() as folder:
        compiled = chosen.build(f"--keep-ptx --dump-dir {folder}")
        ptx, host = compiled.artifacts.PTX, str(compiled.ir_module)
    unfit = [name.replace(".", "/") + ".py" for name in _unfit]
    return {"ptx": ptx, "host": host, "files": _imported_files(chosen.sources), "unfit": unfit}


def _imported_files(sources: tuple[str, ...]) -> list[str]:
    """Files of the modules that were imported of some packages, relative to the tree."""
    below = tuple(name + "." for name in sources)
    modules = [m for name, m in sys.modules.items() if name in sources or name.startswith(below)]
    files = (getattr(module, "__file__", None) for module in modules)
    return sorted(str(Path(file).resolve().relative_to(_tree())) for file in files if file)


def _forget_editable_installs() -> None:
    """Leave the tree as the only place of `dsv4`.

    An editable install gives the modules of its own checkout for those that the tree has not: a
    module that was moved away would still be found there under its old name.
    """
    sys.meta_path[:] = [
        finder
        for finder in sys.meta_path
        if not getattr(finder, "__module__", "").startswith("__editable__")
    ]


def _tree() -> Path:
    return Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]).resolve()


def main() -> int:
    """One JSON object on stdout, whatever the compiler prints there; an error is one line."""
    _forget_editable_installs()
    try:
        import dsv4

        if not Path(dsv4.__file__).resolve().is_relative_to(_tree()):
            raise RuntimeError(f"dsv4 comes from {dsv4.__file__}, not from {_tree()}")
        with contextlib.redirect_stdout(sys.stderr):
            if sys.argv[1] == "list":
                found = [(c.arch, c.label, c.identity) for c in configurations()]
                answer = {"configurations": found}
            else:
                answer = compile_one(*sys.argv[2:])
    except Exception as error:
        answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:1000]}
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
