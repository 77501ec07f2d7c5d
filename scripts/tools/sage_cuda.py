"""SageAttention's CUDA quantisers in the simulator, against dsv4's torch code, and in FP4 its
kernel for Blackwell: equal bytes.

Their device code is cut from a clone, compiled to PTX by nvcc, and runs on the CPU. IEEE divides
there, and so does nvcc without `--use_fast_math`, which the official build has: `sage_gpu.py` shows
what that changes. Part of `scripts/sage_parity`.
"""

from __future__ import annotations

import itertools
import math
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from dsv4.compat import sageattention as ours
from dsv4.kernels.lowp.groups import Groups
from dsv4.ops.quantized_attention import quantizers as q8
from dsv4.ops.quantized_attention.quantize_kv import QUANTIZE_KV
from dsv4.simulator.frontend.ptx_text import simulate_ptx
from dsv4.testing.harness import simulator
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.lowp import Case
from dsv4.testing.lowp_codes import KvInputs

# Headers of the host's part, which is cut away.
HOST_HEADERS = (
    "torch/extension.h", "torch/all.h", "torch/python.h", "torch/nn/functional.h",
    "ATen/cuda/CUDAContext.h", "c10/cuda/CUDAGuard.h",
)  # fmt: skip
FUSED = ("csrc/fused/fused.cu", "void quant_per_block_int8_cuda(", "sm_90a")
FP4 = (
    "sageattention3_blackwell/sageattn3/quantization/fp4_quantization_4d.cu",
    "void scaled_fp4_quant(",
    "sm_100a",
)
# What is coded of rows, and the official kernel of it.
FP4_FORMS = {
    "rows": "scaled_fp4_quant_kernelILj{}ELj128ELb0E{}",
    "rows in order": "scaled_fp4_quant_kernelILj{}ELj128ELb1E{}",
    "columns": "scaled_fp4_quant_trans_kernelILj{}ELj128E{}",
}
TYPES = {torch.bfloat16: ("nv_bfloat16", "13__nv_bfloat16"), torch.float16: ("half", "6__half")}
THREADS, PACK = 1024, 8  # of a CTA at most; channels that a thread of it loads at a time
SIZES = ((200, 64), (333, 128))
KINDS = ("normal", "bias", "outlier", "zeros")
# Blocks of rows with one scale: of a warp's queries, and of a tile's.
BLOCKS = (16, 32, 64, 128)
# Rows of keys within 32 as the official FP4 kernel wants them.
PERMUTED = tuple(8 * (i % 8 // 2) + 2 * (i // 8) + i % 2 for i in range(32))


def rows_of(kind: str, rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    """[rows, dim] of a kind."""
    x = torch.randn(rows, dim)
    if kind == "bias":
        x += 8 * torch.randn(1, dim)
    elif kind == "outlier":
        x[:, 3] *= 100
    elif kind == "zeros":
        x[: rows // 2] = 0
        x[:, 5] = 0
    return x.to(dtype)


def nvcc(
    source: Path, which: tuple[str, str], more: list[str], out: Path, flags: list[str]
) -> None:
    """Compile the device code of one file, with further lines behind it.

    Args:
        which: path in the clone, and where the host's part begins.

    Raises:
        SystemExit: no nvcc, no clone, or it does not compile.
    """
    path, host = which
    text = source / path
    if shutil.which("nvcc") is None or not text.is_file():
        raise SystemExit(f"sage_parity: needs nvcc, and {text}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for header in HOST_HEADERS:
            (folder / header).parent.mkdir(parents=True, exist_ok=True)
            (folder / header).write_text("#include <cstdint>\n#include <type_traits>\n")
        device = text.read_text().partition(host)[0]
        (folder / "device.cu").write_text("\n".join((device, *more)))
        command = [
            "nvcc", *flags, "-std=c++17", "-I", name, "-I", str(text.parent), "-o", str(out),
            str(folder / "device.cu"),
        ]  # fmt: skip
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode:
            raise SystemExit(f"sage_parity: nvcc: {found.stderr[-2000:]}")


def compiled(source: Path, which: tuple[str, str, str], instances: list[str]) -> str:
    """PTX of the device code of one file, with template instances."""
    *part, arch = which
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "device.ptx"
        nvcc(source, tuple(part), instances, out, ["-ptx", f"-arch={arch}"])
        return out.read_text()


def packs(block: int, dim: int) -> int:
    """Rows that a thread codes, as the official launch has it."""
    return -(-block * dim // PACK // THREADS)


class Int8:
    """Official quantisers of int8 and FP8."""

    def __init__(self, source: Path) -> None:
        integers, instances = ", ".join(["const uint32_t"] * 11), []
        for (name, _), dim, block in itertools.product(TYPES.values(), (64, 128), BLOCKS):
            for smooth in ("false", "true"):
                instances.append(
                    f"template __global__ void QuantInt8Kernel<{dim}, {block}, "
                    f"{packs(block, dim)}, false, {smooth}, {name}>"
                    f"({name}*, {name}*, int8_t*, float*, float, {integers});"
                )
        for (name, _), dim in itertools.product(TYPES.values(), (64, 128)):
            integers = ", ".join(["const uint32_t"] * 7)
            instances.append(
                f"template __global__ void TransposePadPermuteKernel<{dim}, 64, true, {name}>"
                f"({name}*, {name}*, {integers});"
            )
        for name, _ in TYPES.values():
            integers = ", ".join(["const uint32_t"] * 11)
            instances.append(
                f"template __global__ void MeanScaleKernel<64, false, {name}>"
                f"({name}*, int8_t*, float*, float*, const float, {integers});"
            )
        self.ptx = compiled(source, FUSED, instances)
        self.entries = re.findall(r"\.visible \.entry (\w+)\(", self.ptx)

    def run(self, name: str, grid, block, *params) -> None:
        """Launch the one kernel whose mangled name has `name`."""
        (entry,) = (entry for entry in self.entries if name in entry)
        simulate_ptx(self.ptx, entry, grid=grid, block=(block, 1, 1), params=params, races=False)

    def rows(self, x: Tensor, block: int, mean: Tensor | None) -> tuple[Tensor, Tensor]:
        """Codes [rows, dim] and scales of blocks of rows, of which a mean is taken off."""
        (rows, dim), (_, mangled) = x.shape, TYPES[x.dtype]
        count = -(-rows // block)
        codes, scale = torch.zeros(rows, dim, dtype=torch.int8), torch.zeros(count)
        several, has_mean = packs(block, dim), int(mean is not None)
        name = f"QuantInt8KernelILj{dim}ELj{block}ELj{several}ELb0ELb{has_mean}E{mangled}"
        strides = (rows * dim, dim, rows * dim)
        self.run(
            name, (count, 1, 1), block * dim // PACK // several, x, 0 if mean is None else mean,
            codes, scale, 0, rows, *strides, dim, dim, *strides, count, count,
        )  # fmt: skip
        return codes, scale

    def columns(self, x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
        """FP8 codes [dim, rows padded] and scales of channels."""
        (rows, dim), (_, mangled) = x.shape, TYPES[x.dtype]
        padded = -(-rows // 64) * 64
        moved = torch.zeros(dim, padded, dtype=x.dtype)
        name = f"TransposePadPermuteKernelILj{dim}ELj64ELb1E{mangled}"
        self.run(
            name, (padded // 64, 1, 1), 64 * dim // PACK, x, moved, rows, rows * dim, dim,
            rows * dim, dim * padded, padded, dim * padded,
        )  # fmt: skip
        codes, scale, mean = torch.zeros(dim, padded, dtype=torch.int8), *torch.zeros(2, dim)
        bits = int(torch.tensor(largest).view(torch.int32))
        strides = (dim * padded, padded, dim * padded)
        self.run(
            f"MeanScaleKernelILj64ELb0E{mangled}", (1, 1, dim), 256, moved, codes, mean, scale,
            bits, rows, *strides, *strides, dim, dim, dim, dim,
        )  # fmt: skip
        return codes, scale


def differences(name: str, found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
    """Print how many elements differ; whether none does."""
    off = [int((a.view(b.dtype) != b).sum()) for a, b in zip(found, wanted, strict=True)]
    print(f"{name}: differing codes {off[0]}, scales {off[1]}")
    return not any(off)


def compare(source: Path) -> bool:
    """Codes and scales of every official CUDA quantiser: whether all are equal."""
    return all([compare_int8(source), compare_fp4(source)])


def compare_int8(source: Path) -> bool:
    """Those of int8 rows and FP8 columns."""
    official, is_right = Int8(source), True
    for kind, (rows, dim), dtype in itertools.product(KINDS, SIZES, TYPES):
        x = rows_of(kind, rows, dim, dtype)
        label = f"{kind}, {rows} x {dim}, {dtype}"
        for block, smooth in itertools.product(BLOCKS, (False, True)):
            mean = x.float().mean(0).to(dtype) if smooth else None
            wide = x.float() if mean is None else x.float() - mean.float()
            codes, scale = q8.quantize_rows(wide, Groups(1, 1, block), "cuda")
            name = f"int8, {block} rows{', without their mean' * smooth}, {label}"
            found = codes, scale.flatten()
            is_right &= differences(name, found, official.rows(x, block, mean))
        for largest in (448.0, 2.25):
            codes, scale, _ = ours.per_channel_fp8(x[None, None], "HND", largest, smooth_v=False)
            wanted = official.columns(x, largest)
            # Of a channel of zeros the official code has NaN.
            some = x.float().abs().amax(0) > 0
            found = codes[0, 0].view(torch.int8)[some], scale[0, 0][some]
            name = f"FP8 columns up to {largest}, {label}"
            is_right &= differences(name, found, tuple(y[some] for y in wanted))
    return is_right


def compare_fp4(source: Path) -> bool:
    """Those of FP4 blocks: rows, rows in the order of the official kernel's keys, columns."""
    official, is_right, kernels = Fp4(source), True, {}
    for kind, dim, dtype in itertools.product(KINDS, (64, 128), TYPES):
        x, wanted = rows_of(kind, 256, dim, dtype), {}
        for form in FP4_FORMS:
            wide = in_form(x, form)
            wanted[form] = official.run(x, form)
            found, of = q8.quantize_fp4(wide.float().contiguous())
            pair = q8.pack_fp4(found), of.view(torch.uint8)
            is_right &= differences(f"FP4, {form}, {kind}, {dim}, {dtype}", pair, wanted[form])
        if (dim, dtype) not in kernels:
            kernels[dim, dtype] = KernelFp4(dim, dtype)
        for form, pair in kernels[dim, dtype].run(x).items():
            name = f"FP4 by the kernel, {form}, {kind}, {dim}, {dtype}"
            is_right &= differences(name, pair, wanted[form])
    return is_right


def in_form(x: Tensor, form: str) -> Tensor:
    """What is coded of rows [rows, dim]: rows, rows in another order, or columns."""
    if form == "columns":
        return x.T
    return (
        x if form == "rows" else x.unflatten(0, (-1, 32))[:, torch.tensor(PERMUTED)].flatten(0, 1)
    )


class Fp4:
    """Official quantisers of FP4."""

    def __init__(self, source: Path) -> None:
        instances = []
        pointers, integers = "uint8_t*, uint8_t*", ", ".join(["int"] * 12)
        for (name, _), dim in itertools.product(TYPES.values(), (64, 128)):
            for flags in ("<{}, 128, false, {}>", "<{}, 128, true, {}>"):
                instances.append(
                    f"template __global__ void scaled_fp4_quant_kernel{flags.format(dim, name)}"
                    f"(const {name}*, {pointers}, {integers});"
                )
            instances.append(
                f"template __global__ void scaled_fp4_quant_trans_kernel<{dim}, 128, {name}>"
                f"(const {name}*, {pointers}, {integers});"
            )
        self.ptx = compiled(source, FP4, instances)
        self.entries = re.findall(r"\.visible \.entry (\w+)\(", self.ptx)

    def run(self, x: Tensor, form: str) -> tuple[Tensor, Tensor]:
        """Packed codes and scales of rows in a form."""
        name = FP4_FORMS[form].format(x.shape[1], TYPES[x.dtype][1])
        (entry,) = (entry for entry in self.entries if name in entry)
        return official_fp4(self.ptx, entry, x, in_form(x, form).shape)


class KernelFp4:
    """dsv4's kernel of FP4 codes, for the same numbers as keys and as values."""

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        options = {"qk": "nvfp4", "smooth_k": False}
        self.inputs = KvInputs.make(Case(1, 1, 1, 1, 256, dim, dtype=dtype, options=options), 0)
        self.kernels = OpKernels(QUANTIZE_KV, simulator("sm_100a"))
        self.compiled = self.kernels.compile(self.inputs.config)

    def run(self, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Packed codes and scales of rows [rows, dim] and of columns, in the order of blocks."""
        config, (rows, dim) = self.inputs.config, x.shape
        inputs = KvInputs(config, x[None, None], x[None, None])
        found = self.kernels.run(inputs, 0, 1, self.compiled)
        k_scale = q8.out_of_scale_order(found["k_scale"][0, 0].view(torch.uint8), 128)
        v_scale = q8.out_of_scale_order(found["v_block_scale"][0, 0].view(torch.uint8), dim)
        return {
            "rows": (found["k_codes"][0, 0], k_scale.reshape(rows, dim // 16)),
            "columns": tuple(
                part.transpose(0, 1).reshape(dim, -1) for part in (found["v_codes"][0, 0], v_scale)
            ),
        }


def official_fp4(ptx: str, entry: str, x: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Packed codes and scales, these in the order of blocks, of rows of `shape`."""
    (rows, dim), (lines, columns) = x.shape, shape
    codes = torch.zeros(lines, columns // 2, dtype=torch.uint8)
    scale = torch.zeros(lines * columns // 16, dtype=torch.uint8)
    strides = [
        (math.prod(each), math.prod(each), each[-1])
        for each in ((rows, dim), (lines, columns // 2), (lines, columns // 16))
    ]
    simulate_ptx(
        ptx, entry, grid=(rows // 128, 1, 1), block=(128 * dim // 16, 1, 1), races=False,
        params=(x, codes, scale, 1, 1, rows, *itertools.chain(*strides)),
    )  # fmt: skip
    # Scales lie in tiles of 64 rows and four blocks.
    row, block = torch.arange(lines)[:, None], torch.arange(columns // 16)[None]
    place = row // 64 * 64 * (columns // 16) + block // 4 * 256 + block % 4
    return codes, scale[place + row % 64 // 16 * 4 + row % 16 * 16]
