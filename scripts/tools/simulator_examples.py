#!/usr/bin/env python
"""Run NVIDIA's CuTeDSL examples, unmodified, in the simulator.

    scripts/tools/simulator_examples.py CUTLASS                 # every case, one process each
    scripts/tools/simulator_examples.py CUTLASS mla-fp8 fmha    # some of them
    scripts/tools/simulator_examples.py CUTLASS --run sm_100a FILE [argument ...]   # any example

CUTLASS is a clone of github.com/NVIDIA/cutlass. An example makes its inputs, compiles, launches and
checks its own outputs against PyTorch; here "cuda" tensors stay on the CPU and a launch is a
simulation. A case passes if the example ends without an error.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import runpy
import subprocess
import sys
import tempfile
import time
import tomllib
import types
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path("examples/python/CuTeDSL")
_ALIGNMENT = 256  # of what CUDA allocates
# What functions of the driver and the runtime answer, beside success and 0. The version is newer
# than any that an example asks for.
_DRIVER_VALUES = {"DriverGetVersion": 14000, "DeviceGetCount": 1, "GetDeviceCount": 1}


@dataclass(frozen=True)
class Case:
    """One example with the arguments of a size that simulates within minutes."""

    path: str
    arguments: str = ""
    arch: str = "sm_100a"


def _cases() -> dict[str, Case]:
    """Every case of the table, by name."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return {name: Case(**fields) for name, fields in table.items()}


CASES = _cases()


class CpuOnly:
    """Lets code that asks for CUDA tensors, streams and devices run on a CPU, process-wide."""

    def __init__(self, arch: str):
        self.capability = (9, 0) if arch.startswith("sm_90") else (10, 0)
        self.multiprocessors = 132 if arch.startswith("sm_90") else 148

    def install(self) -> None:
        """Replace torch's CUDA entry points; nothing undoes this."""
        import torch

        mode = _device_mode()
        mode.__enter__()
        properties = types.SimpleNamespace(
            multi_processor_count=self.multiprocessors, major=self.capability[0],
            minor=self.capability[1], name="simulated", total_memory=1 << 37,
            L2_cache_size=1 << 26, shared_memory_per_block_optin=232448, warp_size=32,
        )  # fmt: skip
        stream = types.SimpleNamespace(
            cuda_stream=0, synchronize=lambda: None, wait_stream=lambda other: None
        )
        for name, value in {
            "is_available": True, "device_count": 1, "current_device": 0, "set_device": None,
            "get_device_capability": self.capability, "get_device_properties": properties,
            "get_device_name": "simulated", "synchronize": None, "current_stream": stream,
            "default_stream": stream, "init": None, "empty_cache": None,
        }.items():  # fmt: skip
            setattr(torch.cuda, name, lambda *_, _value=value, **__: _value)
        event = types.SimpleNamespace(
            record=lambda *_: None, synchronize=lambda: None, elapsed_time=lambda other: 1.0
        )
        torch.cuda.Event, torch.cuda.Stream = (lambda **_: event), (lambda **_: stream)
        torch.cuda.stream = lambda _: contextlib.nullcontext()
        table = types.SimpleNamespace(table=lambda **_: "nothing was profiled")
        profile = types.SimpleNamespace(key_averages=lambda: table)
        torch.profiler.profile = lambda **_: contextlib.nullcontext(profile)


def _device_mode():
    """A torch function mode that turns every CUDA device into the CPU."""
    import torch
    from torch.overrides import TorchFunctionMode

    def is_cuda(value) -> bool:
        return isinstance(value, (str, torch.device)) and str(value).startswith("cuda")

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, kinds, arguments=(), keywords=None):
            keywords = keywords or {}
            if function is torch.Tensor.cuda:
                return _as_allocated(arguments[0])
            if function is torch._scaled_mm:
                return _scaled_mm(*arguments, **keywords)
            moved = any(map(is_cuda, (*arguments, *keywords.values())))
            result = function(
                *("cpu" if is_cuda(v) else v for v in arguments),
                **{k: "cpu" if is_cuda(v) else v for k, v in keywords.items()},
            )
            return _as_allocated(result) if moved and isinstance(result, torch.Tensor) else result

    return Mode()


def _as_allocated(tensor):
    """A copy with the same strides, as aligned as CUDA allocations are (kernels rely on it)."""
    import torch

    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()) if n)
    size = max(extent, 1) * tensor.element_size()
    room = torch.zeros(size + _ALIGNMENT, dtype=torch.uint8)
    start = -room.data_ptr() % _ALIGNMENT
    place = room[start : start + size].view(tensor.dtype)
    return torch.as_strided(place, tensor.shape, tensor.stride()).copy_(tensor)


