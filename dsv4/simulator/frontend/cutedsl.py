"""Execution of the real compiled host function without a GPU, which catches its launches.

The compiled object holds its host code as LLVM dialect. A copy of that module gets its calls into
the CUDA runtime renamed to the stub's (runtime_stub.c), is compiled again, and runs on the caller's
CPU tensors: grid, cluster, shared memory, parameters and tensor maps are the ones a GPU would get.
The layout of launch attributes is undocumented, hence the pinned compiler version.
"""

from __future__ import annotations

import ctypes
import io
import re
from importlib import metadata

import torch
from torch.utils.dlpack import to_dlpack

from dsv4.simulator.errors import SimulatorError
from dsv4.simulator.frontend.stub_library import stub_library
from dsv4.simulator.machine.scheduler import LaunchConfig
from dsv4.simulator.ptx.parser import Module

SUPPORTED_DSL = "4.8"
_RUNTIME_SYMBOL = re.compile(r"^(_cu|cuda_dialect_|CuteDSLRT_)")
_ATTRIBUTE_BYTES = 72
_COOPERATIVE_ATTRIBUTE, _CLUSTER_ATTRIBUTE, _PROGRAMMATIC_ATTRIBUTE = 2, 4, 6
_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint32),
    ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint32, ctypes.POINTER(ctypes.c_void_p),
)  # fmt: skip
_CUDA_DEVICE = 2  # DLPack's kDLCUDA


class CudaView:
    """A CPU tensor whose DLPack capsule claims a CUDA device.

    The kernel compiler then gives its pointers the global address space, as on a GPU.
    """

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __dlpack__(self, stream=None, **_):
        capsule = to_dlpack(self.tensor.detach())
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype = ctypes.c_void_p
        pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        # DLTensor: void* data; int32 device type; int32 device id; ...
        address = pointer(capsule, b"dltensor")
        ctypes.c_int32.from_address(address + 8).value = _CUDA_DEVICE
        ctypes.c_int32.from_address(address + 12).value = 0
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CUDA_DEVICE, 0)


def check_version() -> None:
    """The launch ABI is undocumented: refuse compilers it was not tested with."""
    try:
        version = metadata.version("nvidia-cutlass-dsl")
    except metadata.PackageNotFoundError:
        raise SimulatorError(
            "the simulator needs nvidia-cutlass-dsl, which is not installed"
        ) from None
    if not version.startswith(SUPPORTED_DSL + "."):
        raise SimulatorError(
            f"nvidia-cutlass-dsl {version} is installed, the simulator supports {SUPPORTED_DSL}.x"
        )


def argument_names(compiled) -> list[str]:
    """Names of a compiled function's arguments in order, none where it does not know them. The
    stream is passed by the environment, or comes after the tensors."""
    signature = getattr(getattr(compiled, "execution_args", None), "signature", None)
    return [name for name in getattr(signature, "parameters", ()) if name != "stream"]


