"""Every projection of the released models on a GPU: time beside the floor, and beside peers.

A projection is measured as a layer calls it: several weights of one input in a launch, the output
projection in groups, the head in bf16. Peers get each weight by itself, FP8 ones with codes of the
input made before: cuBLAS one scale for each tensor, which is less work, and weights of groups in
bf16; DeepGEMM the same scales as ours, and groups with FP8 activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4 import ops
from dsv4.bench import fp8_linear, merged_linear, targets
from dsv4.bench.linear_peers import NAMES, Peer, Product
from dsv4.bench.machine import Machine
from dsv4.bench.packages import reason_of
from dsv4.bench.rows import each_shape
from dsv4.bench.timing import graph_microseconds
from dsv4.kernels.gemm.config import K_BLOCK
from dsv4.ops.fp8_linear import MODEL_LAYERS
from dsv4.ops.grouped_linear import GROUPED_LINEAR, MODEL_GROUPS
from dsv4.ops.merged_linear import MODEL_INPUTS
from dsv4.ops.plain_linear import MODEL_HEADS
from dsv4.ops.quantize import quantize_e4m3

TOKENS = (1, 4, 16, 64, 128, 256, 1024, 4096)
CODED = ("wq_b", "wo_b")  # layers of which a step has the input as codes
CHAIN_LAUNCHES, CHAIN_SIZES = 12, ((8192, 4096), (4096, 8192))
COLUMNS = (
    "projection", "T", "us", "GB/s", "floor us", "of floor", "of FP8 rate",
    *(f"{name} us" for name in NAMES), "error", *targets.COLUMNS,
)  # fmt: skip

Call = Callable[[], object]


class Calls(NamedTuple):
    """A projection of inputs of its own.

    Attributes:
        ours: returns y, or several.
        products: the same for peers, one for each weight; none: there is nothing to compare with.
        exact: y in fp32, or several.
    """

    ours: Call
    products: Sequence[Product]
    exact: Call


class Projection:
    """Products of one call of a layer.

    Attributes:
        launches: that are counted, one after the other.
        error: that outputs may have, relative to products in fp32, by the norm.
    """

    launches = 1
    error = fp8_linear.MAX_RELATIVE_ERROR

    def bytes(self, tokens: int) -> int:
        """Weights and scales are read, inputs, too; outputs are written."""
        raise NotImplementedError

    def half_rate_flops(self, tokens: int) -> float:
        """FLOPs in bf16's: FP8 products take half of the time."""
        raise NotImplementedError

    def make(self, tokens: int, device: str) -> Calls:
        """Calls with random inputs of their own."""
        raise NotImplementedError


@dataclass(frozen=True)
class Fp8(Projection):
    """`fp8_linear`, of bf16 inputs or of their codes."""

    rows: int
    width: int
    has_codes: bool = False

    def bytes(self, tokens: int) -> int:
        saved = tokens * self.width - tokens * self.width // K_BLOCK if self.has_codes else 0
        return fp8_linear.Shape(tokens, self.rows, self.width).bytes - saved

    def half_rate_flops(self, tokens: int) -> float:
        return float(tokens * self.rows * self.width)

    def make(self, tokens: int, device: str) -> Calls:
        shape = fp8_linear.Shape(tokens, self.rows, self.width)
        x, weight, scale = fp8_linear.make_inputs(shape, device)
        codes, exponents = quantize_e4m3(x, K_BLOCK)
        call = partial(ops.fp8_linear, x, weight, scale)
        if self.has_codes:
            exponents = exponents.to(torch.float8_e8m0fnu)
            call = partial(ops.fp8_linear, codes, weight, scale, x_scale=exponents)
        exact = partial(fp8_linear.plain, x, weight, scale, torch.float32)
        return Calls(call, [Product(x, weight, scale)], exact)


