"""The kernel compiler as the compiled-runner cache sees it: identity, export and load.

Importing this module imports nothing of the compiler; the methods do.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from dsv4.ops.runtime import sources

_ENTRY = "dsv4_runner"
# Settings of the compiler that change the code it makes.
_CODE_SETTINGS = ("CUTE_DSL_COMPILER_OPT", "CUTE_DSL_LINEINFO")


class CuteToolchain:
    """CuTeDSL with tvm-ffi: objects are host code with the GPU binary inside."""

    @cached_property
    def arch(self) -> str:
        """Architecture that this process compiles for.

        The compiler reads CUTE_DSL_ARCH, else the GPU present, when it is imported; setting the
        variable later is ignored.
        """
        from cutlass.cutlass_dsl import CuTeDSL

        return CuTeDSL._get_dsl().envar.arch

    @cached_property
    def versions(self) -> dict[str, str]:
        """What an object depends on besides its key; also recorded beside every object."""
        packages = sorted(
            (distribution.name.lower(), distribution.version)
            for distribution in importlib.metadata.distributions()
            if distribution.name.lower().startswith(("nvidia-cutlass-dsl", "apache-tvm-ffi"))
        )
        return {
            **dict(packages),
            "cuda": self.cuda_flavour,
            "host": platform.machine(),
            **{name: os.environ[name] for name in _CODE_SETTINGS if os.environ.get(name)},
        }

    @cached_property
    def cuda_flavour(self) -> str:
        """`cu12` or `cu13`: which of the installed CUDA toolkits the compiler picked."""
        import cutlass  # noqa: F401  (picks the flavour while it is imported)

        library = sys.modules["cutlass._mlir._mlir_libs._cutlass_ir"].__file__
        found = re.search(r"\.(cu\d+)\.", Path(library).name)
        return found[1] if found else "cu"

    def source_digest(self, module: str) -> str:
        """Digest of a kernel module and of all sources that it imports, directly or not."""
        return sources.digest(module)

    def export(self, compiled: Any, path: Path) -> None:
        """Write a compiled function as an object file."""
        compiled.export_to_c(object_file_path=str(path), function_name=_ENTRY)

    def load(self, path: Path) -> Callable[..., None]:
        """Load an object file and return its function. Neither compiles nor links anything."""
        from cutlass import cute

        return cute.runtime.load_module(str(path), enable_tvm_ffi=True)[_ENTRY]