class HostRunner:
    """Runner of a compiled function's host code, which records its launches."""

    def __init__(self, compiled, module: Module, multiprocessors: int):
        check_version()
        self.compiled, self.module = compiled, module
        path = stub_library()
        self.stub = ctypes.CDLL(path)
        self.launches: list[LaunchConfig] = []
        self.error: Exception | None = None
        self._callback = _CALLBACK(self._on_launch)
        self.multiprocessors = multiprocessors
        self._renamed = _with_stub_symbols(compiled.ir_module)
        self._engine = None
        self._call = self._tvm_ffi(path) if _is_tvm_ffi(compiled) else self._packed(path)

    def run(self, arguments: list, keywords: dict) -> list[LaunchConfig]:
        """Call the host function; the launches it makes, in order."""
        self.launches, self.error = [], None
        # The stub is one for the process: it must call the runner that runs now, not the last made.
        major = 9 if self.module.target.startswith("sm_9") else 10
        self.stub.dsv4sim_configure(self._callback, self.multiprocessors, major, 232448)
        self._call(arguments, keywords)
        if self.error is not None:
            raise self.error
        failure = self.stub.dsv4sim_failure()
        if failure:
            raise SimulatorError("the host function could not make a tensor map: see its arguments")
        return self.launches

    # --- the two calling conventions -------------------------------------------------------------
    def _tvm_ffi(self, stub: str):
        import tvm_ffi
        from cutlass._mlir._mlir_libs._cutlass_ir import _aot_support
        from cutlass._mlir._mlir_libs._cutlass_ir._execution_engine import BinaryExecutionEngine

        binary = _aot_support.export_module_to_bytes(
            self._renamed, format="o", opt_level=1, enable_pic=True
        )
        self._engine = BinaryExecutionEngine(binary, [stub], True)
        function = tvm_ffi.Function.__from_extern_c__(
            self._engine.lookup("__tvm_ffi_" + self.compiled.function_name),
            keep_alive_object=self._engine,
        )

        def call(arguments: list, keywords: dict) -> None:
            if keywords:
                names = list(self.compiled.execution_args.signature.parameters)
                arguments = arguments + [
                    keywords[n] for n in names[len(arguments) :] if n in keywords
                ]
            function(*map(_as_views, arguments))

        return call

    def _packed(self, stub: str):
        from cutlass._mlir.execution_engine import ExecutionEngine

        engine = self._engine = ExecutionEngine(self._renamed, opt_level=1, shared_libs=[stub])
        library, error, device = ctypes.c_void_p(), ctypes.c_int32(), ctypes.c_int32(0)
        inner = ctypes.pointer(library)
        outer = ctypes.pointer(inner)
        loader = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
        loader(engine.raw_lookup("cuda_init"))(_pack(outer, ctypes.pointer(error)))
        loader(engine.raw_lookup("cuda_load_to_device"))(
            _pack(outer, ctypes.pointer(device), ctypes.pointer(error))
        )
        entry = engine.lookup(self.compiled.function_name)

        def call(arguments: list, keywords: dict) -> None:
            converted = [_as_cute(a) for a in arguments]
            packed, _keep = self.compiled.execution_args.generate_execution_args(
                tuple(converted), keywords
            )
            result = ctypes.c_int32()
            pointers = (ctypes.c_void_p * (len(packed) + 1))(
                *packed, ctypes.cast(ctypes.pointer(result), ctypes.c_void_p)
            )
            entry(pointers)
            if result.value and self.error is None:
                raise SimulatorError(f"the host function returned CUDA error {result.value}")

        return call

    # --- launches --------------------------------------------------------------------------------
    def _on_launch(self, name, grid, block, shared, attributes, count, arguments) -> int:
        try:
            kernel = name.decode()
            entry = self.module.entries.get(kernel)
            if entry is None:
                raise SimulatorError(f"launched kernel {kernel} is not in the PTX")
            cluster, programmatic, cooperative = (1, 1, 1), False, False
            for i in range(count):
                raw = ctypes.string_at(attributes + _ATTRIBUTE_BYTES * i, _ATTRIBUTE_BYTES)
                kind = int.from_bytes(raw[:4], "little")
                words = tuple(
                    int.from_bytes(raw[8 + 4 * j : 12 + 4 * j], "little") for j in range(3)
                )
                if kind == _CLUSTER_ATTRIBUTE:
                    cluster = words
                elif kind == _PROGRAMMATIC_ATTRIBUTE:
                    programmatic = bool(words[0])
                elif kind == _COOPERATIVE_ATTRIBUTE:
                    cooperative = bool(words[0])
            params = [
                ctypes.string_at(arguments[i], size)
                for i, (_, size) in enumerate(entry.params.values())
            ]
            self.launches.append(
                LaunchConfig(
                    kernel,
                    tuple(grid[:3]),
                    tuple(block[:3]),
                    cluster,
                    shared,
                    params,
                    programmatic,
                    cooperative,
                    non_portable=bool(self.stub.dsv4sim_is_non_portable(name)),
                )
            )
            return 0
        except Exception as error:  # must not cross the C frame
            self.error = error
            return 1


def _pack(*pointers):
    return (ctypes.c_void_p * len(pointers))(*(ctypes.cast(p, ctypes.c_void_p) for p in pointers))


def _is_tvm_ffi(compiled) -> bool:
    return any("TVMFFI" in cls.__name__ for cls in type(compiled).__mro__)


def _as_views(argument):
    """CPU tensors, also those in tuples, as CUDA tensors; everything else passes."""
    if isinstance(argument, torch.Tensor):
        return CudaView(argument)
    if isinstance(argument, (list, tuple)):
        return tuple(map(_as_views, argument))
    return argument


def _as_cute(argument):
    """CPU tensors become CuTe tensors in the global address space; everything else passes."""
    if not isinstance(argument, torch.Tensor):
        return argument
    from cutlass.cute.runtime import from_dlpack

    return from_dlpack(CudaView(argument), assumed_align=16)


def _with_stub_symbols(module):
    """A copy of the host module that calls the stub instead of the CUDA runtime."""
    from cutlass._mlir import ir

    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    with module.context, ir.Location.unknown(module.context):
        copy = ir.Module.parse(buffer.getvalue(), module.context)

        def rename(op):
            attributes = op.attributes
            for key in ("sym_name", "callee", "global_name"):
                if key not in attributes or op.name == "llvm.mlir.global":
                    continue
                is_name = key == "sym_name"
                value = attributes[key]
                text = ir.StringAttr(value).value if is_name else ir.FlatSymbolRefAttr(value).value
                if _RUNTIME_SYMBOL.match(text):
                    new = "dsv4sim_" + text.removeprefix("_")
                    attributes[key] = (
                        ir.StringAttr.get(new) if is_name else ir.FlatSymbolRefAttr.get(new)
                    )
            return ir.WalkResult.ADVANCE

        copy.operation.walk(rename)
    return copy
