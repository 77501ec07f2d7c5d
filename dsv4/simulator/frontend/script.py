"""Unmodified CuTeDSL scripts, whose launches are simulated and whose GPU is a CPU."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import os
import runpy
import shutil
import struct
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dsv4.simulator.all_schedules import run_schedules
from dsv4.simulator.api import simulate
from dsv4.simulator.errors import SimulatorError
from dsv4.simulator.frontend import triton
from dsv4.simulator.frontend.cpu_only import CpuOnly
from dsv4.simulator.frontend.cutedsl import CudaView
from dsv4.simulator.frontend.kernel_names import named
from dsv4.simulator.frontend.ptx_text import simulate_ptx, single_launch
from dsv4.simulator.frontend.tensor_maps import encode_tiled
from dsv4.simulator.html import Modelled
from dsv4.simulator.merged import MergedReport
from dsv4.simulator.report import Report
from dsv4.simulator.timing.prediction import predict

# What functions of the driver and the runtime answer, beside success and 0. The version is newer
# than any that a script asks for.
_DRIVER_VALUES = {"DriverGetVersion": 14000, "DeviceGetCount": 1, "GetDeviceCount": 1}


# Caches of machine code, which is not simulated: of quack and of FlashAttention-4.
_NO_CACHES = {"QUACK_CACHE_ENABLED": "0", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}


class _Packed:
    """A compiled function whose arguments the compiler has packed already."""

    def __init__(self, compiled, arguments: list):
        self.ir_module, self.function_name = compiled.ir_module, compiled.function_name
        self.artifacts, self.arguments = compiled.artifacts, arguments
        self.execution_args = self

    def generate_execution_args(self, arguments: tuple, keywords: dict) -> tuple[list, list]:
        return self.arguments, []


def _run_once(function, *, kernel_arguments=None, **_) -> float:
    """A benchmark: some examples check what it computed. Microseconds of no meaning."""
    if kernel_arguments is not None:
        function(*kernel_arguments.args, **kernel_arguments.kwargs)
    return 1.0


def _encode_tiled(
    driver, dtype, rank, address, dims, strides, box, steps, interleave, swizzle, promotion, fill
) -> tuple:
    """The driver's function of that name, in Python."""
    try:
        raw = encode_tiled(
            int(dtype), int(address), *(list(map(int, v)) for v in (dims, strides, box, steps)),
            interleave=int(interleave), swizzle=int(swizzle), fill=int(fill),
        )  # fmt: skip
    except ValueError:
        return driver.CUresult.CUDA_ERROR_INVALID_VALUE, None
    made = driver.CUtensorMap()
    made.opaque = [driver.cuuint64_t(word) for word in struct.unpack("<16Q", raw)]
    return driver.CUresult.CUDA_SUCCESS, made