@dataclass(frozen=True)
class Merged(Projection):
    """`merged_linear` of an input of `MODEL_INPUTS`."""

    label: str

    def bytes(self, tokens: int) -> int:
        return merged_linear.Shape(self.label, tokens).bytes

    def half_rate_flops(self, tokens: int) -> float:
        return merged_linear.Shape(self.label, tokens).half_rate_flops

    def make(self, tokens: int, device: str) -> Calls:
        given = merged_linear.Inputs.make(merged_linear.Shape(self.label, tokens), device)
        count = len(given.scales)

        scales = [*given.scales, *[None] * (len(given.weights) - count)]
        products = [Product(given.x, *pair) for pair in zip(given.weights, scales)]

        def exact() -> list[Tensor]:
            fp8 = zip(given.weights, given.scales)
            return [
                *(fp8_linear.plain(given.x, *pair, torch.float32) for pair in fp8),
                *(torch.mm(given.x.float(), weight.float().mT) for weight in given.weights[count:]),
            ]

        return Calls(given.merged, products, exact)


@dataclass(frozen=True)
class Grouped(Projection):
    """`grouped_linear`, or `grouped_linear_fp8`, whose results are codes.

    Attributes:
        act: what activations are multiplied as; the error of "fp8" is theirs.
    """

    width: int
    rows: int
    groups: int
    gives_codes: bool = False
    act: str = "bf16"

    @property
    def error(self) -> float:
        is_rounded = self.gives_codes or self.act == "fp8"
        return 0.04 if is_rounded else fp8_linear.MAX_RELATIVE_ERROR

    def bytes(self, tokens: int) -> int:
        rows, width = self.groups * self.rows, self.groups * self.width
        output = tokens * rows + tokens * rows // K_BLOCK if self.gives_codes else 2 * tokens * rows
        return rows * self.width * (K_BLOCK**2 + 1) // K_BLOCK**2 + 2 * tokens * width + output

    def half_rate_flops(self, tokens: int) -> float:
        terms = 2.0 if self.act == "bf16" else 1.0  # codes of an activation
        return terms * tokens * self.groups * self.rows * self.width

    def make(self, tokens: int, device: str) -> Calls:
        shape = fp8_linear.Shape(1, self.groups * self.rows, self.width)
        _, weight, scale = fp8_linear.make_inputs(shape, device)
        x = torch.randn(tokens, self.groups * self.width, device=device).bfloat16()

        def exact() -> Tensor:
            config = GROUPED_LINEAR.config(self.width, self.rows, self.groups, out_dtype="float32")
            out = torch.empty(tokens, self.groups * self.rows, device=device)
            GROUPED_LINEAR.torch(config, x, weight, scale, out, None, None)
            return out

        def codes() -> Decoded:
            return Decoded(*ops.grouped_linear_fp8(x, weight, scale))

        rounded_once = partial(ops.grouped_linear, x, weight, scale, act=self.act)
        ours = codes if self.gives_codes else rounded_once
        return Calls(ours, [Product(x, weight, scale, self.groups)], exact)


class Decoded(NamedTuple):
    """Codes of an output, and their scales."""

    codes: Tensor
    scales: Tensor

    def float(self) -> Tensor:
        """What they stand for."""
        groups = self.codes.float().unflatten(1, (-1, K_BLOCK))
        return (groups * self.scales.float()[..., None]).flatten(1)


@dataclass(frozen=True)
class Head(Projection):
    """`plain_linear` of a vocabulary, with fp32 results."""

    width: int
    rows: int

    def bytes(self, tokens: int) -> int:
        return 2 * self.width * (self.rows + tokens) + 4 * tokens * self.rows

    def half_rate_flops(self, tokens: int) -> float:
        return 2.0 * tokens * self.rows * self.width

    def make(self, tokens: int, device: str) -> Calls:
        x = torch.randn(tokens, self.width, device=device).bfloat16()
        weight = torch.randn(self.rows, self.width, device=device).bfloat16()

        def exact() -> Tensor:
            return torch.mm(x.float(), weight.float().mT)

        return Calls(partial(ops.plain_linear, x, weight), [Product(x, weight)], exact)


