"""SageAttention's CUDA quantisers as a library that needs no torch, and calls of it.

Their device code is cut from a clone; the host's part here launches as the official one does. They
are compiled twice, with the official flags and with these and IEEE's division: `div.approx.ftz.f32`
or `div.rn.ftz.f32` is all that the two differ by.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.tools.sage_cuda import FUSED, nvcc

FLAGS = (
    "-O3", "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__", "--use_fast_math",
    "-diag-suppress=174", "-gencode", "arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler",
    "-fPIC", "-cudart", "shared",
)  # fmt: skip
IEEE = "--prec-div=true"
LAUNCH = """
#define HEADS int b, int h, int n, cudaStream_t stream
#define HEADS_GIVEN b, h, n, stream

template <int D, int BLOCK, bool HAS_SCALE, bool HAS_MEAN, typename T>
static int rows_of(void *x, void *mean, int8_t *codes, float *scale, float factor, int count,
                   HEADS) {
  constexpr int packs = (BLOCK * (D / 8) + 1023) / 1024;
  QuantInt8Kernel<D, BLOCK, packs, HAS_SCALE, HAS_MEAN, T>
      <<<dim3(count, h, b), BLOCK * (D / 8) / packs, 0, stream>>>(
          (T *)x, (T *)mean, codes, scale, factor, n, h * n * D, D, n * D, h * D, D, h * n * D, D,
          n * D, h * count, count);
  return (int)cudaGetLastError();
}

template <int D, int BLOCK, typename T>
static int rows_of(void *x, void *mean, int8_t *codes, float *scale, float factor, int count,
                   HEADS) {
  auto *f = mean         ? rows_of<D, BLOCK, false, true, T>
            : factor > 0 ? rows_of<D, BLOCK, true, false, T>
                         : rows_of<D, BLOCK, false, false, T>;
  return f(x, mean, codes, scale, factor, count, HEADS_GIVEN);
}

template <int D, typename T>
static int rows_of(int block, void *x, void *mean, int8_t *codes, float *scale, float factor,
                   int count, HEADS) {
  auto *f = block == 16   ? rows_of<D, 16, T>
            : block == 32 ? rows_of<D, 32, T>
            : block == 64 ? rows_of<D, 64, T>
                          : rows_of<D, 128, T>;
  return f(x, mean, codes, scale, factor, count, HEADS_GIVEN);
}

template <int D, typename T>
static int columns_of(void *x, void *moved, int8_t *codes, float *mean, float *scale,
                      float largest, HEADS) {
  int padded = (n + 63) / 64 * 64;
  TransposePadPermuteKernel<D, 64, true, T><<<dim3(padded / 64, h, b), 64 * (D / 8), 0, stream>>>(
      (T *)x, (T *)moved, n, h * n * D, D, n * D, h * D * padded, padded, D * padded);
  auto *kernel = mean ? MeanScaleKernel<64, true, T> : MeanScaleKernel<64, false, T>;
  kernel<<<dim3(h, b, D), 256, 0, stream>>>(
      (T *)moved, codes, mean, scale, largest, n, h * D * padded, padded, D * padded,
      h * D * padded, padded, D * padded, h * D, D, h * D, D);
  return (int)cudaGetLastError();
}

template <int D, typename T>
static int without_mean_of(void *x, void *mean, void *out, HEADS) {
  constexpr int rows = D == 128 ? 64 : 128, packs = (rows * (D / 8) + 1023) / 1024;
  SubMeanKernel<D, rows, packs>
      <<<dim3((n + rows - 1) / rows, h, b), rows * (D / 8) / packs, 0, stream>>>(
          (T *)x, (T *)mean, (half *)out, n, h * n * D, D, n * D, h * D, D, h * n * D, D, n * D);
  return (int)cudaGetLastError();
}

#define OF_DIM_AND_TYPE(f)                                                                \\
  (d == 64 ? (is_half ? f<64, half> : f<64, nv_bfloat16>)                                   \\
           : (is_half ? f<128, half> : f<128, nv_bfloat16>))

extern "C" int int8_rows(int is_half, int d, int block, void *x, void *mean, int8_t *codes,
                         float *scale, float factor, int count, HEADS) {
  return OF_DIM_AND_TYPE(rows_of)(block, x, mean, codes, scale, factor, count, HEADS_GIVEN);
}

extern "C" int fp8_columns(int is_half, int d, void *x, void *moved, int8_t *codes, float *mean,
                           float *scale, float largest, HEADS) {
  return OF_DIM_AND_TYPE(columns_of)(x, moved, codes, mean, scale, largest, HEADS_GIVEN);
}

extern "C" int without_mean(int is_half, int d, void *x, void *mean, void *out, HEADS) {
  return OF_DIM_AND_TYPE(without_mean_of)(x, mean, out, HEADS_GIVEN);
}
"""


class Quantisers:
    """The official quantisers of tensors [B, H, S, d] on a GPU, d 64 or 128."""

    def __init__(self, source: Path, library: Path, is_ieee: bool) -> None:
        """Compile a clone's to a library, and load it."""
        flags = [*FLAGS, *[IEEE] * is_ieee]
        nvcc(source, FUSED[:2], [LAUNCH], library, flags)
        self.library = ctypes.CDLL(str(library))

    def call(self, name: str, x: Tensor, *arguments: Any) -> None:
        """Launch on torch's stream."""
        batch, heads, rows, dim = x.shape
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        given = [_argument(one) for one in arguments]
        is_half = int(x.dtype == torch.float16)
        status = getattr(self.library, name)(is_half, dim, *given, batch, heads, rows, stream)
        if status:
            raise RuntimeError(f"{name}: CUDA error {status}")

    def rows(
        self, x: Tensor, block: int, mean: Tensor | None = None, factor: float = 0.0, tile: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Codes and scales [B, H, blocks] of blocks of rows, of which a mean is taken off, or which
        a factor multiplies; of all blocks of a tile of rows."""
        count = -(-x.shape[2] // max(tile, block)) * (max(tile, block) // block)
        codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
        scale = torch.empty(*x.shape[:2], count, device=x.device)
        self.call("int8_rows", x, block, x, mean, codes, scale, factor, count)
        return codes, scale

    def columns(
        self, x: Tensor, largest: float, smooth: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """FP8 codes [B, H, d, rows padded], scales and means [B, H, d]."""
        batch, heads, rows, dim = x.shape
        shape = (batch, heads, dim, -(-rows // 64) * 64)
        moved = torch.empty(shape, dtype=x.dtype, device=x.device)
        codes = torch.empty(shape, dtype=torch.int8, device=x.device)
        scale = torch.empty(batch, heads, dim, device=x.device)
        mean = torch.empty_like(scale) if smooth else None
        self.call("fp8_columns", x, x, moved, codes, mean, scale, largest)
        return codes, scale, mean

    def without_mean(self, x: Tensor, mean: Tensor) -> Tensor:
        """Values without their mean, in fp16."""
        out = torch.empty(x.shape, dtype=torch.float16, device=x.device)
        self.call("without_mean", x, x, mean, out)
        return out


def _argument(one: Any) -> Any:
    if one is None:
        return ctypes.c_void_p(0)
    if isinstance(one, Tensor):
        assert one.is_contiguous()
        return ctypes.c_void_p(one.data_ptr())
    return ctypes.c_float(one) if isinstance(one, float) else int(one)
