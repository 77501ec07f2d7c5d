"""Whole compiled sm_90a kernels with their inputs: what a Hopper GPU and the simulator both run."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import cutlass
import torch
from torch import Tensor

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.sm90.fmha import build
from dsv4.testing.attention import Inputs
from dsv4.testing.attention_kernel import attention_call
from dsv4.testing.harness import Call
from tests.simulator.hardware.case import Tolerance
from tests.simulator.hardware.inputs import random_words, small_integers, uniform
from tests.simulator.helpers.support import compile_kernel
from tests.simulator.kernels.gemm_sm90 import GemmSm90
from tests.simulator.kernels.gemm_sm90_pipelined import PipelinedGemmSm90

UNIT = 3**0.5  # uniform numbers up to this have variance 1
REQUESTS = 2
FEW_CTAS = 3  # fewer than work items: each CTA goes through several


@dataclass(frozen=True)
class Output:
    """How an output is compared.

    Args:
        tolerance: of each element; None means the same bits.
        every: elements between those that are kept, 1 for all.
    """

    tolerance: Tolerance | None = None
    every: int = 1


@dataclass(frozen=True)
class KernelCase:
    """A kernel, the inputs of one call, and how each output is compared."""

    name: str
    compile: Callable[[], Any]
    make: Callable[[], Call]
    outputs: dict[str, Output]

    def identity(self) -> str:
        """Digest of the inputs and of what is kept: a golden of others is stale."""
        digest = hashlib.blake2b(digest_size=8)
        call = self.make()
        # A workspace is scratch: what it holds at first is no input.
        options = (value for name, value in call.options.items() if name != "workspace")
        for value in (*call.args, *options):
            raw = _bytes(value) if isinstance(value, Tensor) else str(value).encode()
            digest.update(raw)
        digest.update(repr([(name, out.every) for name, out in self.outputs.items()]).encode())
        return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


# --- GEMM ----------------------------------------------------------------------------------------
EXACT = {"c": Output()}


def _rounded(depth: int) -> dict[str, Output]:
    """Sums below 32 in magnitude: where float32 rounds, the tensor core cuts off, one unit in the
    last place or 2^-19 at most for each product of 16 along K."""
    return {"c": Output(Tolerance(absolute=depth / 16 * 2.0**-19), every=61)}


def _operand(seed: str, rows: int, columns: int, exact: bool, major: str, dtype) -> Tensor:
    count = rows * columns
    values = small_integers(seed, count, 4) if exact else uniform(seed, count, -1, 1)
    matrix = torch.from_numpy(values).reshape(rows, columns).to(dtype)
    return matrix if major == "k" else matrix.T.contiguous().T


def _gemm_call(sizes: tuple[int, int, int], exact: bool, majors: str, dtype: torch.dtype) -> Call:
    m, n, k = sizes
    a = _operand("gemm a", m, k, exact, majors[0], dtype)
    b = _operand("gemm b", n, k, exact, majors[1], dtype)
    c = torch.empty(m, n)
    return Call((a, b, c), outputs={"c": c}).poisoned()


def _gemm(name: str, kernel: Any, sizes, majors: str = "kk", dtype=torch.bfloat16):
    """Two cases: small integers, whose sums every order gives exactly, and fractions."""
    compiled = cache(lambda: compile_kernel(kernel, "sm_90a", *call(True).args))

    def call(exact: bool) -> Call:
        return _gemm_call(sizes, exact, majors, dtype)

    yield KernelCase(f"{name}, integers", compiled, partial(call, True), EXACT)
    yield KernelCase(f"{name}, fractions", compiled, partial(call, False), _rounded(sizes[2]))


def _gemms() -> Iterator[KernelCase]:
    for majors in ("kk", "mk", "kn", "mn"):
        yield from _gemm(f"gemm {majors}", GemmSm90(), (128, 256, 192), majors)
    kernel = GemmSm90(cutlass.Float16)
    yield from _gemm("gemm f16", kernel, (64, 256, 320), dtype=torch.float16)
    # More k blocks than stages, and several clusters.
    for cluster in ((1, 1), (2, 1), (2, 2)):
        kernel = PipelinedGemmSm90((128, 128, 64), cluster)
        yield from _gemm(f"pipelined gemm {cluster[0]}x{cluster[1]}", kernel, (512, 256, 576))


# --- attention -----------------------------------------------------------------------------------
def _attention_call(
    config: FmhaConfig,
    tokens: int,
    rows: int,
    width: int,
    splits: int,
    ragged: bool,
    scale: float = 1.0,
    sink: float | None = None,
) -> Call:
    """One call, the same on every machine, with poisoned outputs.

    Args:
        rows, width: compressed rows of a token, window rows of each of two requests.
        ragged: lengths of every kind, and the last token is padding; else all rows are visible.
        scale: of q.
        sink: of all heads, instead of one each.
    """
    heads, dim = config.num_query_heads, config.head_dim

    def normal(seed: str, *shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        return torch.from_numpy(uniform(seed, count, -UNIT, UNIT)).reshape(shape)

    inputs = Inputs(
        q=(normal("q", tokens, heads, dim) * scale).bfloat16(),
        compressed_kv=normal("compressed", tokens, rows, dim).bfloat16(),
        swa_kv=normal("window", REQUESTS, width, dim).bfloat16(),
        swa_lens=torch.full((REQUESTS,), width, dtype=torch.int32),
        sink_logits=normal("sinks", heads),
        request_ids=torch.arange(tokens, dtype=torch.int32) % REQUESTS,
        compressed_lens=torch.full((tokens,), rows, dtype=torch.int32),
        sink_mode=config.sink_mode,
        is_causal=config.is_causal,
        sliding_window=config.sliding_window,
    )
    if sink is not None:
        inputs.sink_logits.fill_(sink)
    if ragged:
        inputs.request_ids[-1] = -1
        inputs.swa_lens.copy_(_lengths("lens", REQUESTS, width))
        inputs.compressed_lens.copy_(_lengths("compressed lens", tokens, rows))
        masked = torch.arange(rows) >= inputs.compressed_lens[:, None]
        inputs.compressed_kv[masked] = torch.nan
        inputs.swa_kv[torch.arange(width) >= inputs.swa_lens[:, None]] = torch.nan
    return attention_call("sm_90a", inputs, splits, FEW_CTAS).poisoned()


def _lengths(seed: str, count: int, most: int) -> Tensor:
    return torch.from_numpy((random_words(seed, count) % (most + 1)).astype("int32"))


@cache
def _attention_kernel(config: FmhaConfig) -> Any:
    folder = tempfile.mkdtemp(prefix="dsv4-simulator-tests-")
    return build(config, f"--gpu-arch sm_90a --dump-dir {folder} --enable-tvm-ffi --keep-ptx")


# o is bf16: a different order of the sums moves weights by a bf16 step here and there, each of one
# key's weight, and the results to the neighbouring value. lse is float32 throughout.
_ATTENTION_TOLERANCE = Tolerance(ulp=1, absolute=2.0**-12)
_LSE_TOLERANCE = Tolerance(absolute=2.0**-17)


def _attention(name: str, config: FmhaConfig, *sizes: int, every: int, **options) -> KernelCase:
    """A case of `_attention_call`; `every`: elements of o between those that are kept."""
    return KernelCase(
        f"attention {name}",
        partial(_attention_kernel, config),
        partial(_attention_call, config, *sizes, **options),
        {"o": Output(_ATTENTION_TOLERANCE, every), "lse": Output(_LSE_TOLERANCE)},
    )


def _attentions() -> Iterator[KernelCase]:
    def config(dim: int, heads: int, mode: str, is_causal: bool = False) -> FmhaConfig:
        return FmhaConfig(dim, heads, 20, 1024, is_causal, mode)

    for mode in ("swa_gate", "softmax"):
        flash = config(512, 64, mode)
        yield _attention(f"512 x 64, {mode}", flash, 2, 512, 128, 1, ragged=False, every=29)
        few = config(512, 8, mode)
        name = f"512 x 8, 3 splits, ragged, {mode}"
        yield _attention(name, few, 3, 300, 100, 3, ragged=True, every=7)
        causal = config(128, 72, mode, True)
        name = f"128 x 72, causal, ragged, {mode}"
        yield _attention(name, causal, 4, 130, 70, 1, ragged=True, every=17)
        small = config(64, 16, mode, True)
        name = f"64 x 16, 2 splits, causal, ragged, {mode}"
        yield _attention(name, small, 5, 200, 90, 2, ragged=True, every=3)
        wide = config(256, 8, mode)
        name = f"256 x 8, steep, {mode}"
        yield _attention(name, wide, 2, 320, 64, 1, ragged=False, every=3, scale=8.0)
        for sink in (float("inf"), -float("inf")):
            name = f"64 x 8, sinks {sink}, {mode}"
            extreme = config(64, 8, mode)
            yield _attention(name, extreme, 3, 130, 70, 3, ragged=True, every=1, sink=sink)


@cache
def kernel_cases() -> dict[str, KernelCase]:
    """All cases by name."""
    return {case.name: case for case in (*_gemms(), *_attentions())}
