"""SageAttention's CUDA and Triton quantisers on a GPU, against dsv4's kernels and torch code there.

Every quantiser runs as it is, and with IEEE's division in place of its own, from the same source:
there no bit may differ, so that what differs else is the division's. Part of `scripts/sage_parity`.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from dsv4.compat import sageattention as ours
from dsv4.kernels.lowp.groups import GEOMETRIES, key_groups, query_groups
from dsv4.ops import quantize_kv
from dsv4.ops.quantized_attention import quantizers as q8
from dsv4.ops.quantized_attention.quantize_kv import QuantizedKV
from dsv4.testing.lowp import official_values
from scripts.tools.sage_cuda import KINDS, TYPES, rows_of
from scripts.tools.sage_quantisers import Quantisers

BATCH, HEADS, ROWS = 2, 3, (333, 4096)
OFFICIAL, IEEE = "official", "IEEE"
Pair = tuple[Tensor, Tensor]


class Table:
    """Comparisons, codes, and scales of each quantiser, and how many of them differ."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], list[int]] = {}

    def add(self, name: str, division: str, found: Pair, wanted: Pair) -> None:
        """Count a comparison: codes of a byte, or of two, and scales."""
        row = self.rows.setdefault((name, division), [0] * 6)
        assert [x.shape for x in found] == [x.shape for x in wanted], name
        codes, scale = (_bits(a) - _bits(b) for a, b in zip(found, wanted, strict=True))
        ulp = int(scale.abs().max()) if scale.numel() else 0
        counts = (1, codes.numel(), int((codes != 0).sum()), scale.numel(), int((scale != 0).sum()))
        row[:] = [*(a + b for a, b in zip(row, counts)), max(row[5], ulp)]

    def show(self) -> bool:
        """Print; whether no bit differs where divisions are IEEE's."""
        heads = ("comparisons", "codes", "differ", "scales", "differ", "ulp")
        print(f"{'quantiser':52} {'division':9}" + "".join(f"{head:>12}" for head in heads))
        for (name, division), row in self.rows.items():
            print(f"{name:52} {division:9}" + "".join(f"{one:12,}" for one in row))
        exact = [row for (_, division), row in self.rows.items() if division == IEEE]
        total = [sum(row[i] for row in exact) for i in range(5)]
        print(f"IEEE division: {total[0]} comparisons, differing codes {total[2]}, "
              f"scales {total[4]}")  # fmt: skip
        return bool(exact) and not total[2] and not total[4]


def _bits(x: Tensor) -> Tensor:
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()]).long()


