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
from dsv4.kernels.attention.launch_plan import workspace_size
from dsv4.kernels.attention.sm90.fmha import build
from tests.simulator.hardware.case import Tolerance
from tests.simulator.hardware.inputs import random_words, small_integers, uniform
from tests.simulator.kernels.gemm_sm90 import GemmSm90
from tests.simulator.kernels.gemm_sm90_pipelined import PipelinedGemmSm90
from tests.simulator.support import OPTIONS, compile_kernel

NAN = float("nan")
UNIT = 3**0.5  # uniform numbers up to this have variance 1


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
class Call:
    """Arguments of a compiled function; `results` are those of them that it writes."""

    args: tuple
    options: dict[str, Any]
    results: dict[str, Tensor]

    def to(self, device: str) -> Call:
        """The same call on copies of the tensors on a device."""
        copies: dict[int, Tensor] = {}

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in copies:
                # As strided as the original: an operand's major is in its strides.
                copy = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=device
                )
                copies[id(value)] = copy.copy_(value)
            return copies[id(value)]

        return Call(
            tuple(moved(x) for x in self.args),
            {name: moved(x) for name, x in self.options.items()},
            {name: moved(x) for name, x in self.results.items()},
        )


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
    c = torch.full((m, n), NAN)
    return Call((a, b, c), {}, {"c": c})


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
@dataclass(frozen=True)
class Shape:
    """One call of the attention kernel. Windows and compressed rows are ragged, and the last token
    is padding, where `ragged`; otherwise all rows are visible."""

    config: FmhaConfig
    tokens: int
    rows: int
    width: int
    splits: int
    ragged: bool
    every: int  # elements of o between those that are kept
    requests: int = 2
    scale: float = 1.0  # of q
    sink: float | None = None  # of all heads

    def call(self) -> Call:
        """Inputs, the same on every machine, and poisoned outputs."""
        heads, dim = self.config.num_query_heads, self.config.head_dim

        def normal(seed: str, *shape: int) -> Tensor:
            count = torch.Size(shape).numel()
            return torch.from_numpy(uniform(seed, count, -UNIT, UNIT)).reshape(shape)

        q = (normal("q", self.tokens, heads, dim) * self.scale).bfloat16()
        compressed = normal("compressed", self.tokens, self.rows, dim).bfloat16()
        window = normal("window", self.requests, self.width, dim).bfloat16()
        sinks = normal("sinks", heads)
        if self.sink is not None:
            sinks.fill_(self.sink)
        requests = torch.arange(self.tokens, dtype=torch.int32) % self.requests
        lens = torch.full((self.requests,), self.width, dtype=torch.int32)
        compressed_lens = torch.full((self.tokens,), self.rows, dtype=torch.int32)
        if self.ragged:
            requests[-1] = -1
            lens = _lengths("lens", self.requests, self.width)
            compressed_lens = _lengths("compressed lens", self.tokens, self.rows)
            compressed[torch.arange(self.rows) >= compressed_lens[:, None]] = NAN
            window[torch.arange(self.width) >= lens[:, None]] = NAN
        partials = 0
        if self.splits > 1:
            partials = workspace_size(self.config, self.tokens, self.splits)
        o, lse = torch.full_like(q, NAN), torch.full((self.tokens, heads), NAN)
        options = {
            "compressed_lens": compressed_lens,
            "lse": lse,
            "workspace": torch.zeros(partials),
            "num_splits": self.splits,
            "num_ctas": 3,  # fewer than work items: each CTA goes through several
        }
        args = (q, compressed, window, lens, sinks, requests, o)
        return Call(args, options, {"o": o, "lse": lse})


def _lengths(seed: str, count: int, most: int) -> Tensor:
    return torch.from_numpy((random_words(seed, count) % (most + 1)).astype("int32"))


@cache
def _attention_kernel(config: FmhaConfig) -> Any:
    folder = tempfile.mkdtemp(prefix="dsv4-simulator-tests-")
    return build(config, f"--gpu-arch sm_90a --dump-dir {folder} {OPTIONS}")


# o is bf16: a different order of the sums moves weights by a bf16 step here and there, each of one
# key's weight, and the results to the neighbouring value. lse is float32 throughout.
_ATTENTION_TOLERANCE = Tolerance(ulp=1, absolute=2.0**-12)
_LSE_TOLERANCE = Tolerance(absolute=2.0**-17)


def _attention(name: str, shape: Shape) -> KernelCase:
    return KernelCase(
        f"attention {name}",
        partial(_attention_kernel, shape.config),
        shape.call,
        {"o": Output(_ATTENTION_TOLERANCE, shape.every), "lse": Output(_LSE_TOLERANCE)},
    )


def _attentions() -> Iterator[KernelCase]:
    def config(dim: int, heads: int, mode: str, is_causal: bool = False) -> FmhaConfig:
        return FmhaConfig(dim, heads, 20, 1024, is_causal, mode)

    for mode in ("swa_gate", "softmax"):
        flash = Shape(config(512, 64, mode), 2, 512, 128, 1, ragged=False, every=29)
        yield _attention(f"512 x 64, {mode}", flash)
        split = Shape(config(512, 8, mode), 3, 300, 100, 3, ragged=True, every=7)
        yield _attention(f"512 x 8, 3 splits, ragged, {mode}", split)
        causal = Shape(config(128, 72, mode, True), 4, 130, 70, 1, ragged=True, every=17)
        yield _attention(f"128 x 72, causal, ragged, {mode}", causal)
        small = Shape(config(64, 16, mode, True), 5, 200, 90, 2, ragged=True, every=3)
        yield _attention(f"64 x 16, 2 splits, causal, ragged, {mode}", small)
        steep = Shape(config(256, 8, mode), 2, 320, 64, 1, ragged=False, every=3, scale=8.0)
        yield _attention(f"256 x 8, steep, {mode}", steep)
        for sink in (float("inf"), -float("inf")):
            extreme = Shape(config(64, 8, mode), 3, 130, 70, 3, ragged=True, every=1, sink=sink)
            yield _attention(f"64 x 8, sinks {sink}, {mode}", extreme)


@cache
def kernel_cases() -> dict[str, KernelCase]:
    """All cases by name."""
    return {case.name: case for case in (*_gemms(), *_attentions())}