class Launcher:
    """Launcher of compiled functions in the simulator, in place of the driver's.

    Args:
        schedules: each launch runs in all of them, from the same memory; the script goes on with
            what the last one wrote.
        races: whether to check happens-before.
        models: whether to model the time of the first launch of each kernel, too.
    """

    def __init__(
        self, schedules: Sequence[str] = ("eager",), races: bool = True, models: bool = False
    ):
        self.schedules, self.races, self.models = tuple(schedules), races, models
        self.report = MergedReport()
        self.modelled: list[Modelled] = []

    def install(self, multiprocessors: int) -> None:
        """Replace the compiler's execution of compiled functions."""
        import cutlass.testing
        from cuda.bindings import driver
        from cuda.bindings import runtime as cudart
        from cutlass.base_dsl.jit_executor import JitCompiledFunction
        from cutlass.cute import runtime
        from cutlass.cutlass_dsl import tvm_ffi_provider
        from cutlass.utils import hardware_info

        on_host = JitCompiledFunction.run_compiled_program

        def run_compiled_program(compiled, arguments: list):
            if not compiled.has_gpu_module:
                return on_host(compiled, arguments)
            return self.run(_Packed(compiled, arguments))

        JitCompiledFunction.run_compiled_program = run_compiled_program
        # Both kinds of TVM FFI functions get a Python callable for the native one.
        tvm_ffi_provider.TVMFFIJitCompiledFunctionBase._create_tvm_ffi_function = lambda compiled: (
            functools.partial(self.run_tvm_ffi, compiled)
        )
        positional = tvm_ffi_provider.TVMFFIJitCompiledFunction
        positional.__init__ = tvm_ffi_provider.TVMFFIJitCompiledFunctionBase.__init__
        positional.__call__ = self.run_tvm_ffi
        wrap = runtime._Tensor.__init__

        def on_cuda(tensor, source, *arguments, **keywords):
            if isinstance(source, torch.Tensor):
                source = CudaView(source)
            wrap(tensor, source, *arguments, **keywords)

        runtime._Tensor.__init__ = on_cuda
        hardware = hardware_info.HardwareInfo
        hardware.__init__ = lambda info, device_id=0: None
        hardware.get_max_active_clusters = lambda info, cluster_size, *_, **__: (
            multiprocessors // cluster_size
        )
        hardware.get_l2_cache_size_in_bytes = lambda info: 1 << 26
        hardware.get_device_multiprocessor_count = lambda info: multiprocessors
        for module in (cutlass.testing, cutlass.cute.testing):
            module.benchmark = _run_once
        for module, success in (
            (driver, driver.CUresult.CUDA_SUCCESS), (cudart, cudart.cudaError_t.cudaSuccess)
        ):  # fmt: skip
            for name, member in vars(module).copy().items():
                if name.startswith("cu") and not isinstance(member, type) and callable(member):
                    value = _DRIVER_VALUES.get(name.removeprefix("cuda").removeprefix("cu"), 0)
                    result = (success, value)
                    setattr(module, name, lambda *_, _result=result, **__: _result)
        driver.cuTensorMapEncodeTiled = functools.partial(_encode_tiled, driver)

    def run_tvm_ffi(self, compiled, *arguments) -> None:
        """Simulate one call of a function that takes tensors as they are."""
        if compiled.execution_args.has_pointer_address_arg_specs:
            arguments, _ = compiled.execution_args.convert_python_pointer_args_for_tvm_ffi(
                arguments, {}
            )
        self.run(compiled, *arguments)

    def run(self, compiled, *arguments) -> int:
        """Simulate one call; returns the success code of the CUDA runtime."""
        self.simulate(functools.partial(simulate, compiled, *arguments))
        return 0

    def simulate(self, call: Callable[..., Report]) -> None:
        """Make a call under every schedule; it takes `schedule`, `races` and `buffers`."""
        with torch._C.DisableTorchFunction():  # tensors are what they are
            # Kernels may hold addresses of any tensor there is.
            live = tuple(
                t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.is_cpu
                and t.layout == torch.strided
            )  # fmt: skip
            if self.models:
                self._model(call, live)
            run_schedules(
                lambda schedule: call(schedule=schedule, races=self.races, buffers=live),
                live,
                self.schedules,
                self.report,
            )

    def _model(self, call: functools.partial, live: tuple[torch.Tensor, ...]) -> None:
        """Model the time of a call, and leave memory as it was."""
        is_ptx = call.func is simulate_ptx
        subject = single_launch(*call.args, **call.keywords) if is_ptx else call.args[0]
        arguments = call.keywords["params"] if is_ptx else call.args[1:]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in live}
        before = {start: storage.clone() for start, storage in storages.items()}
        known = {modelled.launch.kernel for modelled in self.modelled}
        # Clusters that wait for others cannot be modelled alone.
        with contextlib.suppress(SimulatorError):
            found = predict(subject, *arguments, buffers=live)
            self.modelled += [
                Modelled(found.machine, x) for x in found.launches if x.kernel not in known
            ]
        for start, storage in storages.items():
            storage.copy_(before[start])


def run_script(
    script: Path,
    arguments: Sequence[str],
    arch: str,
    launcher: Launcher,
    paths: Sequence[Path] = (),
) -> None:
    """Run a CuTeDSL script as `__main__` in this process; its launches go to `launcher`.

    Args:
        script, arguments: the file and its command line.
        arch: "sm_100a" or "sm_90a", the GPU that the script believes in.
        paths: folders that it may import from, beside its own.
    """
    folder = tempfile.mkdtemp(prefix="dsv4-simulator-")
    os.environ.update(_NO_CACHES)
    for compiler in ("CUTE_DSL", "CUTE_EXPERIMENTAL_DSL"):
        for name, value in {
            "ARCH": arch, "KEEP": "ptx", "LINEINFO": "1", "DUMP_DIR": folder,
            "DISABLE_FILE_CACHING": "1",
        }.items():  # fmt: skip
            os.environ[f"{compiler}_{name}"] = value
    # That PTX is kept is the simulator's wish, not the script's.
    warnings.filterwarnings("ignore", message="Cache is disabled")
    environment = CpuOnly(arch)
    environment.install()
    launcher.install(environment.multiprocessors)
    if importlib.util.find_spec("triton") is not None:
        triton.install(launcher.simulate, environment.capability, environment.multiprocessors)
    script = script.resolve()
    sys.path[:0] = [str(script.parent), *map(str, paths)]
    sys.argv = [str(script), *arguments]
    try:
        with named():
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