def heads_of(kind: str, rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    """[B, H, rows, dim] of a kind, on the GPU."""
    parts = [rows_of(kind, rows, dim, dtype) for _ in range(BATCH * HEADS)]
    return torch.stack(parts).unflatten(0, (BATCH, HEADS)).cuda()


def cases(dims: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values of every kind, size and dtype."""
    for dim, dtype, rows, kind in itertools.product(dims, TYPES, ROWS, KINDS):
        torch.manual_seed(0)
        yield tuple(heads_of(kind, rows, dim, dtype) for _ in range(3))


def compare(source: Path, dims: tuple[int, ...]) -> bool:
    """Codes and scales of all quantisers that a Hopper GPU has: whether all are explained."""
    if not torch.cuda.is_available():
        raise SystemExit("sage_parity: gpu needs a Hopper GPU")
    # What runs in torch in place of a kernel proves nothing of the kernel.
    warnings.filterwarnings("error", ".*torch implementation", RuntimeWarning)
    table = Table()
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        for division in (IEEE, OFFICIAL):
            is_ieee = division == IEEE
            cuda = Quantisers(source, Path(name) / f"{division}.so", is_ieee)
            triton = Triton(source, Path(name), is_ieee)
            print(f"{division}: {triton.instructions() or 'compiled'}", flush=True)
            for q, k, v in cases(dims):
                compare_cuda(table, division, cuda, q, k, v)
                compare_triton(table, division, triton, q, k, v)
    return table.show()


def compare_cuda(
    table: Table, division: str, cuda: Quantisers, q: Tensor, k: Tensor, v: Tensor
) -> None:
    """int8 rows with a scale for a warp or a block, FP8 columns, fp16 values."""
    for geometry, tiles in GEOMETRIES.items():
        blocks = {"BLKQ": tiles.block_q, "BLKK": tiles.block_k}
        found = ours.per_warp_int8(q, k, None, WARPQ=tiles.warp_q, **blocks)
        wanted = cuda.rows(q, tiles.warp_q, tile=tiles.block_q)
        table.add("CUDA, queries of a warp: torch", division, found[:2], wanted)
        found = ours.per_block_int8(q, k, None, sm_scale=0.125, **blocks)
        wanted = cuda.rows(q, tiles.block_q, factor=0.125 * ours.LOG2E)
        table.add("CUDA, queries of a block: torch", division, found[:2], wanted)
        for smooth in (False, True):
            # Both largest codes beside both tiles.
            mode = "fp32+fp32" if smooth == (geometry == "sm90") else "fp32+fp16"
            options = {"qk_quant_gran": "per_warp", "geometry": geometry, "pv_accum_dtype": mode}
            kv = quantize_kv(k, v, smooth_k=smooth, **options)
            wanted = cuda.rows(k, tiles.block_k, kv.km)
            name = "CUDA, keys of a block" + ", without their mean" * smooth
            table.add(f"{name}: kernel", division, codes_of(kv), wanted)
            mean = None if kv.km is None else kv.km.unsqueeze(2)
            found = ours.per_warp_int8(q, k, mean, WARPQ=tiles.warp_q, **blocks)
            table.add(f"{name}: torch", division, found[2:], wanted)
            compare_columns(table, division, cuda, v, kv)
    found, mean = ours.sub_mean(v)
    name = "CUDA, fp16 values without their mean: torch"
    table.add(name, division, (found, mean), (cuda.without_mean(v, mean), mean))


def compare_columns(
    table: Table, division: str, cuda: Quantisers, v: Tensor, kv: QuantizedKV
) -> None:
    """FP8 columns, transposed and permuted; without their mean once for each case."""
    # Of a channel of zeros the official code has NaN.
    some = v.float().abs().amax(2) > 0
    largest = kv.config.v_max
    codes, scale, _ = cuda.columns(v, largest)
    wanted = codes[some], scale[some]
    name = f"CUDA, FP8 columns up to {largest:g}"
    found = official_values(kv.v_codes)[..., : codes.shape[-1]].view(torch.int8)
    table.add(f"{name}: kernel", division, (found[some], kv.v_scale[some]), wanted)
    found, scale, _ = ours.per_channel_fp8(v, "HND", largest, smooth_v=False)
    found = found.view(torch.int8)
    table.add(f"{name}: torch", division, (found[some], scale[some]), wanted)
    codes, scale, mean = cuda.columns(v, largest, smooth=True)
    found, own = columns_without(v, mean, largest)
    name = "CUDA, FP8 columns without the official mean"
    table.add(name, division, (found[some], own[some]), (codes[some], scale[some]))


def columns_without(v: Tensor, mean: Tensor, largest: float) -> Pair:
    """FP8 codes and scales as `quantize_columns` has them, with a mean that is given: the official
    one is a sum in another order."""
    padded = q8.pad_rows(v.float(), 64) - mean.unsqueeze(2)
    counted = -(-v.shape[2] // 16) * 16
    amax = padded[:, :, :counted].abs().amax(2)
    factor = torch.full_like(amax, largest) / amax
    codes = q8.in_v_order(q8.round_e4m3(padded * factor.unsqueeze(2)).view(torch.uint8))
    return codes.transpose(2, 3).view(torch.int8), q8.divided(amax, largest)


class Triton:
    """The official Triton quantisers."""

    def __init__(self, source: Path, folder: Path, is_ieee: bool) -> None:
        """Those of a clone; with IEEE's division `div_rn` in place of `/`."""
        self.of_thread, self.of_block = (
            self.module(source, folder, name, is_ieee)
            for name in ("quant_per_thread", "quant_per_block")
        )

    def module(self, source: Path, folder: Path, name: str, is_ieee: bool) -> ModuleType:
        """A module of the official package by itself."""
        path = source / "sageattention" / "triton" / f"{name}.py"
        if not path.is_file():
            raise SystemExit(f"sage_parity: {path} does not exist")
        if is_ieee:
            text, count = re.subn(
                r"= (.+) / (127\.|scale)", r"= tl.math.div_rn(\1, \2)", path.read_text()
            )
            assert count >= 2
            path = folder / f"{name}.py"
            path.write_text(text)
        spec = importlib.util.spec_from_file_location(f"official_{name}_{is_ieee}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def instructions(self) -> str:
        """Divisions and FMAs of a kernel's PTX."""
        x = torch.ones(1, 1, 128, 64, dtype=torch.bfloat16, device="cuda")
        self.of_thread.per_thread_int8(x, x)
        caches = self.of_thread.quant_query_per_thread_int8_kernel.device_caches
        try:
            (compiled,) = next(iter(caches.values()))[0].values()
        except (AttributeError, KeyError, TypeError, ValueError):
            return ""
        found = re.findall(r"\b(?:div|rcp|fma)\.[\w.]*f32", compiled.asm["ptx"])
        return "Triton: " + ", ".join(sorted(set(found)))


def compare_triton(
    table: Table, division: str, triton: Triton, q: Tensor, k: Tensor, v: Tensor
) -> None:
    """int8 rows: scales of threads and of blocks, keys without their mean."""
    for geometry, tiles in GEOMETRIES.items():
        kv = quantize_kv(k, v, geometry=geometry)
        mean = kv.km.unsqueeze(2)
        sizes = {"BLKQ": tiles.block_q, "BLKK": tiles.block_k}
        of_thread = {"WARPQ": tiles.warp_q, "WARPK": tiles.block_k, **sizes}
        wanted = triton.of_thread.per_thread_int8(q, k, mean, **of_thread)
        found = ours.per_thread_int8(q, k, mean, **of_thread)
        name = f"Triton, per_thread, {geometry}"
        table.add(f"{name}, queries: torch", division, found[:2], wanted[:2])
        table.add(f"{name}, keys: torch", division, found[2:], wanted[2:])
        table.add(f"{name}, keys: kernel", division, codes_of(kv), wanted[2:])
        kv = quantize_kv(k, v, geometry=geometry, qk_quant_gran="per_block", quantizer="triton")
        wanted = triton.of_block.per_block_int8(q, k, mean, sm_scale=0.125, **sizes)
        name = f"Triton, per_block, {geometry}"
        wide = q.float() * (0.125 * ours.LOG2E)
        codes, scale = q8.quantize_rows(wide, query_groups("per_block", tiles), "block")
        pair = codes, scale.flatten(2)
        table.add(f"{name}, queries: torch", division, pair, wanted[:2])
        codes, scale = q8.quantize_rows((k - mean).float(), key_groups("per_block", tiles), "block")
        table.add(f"{name}, keys: torch", division, (codes, scale.flatten(2)), wanted[2:])
        table.add(f"{name}, keys: kernel", division, codes_of(kv), wanted[2:])


def codes_of(kv: QuantizedKV) -> Pair:
    """Codes and scales of keys as the official functions return them."""
    return kv.k_codes, kv.k_scale.flatten(2)
