"""`moe` on a GPU: time of whole layers beside the floor of the bytes that their routing needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4 import ops
from dsv4.bench import targets
from dsv4.bench.machine import Machine
from dsv4.bench.moe_peers import NAMES, Peer
from dsv4.bench.packages import reason_of
from dsv4.bench.timing import graph_microseconds
from dsv4.kernels.moe.config import BF16_DTYPES
from dsv4.kernels.moe.layer_config import NVFP4_GROUP, MoeConfig
from dsv4.ops.moe.op import FORMS, MODEL_LAYERS, MOE, OTHER_LAYERS
from dsv4.ops.moe.torch_path import route
from dsv4.ops.moe.weights import GatedWeights, choose_form, prepare_
from dsv4.ops.runtime.backend import device_of

TOKENS = (1, 4, 16, 64, 128, 256, 1024, 4096)
FEWER_TOKENS = (1, 4, 16, 64, 256)
# Those of `MODEL_LAYERS` and in other formats.
LAYERS = {
    **MODEL_LAYERS,
    **OTHER_LAYERS,
    "Flash-BF16": replace(MODEL_LAYERS["Flash"], expert_dtype="bfloat16"),
}
# Of a weight of the routed experts, its scales included.
BYTES = {"fp4": 0.5 + 1 / 32, "fp8": 1 + 4 / 128**2, "nvfp4": 0.5 + 1 / 16, "bfloat16": 2}
CALLS = 24  # of a graph, each with tokens of its own, and so with experts of its own
SHARED_SETS = 8  # of the shared expert and the gate: together several times L2
CHECKED_TOKENS = 16
# Of y, against the torch implementation, which rounds gate and up to bf16: codes of h tip.
MAX_RELATIVE_ERROR = 6e-2
COLUMNS = (
    "layer", "T", "experts", "us", "GB/s", "floor us", "of floor", "of FP8 rate",
    *(f"{name} us" for name in NAMES), *targets.COLUMNS,
)  # fmt: skip
MAX_SKEW = 0.03  # of the mean number of distinct experts from that of uniform routing
NVFP4_SCALE = 2.0**-7
INPUT_SCALE = 2.0**-8  # of blocks of up to 10
NamedPeer = tuple[str, Callable[[MoeConfig, str], Peer]]
# What another package's functions raise for sizes that they do not have.
PEER_ERRORS = (RuntimeError, AssertionError, TypeError, ValueError, IndexError, KeyError)
FP4_EXPONENT, FP8_EXPONENT = 120, 119  # of most scales


@dataclass(frozen=True)
class Shape:
    """A model of `LAYERS`, and tokens."""

    model: str
    tokens: int

    @property
    def config(self) -> MoeConfig:
        return replace(LAYERS[self.model], form="packed")

    def bytes(self, distinct: float) -> float:
        """Routed experts that some token uses, the shared one and the gate are read; x and y, in
        bf16, once each."""
        config = self.config
        matrix = config.hidden * config.inner
        shared = 3 * matrix * (1 + 1 / (128 * 128))
        gate = 2 * config.experts * config.hidden
        rows = 2 * 2 * self.tokens * config.hidden
        return distinct * 3 * matrix * BYTES[config.expert_dtype] + shared + gate + rows

    @property
    def flops(self) -> float:
        """In bf16: two of FP8 take the time of one."""
        config = self.config
        unit = 2 * self.tokens * 3 * config.hidden * config.inner
        is_bf16 = config.expert_dtype in BF16_DTYPES
        return unit * (config.top_k * (1 if is_bf16 else 0.5) + 0.5)


@dataclass(frozen=True)
class Result:
    """Mean number of distinct experts of a call, and times in microseconds, those of peers by their
    names; `failures`: why some have none; `fp8_share`: of the FP8 rate of the machine."""

    shape: Shape
    distinct: float
    microseconds: float
    floor: float
    peers: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    fp8_share: float | None = None

    @property
    def gigabytes(self) -> float:
        """GB/s."""
        return self.shape.bytes(self.distinct) / self.microseconds / 1e3


def model_shapes() -> list[Shape]:
    """Layers of Flash and Pro, from one token to 4,096; fewer sizes of other formats, where the
    GPU has kernels for them."""
    found = device_of(torch.cuda.current_device()) if torch.cuda.is_available() else None
    shapes = [Shape(model, tokens) for model in MODEL_LAYERS for tokens in TOKENS]
    for model, config in LAYERS.items():
        if model in MODEL_LAYERS:
            continue
        if found is None or MOE.serves(replace(config, form=FORMS[found.arch][0]), found.arch):
            shapes += [Shape(model, tokens) for tokens in FEWER_TOKENS]
    return shapes


def measure(
    shapes: Sequence[Shape], machine: Machine, peers: Sequence[NamedPeer] = ()
) -> Iterator[Result]:
    """Measure each shape: router, sort and quantisation included, every call with other tokens.

    Args:
        peers: names and makers, of `moe_peers.find`.

    Raises:
        RuntimeError: the kernels are further from the torch implementation than roundings allow.
    """
    layer = None
    for shape in shapes:
        if layer is None or layer.model != shape.model:
            layer = None
            torch.cuda.empty_cache()
            layer = Layer(shape.model)
            layer.check()
            if shape.model in MODEL_LAYERS:
                layer.make_peers(peers)
        yield layer.measure(shape, machine)


class Layer:
    """Random weights of a model's layer, prepared."""

    @torch.inference_mode()
    def __init__(self, model: str, device: str = "cuda") -> None:
        self.model, self.device = model, device
        self.config = Shape(model, 1).config
        config = self.config
        found = device_of(torch.cuda.current_device()) if torch.cuda.is_available() else None
        self.forms = FORMS["sm_90a" if found is None else found.arch]
        self.form = self.forms[0]
        self.experts = self._routed()
        self.gates, self.shared = [], []
        for _ in range(SHARED_SETS):
            gate = torch.randn(config.experts, config.hidden, device=device)
            self.gates.append((gate * config.hidden**-0.5).bfloat16())
            self.shared.append(self._fp8())
        self.bias = torch.zeros(config.experts, device=device)
        self.peers: dict[str, Peer] = {}
        self.failures: dict[str, str] = {}

    @torch.inference_mode()
    def make_peers(self, found: Sequence[NamedPeer]) -> None:
        """Weights of peers, of those that can."""
        for name, make in found:
            try:
                self.peers[name] = make(self.config, self.device)
            except PEER_ERRORS as error:
                self.failures[name] = reason_of(error)

    def _routed(self) -> GatedWeights:
        config = self.config
        dtype, experts = config.expert_dtype, config.experts
        if dtype == "fp8":
            return self._fp8(experts)
        options = {"device": self.device}

        def make(rows: int, columns: int) -> tuple[Tensor, Tensor | None]:
            if dtype == "bfloat16":
                weight = torch.empty(experts, rows, columns, dtype=torch.bfloat16, **options)
                return weight.normal_(std=columns**-0.5), None
            shape = (experts, rows, columns // 2)
            codes = torch.randint(-128, 128, shape, dtype=torch.int8, **options)
            if dtype == "fp4":
                return codes, self._exponents((experts, rows, columns // 32), FP4_EXPONENT)
            scale = torch.rand(experts, rows, columns // NVFP4_GROUP, **options) + 0.5
            return codes.view(torch.uint8), scale.to(torch.float8_e4m3fn)

        whole = None
        if dtype == "nvfp4":
            scales = [NVFP4_SCALE] * 3 + [INPUT_SCALE] * (3 if self.form == "tiled" else 0)
            whole = torch.tensor(scales, **options)[:, None].repeat(1, experts)
        return self._prepared(make)._replace(global_scales=whole)

    def _fp8(self, *experts: int) -> GatedWeights:
        def make(rows: int, columns: int) -> tuple[Tensor, Tensor]:
            shape = (*experts, rows, columns)
            codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=self.device)
            for part in codes if experts else [codes]:
                part.copy_(torch.randn(rows, columns, device=self.device))
            scale = self._exponents((*experts, rows // 128, columns // 128), FP8_EXPONENT)
            is_float32 = self.config.scale_dtype == "float32"
            return codes, scale.float() if is_float32 else scale

        return self._prepared(make)

    def _exponents(self, shape: tuple[int, ...], exponent: int) -> Tensor:
        options = {"dtype": torch.uint8, "device": self.device}
        return torch.randint(exponent, exponent + 3, shape, **options).view(torch.float8_e8m0fnu)

    def _prepared(self, make) -> GatedWeights:
        hidden, inner = self.config.hidden, self.config.inner
        pairs = [make(inner, hidden), make(inner, hidden), make(hidden, inner)]
        weights = GatedWeights(*(p[0] for p in pairs), *(p[1] for p in pairs))
        if weights.dtype_name == "fp4":
            self.form = choose_form(weights, self.forms)
        prepare_(weights, self.form)
        return weights

    def call(self, x: Tensor, index: int, **options: Any) -> Tensor:
        """The layer, with one of the gates and shared experts."""
        place, config = index % SHARED_SETS, self.config
        return ops.moe(
            x, self.gates[place], self.experts, self.shared[place], top_k=config.top_k,
            scaling=config.scaling, limit=config.limit, form=self.form, bias=self.bias, **options,
        )  # fmt: skip

    @torch.inference_mode()
    def check(self) -> None:
        """Compare few tokens with the torch implementation."""
        x = torch.randn(CHECKED_TOKENS, self.config.hidden, device=self.device).bfloat16()
        actual, expected = self.call(x, 0).float(), self._plain(x).float()
        error = float((actual - expected).norm() / expected.norm())
        if not error <= MAX_RELATIVE_ERROR:
            raise RuntimeError(f"{self.model}: relative error {error:.1e} of a layer")

    def _plain(self, x: Tensor) -> Tensor:
        """The same layer by the torch implementation, which reads prepared weights, too."""
        out, absent = torch.empty_like(x), torch.empty(0, dtype=torch.int64, device=x.device)
        none = self.bias[:0]
        weights = [
            none if tensor is None else tensor
            for part in (self.experts, self.shared[0])
            for pair in zip(part.codes, part.scales)
            for tensor in pair
        ]
        whole = self.experts.global_scales
        MOE.torch(
            replace(self.config, form=self.form), x, self.gates[0], self.bias, *weights[:6],
            none if whole is None else whole, *weights[6:],
            absent, absent, out, absent, None,
        )  # fmt: skip
        return out

    @torch.inference_mode()
    def measure(self, shape: Shape, machine: Machine) -> Result:
        """Time calls that follow each other, each with tokens of its own."""
        config = self.config
        calls, routings, distinct = [], [], 0
        for index in range(CALLS):
            x = torch.randn(shape.tokens, config.hidden, device=self.device).bfloat16()
            gate = self.gates[index % SHARED_SETS]
            ids, _ = route(x, gate, top_k=config.top_k, scaling=1.0, bias=self.bias)
            distinct += ids.unique().numel()
            calls.append(partial(self.call, x, index, out=torch.empty_like(x)))
            routings.append((x, ids))
        distinct /= CALLS
        check_distinct(shape, distinct)
        floor = machine.floor(shape.bytes(distinct), shape.flops)
        time = graph_microseconds(calls)
        times, failures = {}, dict(self.failures)
        for name, peer in self.peers.items():
            try:
                times[name] = graph_microseconds([peer.call(*given) for given in routings])
            except PEER_ERRORS as error:
                failures[name] = reason_of(error)
        share = None
        if machine.fp8_rate is not None:
            share = 2 * shape.flops / (time * 1e-6) / machine.fp8_rate
        return Result(shape, distinct, time, floor, times, failures, share)


def check_distinct(shape: Shape, distinct: float) -> None:
    """Refuse a mean number of distinct experts unlike that of uniform routing: RuntimeError."""
    config = shape.config
    expected = config.experts * (1 - (1 - config.top_k / config.experts) ** shape.tokens)
    if not abs(distinct / expected - 1) <= MAX_SKEW:
        raise RuntimeError(f"{shape}: {distinct:.1f} distinct experts, expected {expected:.1f}")


def as_row(result: Result) -> dict[str, Any]:
    """A result as records keep it."""
    return {**asdict(result), "gigabytes_per_second": result.gigabytes}


def cells(row: Mapping[str, Any], is_bold: bool = False) -> list[str]:
    """A row of a record under `COLUMNS`."""
    time, shape, peers = row["microseconds"], row["shape"], row.get("peers", {})
    return [
        shape["model"],
        f"{shape['tokens']}",
        f"{row['distinct']:.1f}",
        f"**{time:.1f}**" if is_bold else f"{time:.1f}",
        f"{row['gigabytes_per_second']:.0f}",
        f"{row['floor']:.1f}",
        f"{row['floor'] / time:.0%}",
        "-" if row.get("fp8_share") is None else f"{row['fp8_share']:.0%}",
        *(f"{peers[name]:.1f}" if name in peers else "-" for name in NAMES),
        *targets.cells(target_of(row)),
    ]


def target_of(row: Mapping[str, Any]) -> targets.Target:
    """The target of a row of a record."""
    return targets.MOE.get((row["shape"]["model"], row["shape"]["tokens"]), targets.NONE)