def _scaled_mm(a, b, a_scales, b_scales, bias=None, out_dtype=None):
    """torch._scaled_mm of block-scaled operands, which exists for CUDA only: A [M, K] times B
    [K, N], 16 elements to an e4m3 scale or 32 to an e8m0 one."""
    import torch

    block = 16 if a_scales.dtype == torch.float8_e4m3fn else 32

    def values(tensor):  # [rows, K]
        if tensor.dtype != torch.float4_e2m1fn_x2:
            return tensor.float()
        codes = tensor.view(torch.uint8)
        pairs = torch.stack((codes & 15, codes >> 4), -1).reshape(len(codes), -1).long()
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        return torch.where(pairs < 8, 1.0, -1.0) * table[pairs & 7]

    def scaled(tensor, scales):
        # Scales lie in blocks of 128 rows and 4 columns: [32, 4 groups of 32 rows, 4 columns].
        rows = values(tensor)
        high, wide = -(-len(rows) // 128), -(-rows.shape[1] // (4 * block))
        grid = scales.float().reshape(high, wide, 32, 4, 4).permute(0, 3, 2, 1, 4)
        factors = grid.reshape(128 * high, 4 * wide).repeat_interleave(block, 1)
        return rows * factors[: len(rows), : rows.shape[1]]

    return (scaled(a, a_scales) @ scaled(b.transpose(0, 1), b_scales).T).to(out_dtype)


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


class Launcher:
    """Simulates what compiled functions launch, instead of handing it to a driver."""

    def __init__(self, schedule: str, races: bool):
        self.schedule, self.races = schedule, races
        self.instructions, self.findings = 0, []

    def install(self, multiprocessors: int) -> None:
        """Replace the compiler's execution of compiled functions."""
        import cutlass.testing
        import torch
        from cuda.bindings import driver
        from cuda.bindings import runtime as cudart
        from cutlass.base_dsl.jit_executor import JitCompiledFunction
        from cutlass.cute import runtime
        from cutlass.cutlass_dsl import tvm_ffi_provider
        from cutlass.utils import hardware_info

        from dsv4.simulator import CudaView

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
        hardware.get_max_active_clusters = lambda info, size, *_, **__: multiprocessors // size
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

    def run_tvm_ffi(self, compiled, *arguments) -> None:
        """Simulate one call of a function that takes tensors as they are."""
        if compiled.execution_args.has_pointer_address_arg_specs:
            arguments, _ = compiled.execution_args.convert_python_pointer_args_for_tvm_ffi(
                arguments, {}
            )
        self.run(compiled, *arguments)

    def run(self, compiled, *arguments) -> int:
        """Simulate one call; returns the success code of the CUDA runtime."""
        import torch

        from dsv4.simulator import simulate

        # Kernels may hold addresses of any tensor there is.
        live = tuple(
            t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.is_cpu
            and t.layout == torch.strided
        )  # fmt: skip
        report = simulate(
            compiled, *arguments, schedule=self.schedule, races=self.races, buffers=live
        )
        self.instructions += sum(launch.instructions for launch in report.launches)
        self.findings += report.races
        return 0


def run_script(
    cutlass: Path, arch: str, path: str, arguments: list[str], launcher: Launcher
) -> None:
    """Run one example as `__main__` in this process; its launches go to `launcher`."""
    folder = tempfile.mkdtemp(prefix="dsv4-simulator-examples-")
    for compiler in ("CUTE_DSL", "CUTE_EXPERIMENTAL_DSL"):
        for name, value in {
            "ARCH": arch, "KEEP": "ptx", "LINEINFO": "1", "DUMP_DIR": folder,
            "DISABLE_FILE_CACHING": "1",
        }.items():  # fmt: skip
            os.environ[f"{compiler}_{name}"] = value
    environment = CpuOnly(arch)
    environment.install()
    launcher.install(environment.multiprocessors)
    script = (cutlass / EXAMPLES / path).resolve()
    sys.path[:0] = [str(script.parent), str((cutlass / EXAMPLES).resolve())]
    sys.argv = [str(script), *arguments]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise


def run_example(cutlass: Path, arch: str, path: str, arguments: list[str], options) -> None:
    """Simulate one example in this process and report what it did."""
    launcher = Launcher(options.schedule, options.races)
    start = time.perf_counter()
    run_script(cutlass, arch, path, arguments, launcher)
    seconds = time.perf_counter() - start
    if not launcher.instructions:
        sys.exit(f"{path} launched no kernel")
    for finding in launcher.findings:
        print(finding)
    print(f"{path}: {launcher.instructions} warp instructions, {seconds:.1f} s")


def run_case(cutlass: Path, case: Case, flags: list[str], limit: float) -> tuple[bool, str]:
    """Run a case in a process of its own: (passed, last lines of its output)."""
    command = [sys.executable, __file__, str(cutlass), *flags, "--run", case.arch, case.path]
    try:
        done = subprocess.run(
            [*command, *case.arguments.split()],
            capture_output=True, text=True, check=False, timeout=limit,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False, f"not done after {limit:.0f} s"
    if done.returncode == 0:
        return True, done.stdout.strip().splitlines()[-1]
    return False, "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cutlass", type=Path, help="a clone of github.com/NVIDIA/cutlass")
    parser.add_argument("cases", nargs="*", metavar="case", help=", ".join(CASES))
    parser.add_argument("--schedule", default="eager", choices=("eager", "lazy", "random"))
    parser.add_argument("--races", action="store_true", help="check happens-before too")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one case")
    parser.add_argument("--run", nargs=argparse.REMAINDER, metavar=("ARCH", "FILE"))
    options = parser.parse_args()
    if not (options.cutlass / EXAMPLES).is_dir():
        parser.error(f"{options.cutlass} has no folder {EXAMPLES}")
    if options.run:
        arch, path, *arguments = options.run
        run_example(options.cutlass, arch, path, arguments, options)
        return 0
    unknown = set(options.cases) - set(CASES)
    if unknown:
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    flags = ["--schedule", options.schedule] + ["--races"] * options.races
    failed = 0
    for name in options.cases or CASES:
        passed, text = run_case(options.cutlass, CASES[name], flags, options.limit)
        failed += not passed
        print(f"{'pass' if passed else 'FAIL'}  {name}: {text}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