@dataclass(frozen=True)
class Chain(Projection):
    """Launches of `fp8_linear`, each of the one before; each is compared by itself, since the last
    place of an output may decide a code of the next launch."""

    launches = CHAIN_LAUNCHES

    def _links(self) -> list[Fp8]:
        pairs = CHAIN_LAUNCHES // len(CHAIN_SIZES)
        return [Fp8(*size) for _ in range(pairs) for size in CHAIN_SIZES]

    def bytes(self, tokens: int) -> int:
        return sum(link.bytes(tokens) for link in self._links())

    def half_rate_flops(self, tokens: int) -> float:
        return sum(link.half_rate_flops(tokens) for link in self._links())

    def make(self, tokens: int, device: str) -> Calls:
        shapes = [fp8_linear.Shape(tokens, link.rows, link.width) for link in self._links()]
        first, *_ = found = [fp8_linear.make_inputs(shape, device) for shape in shapes]
        weights = [(weight, scale) for _, weight, scale in found]

        def ours() -> list[Tensor]:
            ys = [first[0]]
            for pair in weights:
                ys.append(ops.fp8_linear(ys[-1], *pair))
            return ys[1:]

        def exact() -> list[Tensor]:
            inputs = [first[0], *ours()[:-1]]
            return [fp8_linear.plain(x, *pair, torch.float32) for x, pair in zip(inputs, weights)]

        return Calls(ours, [], exact)


def _projections() -> dict[str, Projection]:
    """Those of Flash and Pro by label, and the chain."""
    found: dict[str, Projection] = {}
    for label, size in MODEL_LAYERS.items():
        found[label] = Fp8(*size)
        if label.endswith(CODED):
            found[f"{label}, codes"] = Fp8(*size, has_codes=True)
    for label in MODEL_INPUTS:
        found[label] = Merged(label)
    for label, size in MODEL_GROUPS.items():
        found[label] = Grouped(*size)
        found[f"{label}, codes out"] = Grouped(*size, gives_codes=True)
        found[f"{label}, act fp8"] = Grouped(*size, act="fp8")
    for label, size in MODEL_HEADS.items():
        found[label] = Head(*size)
    sizes = " and ".join(f"{rows} x {width}" for rows, width in CHAIN_SIZES)
    return found | {f"chain of {sizes}": Chain()}


PROJECTIONS = _projections()


@dataclass(frozen=True)
class Shape:
    """A projection of `PROJECTIONS`, and tokens."""

    label: str
    tokens: int

    @property
    def projection(self) -> Projection:
        return PROJECTIONS[self.label]


@dataclass(frozen=True)
class Result:
    """Microseconds of a launch, and of peers by their names; `failures`: why some have none;
    `error`: of the outputs against products in fp32; `fp8_share`: of the FP8 rate of the machine,
    bf16 products counted as two."""

    shape: Shape
    microseconds: float
    floor: float
    peers: dict[str, float]
    error: float
    failures: dict[str, str] = field(default_factory=dict)
    fp8_share: float | None = None

    @property
    def gigabytes(self) -> float:
        """GB/s."""
        projection = self.shape.projection
        moved = projection.bytes(self.shape.tokens) / projection.launches
        return moved / self.microseconds / 1e3


def model_shapes() -> list[Shape]:
    """Every projection, from one token to 4,096."""
    return [Shape(label, tokens) for label in PROJECTIONS for tokens in TOKENS]


