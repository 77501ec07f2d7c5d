"""`moe` on a GPU: time of whole layers beside the floor of the bytes that their routing needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4 import ops
from dsv4.bench.machine import Machine
from dsv4.bench.timing import graph_microseconds
from dsv4.kernels.moe.config import BF16_DTYPES
from dsv4.kernels.moe.layer_config import NVFP4_GROUP, MoeConfig
from dsv4.ops.moe.op import FORMS, MODEL_LAYERS, MOE, OTHER_LAYERS
from dsv4.ops.moe.torch_path import route
from dsv4.ops.moe.weights import GatedWeights, prepare_
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
COLUMNS = ("layer", "T", "experts", "us", "GB/s", "floor us", "of floor", "torch us")
NVFP4_SCALE = 2.0**-7
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
    """Mean number of distinct experts of a call, and times in microseconds; `peer`: of
    `GroupedPeer`, None where the machine has none."""

    shape: Shape
    distinct: float
    microseconds: float
    floor: float
    peer: float | None = None

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
        if model not in MODEL_LAYERS and (found is None or MOE.serves(config, found.arch)):
            shapes += [Shape(model, tokens) for tokens in FEWER_TOKENS]
    return shapes


def measure(shapes: Sequence[Shape], machine: Machine) -> Iterator[Result]:
    """Measure each shape: router, sort and quantisation included, every call with other tokens.

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
        yield layer.measure(shape, machine)


class GroupedPeer:
    """torch's grouped products of the routed experts, both, with FP8 weights and a scale a row.

    That is less than a layer: tokens are sorted and rounded beforehand, and neither the router, the
    gated unit, the shared expert nor the sum is in it. Weights have twice the bytes of FP4.
    """

    def __init__(self, config: MoeConfig, device: str = "cuda") -> None:
        self.config, self.device = config, device
        self.up = self._weight(2 * config.inner, config.hidden)
        self.down = self._weight(config.hidden, config.inner)

    def _weight(self, rows: int, columns: int) -> Tensor:
        """Codes of finite values, any."""
        shape = (self.config.experts, rows, columns)
        codes = torch.empty(shape, dtype=torch.uint8, device=self.device)
        return codes.random_(0, 0x60).view(torch.float8_e4m3fn)

    def call(self, ids: Tensor) -> Callable[[], object]:
        """A call of both products for tokens with these experts."""
        config, pairs = self.config, ids.numel()
        counts = ids.flatten().long().bincount(minlength=config.experts)
        ends = counts.cumsum(0).int()
        scale = torch.full((pairs,), 2.0**-9, device=self.device)
        inputs = [
            torch.randn(pairs, width, device=self.device).to(torch.float8_e4m3fn)
            for width in (config.hidden, config.inner)
        ]
        scales = [torch.full(w.shape[:2], 2.0**-9, device=self.device) for w in self.weights]

        def products() -> None:
            for codes, weight, of_rows in zip(inputs, self.weights, scales):
                torch._scaled_grouped_mm(
                    codes, weight.mT, scale, of_rows, offs=ends, out_dtype=torch.bfloat16
                )

        return products

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        return self.up, self.down


class Layer:
    """Random weights of a model's layer, prepared."""

    @torch.inference_mode()
    def __init__(self, model: str, device: str = "cuda") -> None:
        self.model, self.device = model, device
        self.config = Shape(model, 1).config
        config = self.config
        found = device_of(torch.cuda.current_device()) if torch.cuda.is_available() else None
        self.form = "packed" if found is None else FORMS[found.arch][0]
        self.experts = self._routed()
        self.gates, self.shared = [], []
        for _ in range(SHARED_SETS):
            gate = torch.randn(config.experts, config.hidden, device=device)
            self.gates.append((gate * config.hidden**-0.5).bfloat16())
            self.shared.append(self._fp8())
        self.bias = torch.zeros(config.experts, device=device)
        self.peer = self._peer() if model in MODEL_LAYERS and found is not None else None

    def _peer(self) -> GroupedPeer | None:
        """What torch has for such experts; None where they do not fit or it cannot."""
        try:
            peer = GroupedPeer(self.config, self.device)
            peer.call(torch.zeros((1, self.config.top_k), dtype=torch.int32, device=self.device))()
            torch.cuda.synchronize()
        except RuntimeError:
            return None
        return peer

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

        whole = torch.full((3, experts), NVFP4_SCALE, **options) if dtype == "nvfp4" else None
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
            self.config, x, self.gates[0], self.bias, *weights[:6],
            none if whole is None else whole, *weights[6:],
            absent, absent, out, absent, None,
        )  # fmt: skip
        return out

    @torch.inference_mode()
    def measure(self, shape: Shape, machine: Machine) -> Result:
        """Time calls that follow each other, each with tokens of its own."""
        config = self.config
        calls, peers, distinct = [], [], 0
        for index in range(CALLS):
            x = torch.randn(shape.tokens, config.hidden, device=self.device).bfloat16()
            gate = self.gates[index % SHARED_SETS]
            ids, _ = route(x, gate, top_k=config.top_k, scaling=1.0, bias=self.bias)
            distinct += ids.unique().numel()
            calls.append(partial(self.call, x, index, out=torch.empty_like(x)))
            if self.peer is not None:
                peers.append(self.peer.call(ids))
        distinct /= CALLS
        floor = machine.floor(shape.bytes(distinct), shape.flops)
        time = graph_microseconds(calls)
        return Result(shape, distinct, time, floor, graph_microseconds(peers) if peers else None)


def as_row(result: Result) -> dict[str, Any]:
    """A result as records keep it."""
    return {**asdict(result), "gigabytes_per_second": result.gigabytes}


def cells(row: Mapping[str, Any], is_bold: bool = False) -> list[str]:
    """A row of a record under `COLUMNS`."""
    time, shape, peer = row["microseconds"], row["shape"], row.get("peer")
    return [
        shape["model"],
        f"{shape['tokens']}",
        f"{row['distinct']:.1f}",
        f"**{time:.1f}**" if is_bold else f"{time:.1f}",
        f"{row['gigabytes_per_second']:.0f}",
        f"{row['floor']:.1f}",
        f"{row['floor'] / time:.0%}",
        "-" if peer is None else f"{peer:.1f}",
    ]
