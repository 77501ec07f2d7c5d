"""Other packages' products of the same weights and inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.bench import packages
from dsv4.kernels.gemm.config import K_BLOCK
from dsv4.ops.quantize import dequantize_e4m3_blocks, quantize_e4m3

Call = Callable[[], Tensor]
SCALE_ROWS = 4  # of DeepGEMM's scales, which TMA loads: a column has a multiple of them
CUBLAS, DEEP_GEMM = "cuBLAS", "DeepGEMM"
NAMES = (CUBLAS, DEEP_GEMM)


class Product(NamedTuple):
    """y = x weight^T, of each of `groups` groups of x's columns and the weight's rows."""

    x: Tensor  # [T, groups K] bf16
    weight: Tensor  # [groups M, K] e4m3, or bf16
    scale: Tensor | None = None  # [groups M / 128, K / 128] of e4m3
    groups: int = 1


@dataclass(frozen=True)
class Peer:
    """Another implementation.

    Attributes:
        name: one of `NAMES`.
        prepare: a product -> a call that returns y, with everything done that is not the product:
            codes of the input are made before.
        error: relative, by the norm, that y may have against the product in fp32 of the codes of
            its inputs; None: it is that of other numbers.
    """

    name: str
    prepare: Callable[[Product], Call]
    error: float | None = None


def find(vllm: Path | None = None) -> Iterator[Peer]:
    """Those of this installation.

    Args:
        vllm: folder `vllm` of a vLLM wheel, which has DeepGEMM.

    Raises:
        ValueError: the folder is given and cannot be used.
    """
    yield Peer(CUBLAS, cublas)
    library = packages.deep_gemm(vllm)
    if library is not None:
        yield Peer(DEEP_GEMM, partial(deep_gemm, library), error=0.05)


def cublas(product: Product) -> Call:
    """FP8 products with one scale for each tensor, which is less work; groups in bf16."""
    x, weight, scale, groups = product
    if groups > 1:
        assert scale is not None
        dense = dequantize_e4m3_blocks(weight, scale).unflatten(0, (groups, -1)).mT
        parts = x.unflatten(1, (groups, -1)).transpose(0, 1)
        return partial(torch.bmm, parts, dense)
    if scale is None:
        return partial(torch.mm, x, weight.mT)
    codes, _ = quantize_e4m3(x, K_BLOCK)
    one = torch.ones((), device=x.device)
    return partial(
        torch._scaled_mm, codes, weight.mT, scale_a=one, scale_b=one, out_dtype=torch.bfloat16
    )


def deep_gemm(library: ModuleType, product: Product) -> Call:
    """The same numbers as ours; groups with FP8 activations."""
    x, weight, scale, groups = product
    tokens, rows = x.shape[0], weight.shape[0]
    y = torch.empty(tokens, rows, dtype=torch.bfloat16, device=x.device)
    if scale is None:

        def plain() -> Tensor:
            library.bf16_gemm_nt(x, weight, y)
            return y

        return plain
    codes, exponents = quantize_e4m3(x, K_BLOCK)
    scales, blocks = exponents.float(), scale.float()
    if groups == 1:
        operands = (codes, _by_column(scales)), (weight, blocks)

        def call() -> Tensor:
            library.fp8_gemm_nt(*operands, y, disable_ue8m0_cast=True)
            return y

        return call
    # [T, group, K], of which a group's rows follow each other in memory.
    a = codes.unflatten(1, (groups, -1)).transpose(0, 1).contiguous().transpose(0, 1)
    a_scale = _by_column_of_groups(scales.unflatten(1, (groups, -1)))
    b, b_scale = (tensor.unflatten(0, (groups, -1)) for tensor in (weight, blocks))
    out = y.view(tokens, groups, -1)

    def grouped() -> Tensor:
        library.fp8_einsum(
            "bhr,hdr->bhd", (a, a_scale), (b, b_scale), out, recipe=(1, K_BLOCK, K_BLOCK)
        )
        return y

    return grouped


def _by_column(scales: Tensor) -> Tensor:
    """[T, blocks] fp32 with a block's scales one after the other."""
    return _by_column_of_groups(scales[:, None]).squeeze(1)


def _by_column_of_groups(scales: Tensor) -> Tensor:
    """[T, group, blocks] fp32, a group after the other, of it a block's scales."""
    tokens, groups, blocks = scales.shape
    column = -(-tokens // SCALE_ROWS) * SCALE_ROWS
    found = scales.new_zeros(groups * blocks * column)
    found = found.as_strided((tokens, groups, blocks), (1, blocks * column, column))
    return found.copy_(scales)