@each_shape
def measure(shape: Shape, machine: Machine, peers: Sequence[Peer] = ()) -> Result:
    """Measure a shape; nothing is timed that is not right.

    Raises:
        RuntimeError: an output is further from its product in fp32 than its rounding allows.
    """
    projection, tokens = shape.projection, shape.tokens
    moved, flops = projection.bytes(tokens), projection.half_rate_flops(tokens)
    given = [projection.make(tokens, "cuda") for _ in range(weight_sets(projection))]
    exact = given[0].exact()
    error = check(shape, given[0].ours(), exact)
    torch.cuda.empty_cache()
    time = graph_microseconds([calls.ours for calls in given]) / projection.launches
    floor = machine.floor(moved, flops) / projection.launches
    times, failures = {}, {}
    for peer in peers if given[0].products else ():
        try:
            times[peer.name] = time_of(peer, [calls.products for calls in given], exact)
        except (RuntimeError, AssertionError, TypeError) as found:
            failures[peer.name] = reason_of(found)
        torch.cuda.empty_cache()
    share = None
    if machine.fp8_rate is not None:
        share = 2 * flops / projection.launches / (time * 1e-6) / machine.fp8_rate
    return Result(shape, time, floor, times, error, failures, share)


def weight_sets(projection: Projection) -> int:
    """Sets of weights, together several times what L2 holds without inputs and outputs."""
    stored = projection.bytes(0)
    return 1 if stored > fp8_linear.REPLAY_BYTES else round(fp8_linear.REPLAY_BYTES / stored) + 1


def time_of(peer: Peer, sets: Sequence[Sequence[Product]], exact: Any) -> float:
    """Microseconds of a peer for all products of a set.

    Args:
        exact: what those of the first set are in fp32, one or several.

    Raises:
        RuntimeError: a result is further from it than the peer's may be.
    """
    runs = [[peer.prepare(product) for product in products] for products in sets]
    outputs = exact if isinstance(exact, list) else [exact]
    if peer.error is not None:
        for i, (run, expected) in enumerate(zip(runs[0], outputs, strict=True)):
            error = relative_error(run(), expected)
            if not error <= peer.error:
                raise RuntimeError(f"{peer.name}: relative error {error:.1e} of output {i}")

    def call(calls: Sequence[Call]) -> None:
        for each in calls:
            each()

    return graph_microseconds([partial(call, calls) for calls in runs])


def relative_error(actual: Any, expected: Tensor) -> float:
    """By the norm."""
    return float((actual.float() - expected).norm() / expected.norm())


def check(shape: Shape, actual: Any, expected: Any) -> float:
    """The largest error of outputs against products in fp32, relative, by the norm.

    Raises:
        RuntimeError: an error is larger than the projection's.
    """
    pairs = zip(actual, expected, strict=True) if isinstance(actual, list) else [(actual, expected)]
    errors = [relative_error(*pair) for pair in pairs]
    for i, error in enumerate(errors):
        if not error <= shape.projection.error:
            raise RuntimeError(f"{shape}: relative error {error:.1e} of output {i}")
    return max(errors)


def as_row(result: Result) -> dict[str, Any]:
    """A result as records keep it."""
    return {**asdict(result), "gigabytes_per_second": result.gigabytes}


def cells(row: Mapping[str, Any], is_bold: bool = False) -> list[str]:
    """A row of a record under `COLUMNS`."""
    time, shape = row["microseconds"], row["shape"]
    return [
        shape["label"],
        f"{shape['tokens']}",
        f"**{time:.2f}**" if is_bold else f"{time:.2f}",
        f"{row['gigabytes_per_second']:.0f}",
        f"{row['floor']:.2f}",
        f"{row['floor'] / time:.0%}",
        "-" if row["fp8_share"] is None else f"{row['fp8_share']:.0%}",
        *(f"{row['peers'][name]:.1f}" if name in row["peers"] else "-" for name in NAMES),
        f"{row['error']:.1e}",
        *targets.cells(target_of(row)),
    ]


def target_of(row: Mapping[str, Any]) -> targets.Target:
    """The target of a row of a record."""
    return targets.LINEAR.get((row["shape"]["label"], row["shape"]["tokens"]), targets.NONE)
