"""A whole mixture-of-experts layer under test: each launch for what it was given, and the result
as a whole."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.kernels.kit.args import scalars_of
from dsv4.kernels.moe.config import K_BLOCK
from dsv4.kernels.moe.layer_config import NVFP4_GROUP, MoeConfig
from dsv4.kernels.moe.routing import gate_tiling
from dsv4.kernels.moe.scratch import scratch_bytes, sections
from dsv4.ops.moe.op import MOE
from dsv4.ops.moe.torch_path import route
from dsv4.ops.moe.weights import E4M3_NAN, GatedWeights
from dsv4.ops.quantize import quantize_e4m3, quantize_nvfp4
from dsv4.ops.runtime.backend import Device
from dsv4.ops.runtime.tensors import absent
from dsv4.testing.fp8_linear import TRUNCATION
from dsv4.testing.harness import Call, Outcome
from dsv4.testing.kernel_call import OpInputs
from dsv4.testing.moe import (
    MATRICES,
    UNWRITTEN,
    Case,
    Inputs,
    assert_experts_close,
    swiglu,
    whole_scales,
)
from dsv4.testing.moe_router import WEIGHT_ERROR

MAX_RELATIVE_ERROR = 1e-2  # where codes of h may tip
# Where few elements add up, as of one token, a few codes are more than that: so many times what the
# oracle moves at most, in so many draws, where all sums are off at random as Hopper's FP8
# accumulator makes them: at Flash's size 64 tokens by 4e-3 to 5e-3, one of them by 1e-2 to 1.4e-2.
CONTROL_FACTOR, CONTROL_DRAWS = 2.0, 8
SCALING = 1.5
LOGIT = 4.0  # of chosen experts, where the case says which; that of all others is as negative


def layer_config(case: Case, is_hashed: bool = False, form: str | None = None) -> MoeConfig:
    """The operator's configuration of a case, its weights prepared."""
    return MoeConfig(
        case.hidden, case.inner, case.experts, case.top_k, case.expert_dtype, case.shared_dtype,
        "bfloat16",
        case.scale_dtype, form=case.scale_form if form is None else form, is_hashed=is_hashed,
        scaling=SCALING, limit=case.limit, out_dtype=case.out_dtype,
    )  # fmt: skip


@dataclass(frozen=True)
class LayerInputs(OpInputs):
    """Tensors of a layer: experts and activations (`Inputs`, whose routing is not used), a gate,
    and a bias or a table.

    Attributes:
        has_codes: whether the call gets x in FP8, too.
    """

    op = MOE

    inputs: Inputs
    gate: Tensor
    bias: Tensor
    table: Tensor
    input_ids: Tensor
    is_hashed: bool = False
    has_codes: bool = False

    @classmethod
    def make(
        cls, case: Case, seed: int, device: torch.device | str = "cpu", is_hashed: bool = False
    ) -> LayerInputs:
        generator = torch.Generator(device).manual_seed(seed)
        options = {"generator": generator, "device": device}
        gate = torch.randn(case.experts, case.hidden, **options) * case.hidden**-0.5
        bias = torch.randn(case.experts, **options) * 0.2
        if case.one_expert:
            bias[-1] = 1000.0
        rows = 64
        table = torch.rand(rows, case.experts, **options).argsort(1)[:, : case.top_k]
        if case.has_missing:
            table = torch.where(torch.rand(table.shape, **options) < 0.2, case.experts, table)
        ids = torch.randint(0, rows, (case.tokens,), **options)
        inputs = Inputs.make(case, seed, device)
        if case.is_graded:
            # Each expert has a channel of its own.
            gate, bias = torch.eye(case.experts, case.hidden, device=device), torch.zeros_like(bias)
            inputs.x[:, : case.experts] = -LOGIT
            inputs.x.scatter_(1, inputs.ids.clamp_min(0).long(), LOGIT)
        return cls(inputs, gate.bfloat16(), bias, table.contiguous(), ids, is_hashed)

    @property
    def case(self) -> Case:
        return self.inputs.case

    def first(self, tokens: int) -> LayerInputs:
        """The same with the first tokens alone."""
        ids = self.input_ids[:tokens]
        return replace(self, inputs=self.inputs.first(tokens), input_ids=ids)

    @property
    def choice(self) -> dict[str, Tensor]:
        """What chooses experts, by the names of `moe` and `route`."""
        if self.is_hashed:
            return {"table": self.table, "input_ids": self.input_ids}
        return {"bias": self.bias}

    def weights(self, is_prepared: bool) -> tuple[GatedWeights, GatedWeights]:
        """Routed and shared weights, prepared or as released."""
        found = []
        for part in (self.inputs.routed, self.inputs.shared):
            own = [part[name] for name in MATRICES]
            if is_prepared:
                own = [weight.prepared(self.case.scale_form) for weight in own]
            scales = [weight.whole for weight in own if weight.whole is not None]
            scales += [weight.inputs for weight in own if weight.inputs is not None]
            whole = torch.stack(scales) if scales else None
            found.append(GatedWeights(*(w.codes for w in own), *(w.scale for w in own), whole))
        return found[0], found[1]

    @property
    def config(self) -> MoeConfig:
        return layer_config(self.case, self.is_hashed)

    @property
    def arguments(self) -> dict[str, Tensor | None]:
        """By the table's names: weights prepared, scratch of ones, lists of `UNWRITTEN`."""
        case, x = self.case, self.inputs.x
        size = scratch_bytes(self.config, case.tokens)
        found = {
            "x": x, "gate": self.gate,
            "bias": self.bias[: 0 if self.is_hashed else None],
            "table": self.table[: None if self.is_hashed else 0],
            "input_ids": self.input_ids[: None if self.is_hashed else 0],
            "scratch": torch.full((size,), 0xFF, dtype=torch.uint8, device=x.device),
        }  # fmt: skip
        start = sections(self.config, case.tokens, gate_tiling(self.config.routing, case.tokens)[0])
        found["scratch"][start["pairs"] : start["counts"]] = UNWRITTEN & 0xFF
        weights = self.weights(is_prepared=True)
        whole = weights[0].global_scales
        found["global_scales"] = self.bias.new_empty((0, case.experts)) if whole is None else whole
        for prefix, part in zip(("", "shared_"), weights):
            for name, codes, scale in zip(MATRICES, part.codes, part.scales, strict=True):
                key = f"{prefix}{name}_scale"
                found |= {prefix + name: codes, key: self._scale(key, scale)}
        if self.has_codes:
            codes, scale = quantize_e4m3(x, K_BLOCK)
            found |= {"x_codes": codes, "x_scale": scale}
        if case.live is not None:
            found["live_tokens"] = torch.tensor([case.live], dtype=torch.int32, device=x.device)
        return found

    def _scale(self, name: str, scale: Tensor | None) -> Tensor:
        """Of weights that have none, one without rows."""
        if scale is not None:
            return scale
        arg = next(arg for arg in MOE.tensors if arg.name == name)
        return absent(arg, MOE.values(self.config), self.bias.device)

    def call_tiled(self, tiling: int, device: Device) -> Call:
        """A call of the compiled kernels with one of the experts' tilings."""
        scalars = MOE.scalars(self.config, self.case.tokens, tiling, device)
        names = [scalar.name for scalar in scalars_of(MOE.args)]
        return self.call(device, **dict(zip(names, scalars, strict=True)))

    def routing(self) -> tuple[Tensor, Tensor]:
        """ids and weights [T, k] by plain torch in fp64; no expert for padding."""
        x = self.inputs.x.cpu().double()
        choice = {name: tensor.cpu() for name, tensor in self.choice.items()}
        ids, weights = route(
            x.float(), self.gate.cpu(), top_k=self.case.top_k, scaling=SCALING, **choice
        )
        live = torch.arange(len(x)) < self.case.num_live
        return torch.where(live[:, None], ids, -1), torch.where(live[:, None], weights, 0.0)


def assert_layer_close(outcome: Outcome, inputs: LayerInputs, is_model: bool = False) -> None:
    """Fail where the routing, or any step from there on, is further off than its bound; each is
    compared for what the kernels had before it, and the whole as `assert_whole_close` does."""
    case, scratch = inputs.case, outcome.scratch["scratch"]
    tokens, k = case.tokens, case.top_k
    config = inputs.config
    start = sections(config, tokens, gate_tiling(config.routing, tokens)[0])

    def found(name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        size = dtype.itemsize * torch.Size(shape).numel()
        return scratch[start[name] : start[name] + size].view(dtype).view(shape)

    ids = found("ids", torch.int32, tokens, k)
    weights = found("weights", torch.float32, tokens, k)
    wanted_ids, wanted_weights = inputs.routing()
    # A choice between scores that agree to rounding is the router's test's affair.
    same = (ids == wanted_ids).all(1)
    assert same.float().mean() >= 0.99 or int((~same).sum()) <= 1, "ids: other experts"
    off = (weights - wanted_weights)[same].abs()
    is_nan = (weights.isnan() & wanted_weights.isnan())[same]
    assert ((off <= WEIGHT_ERROR * SCALING) | is_nan).all(), f"weights: off by {off.max():.2e}"
    device = inputs.inputs.x.device
    routed = replace(inputs.inputs, ids=ids.to(device), weights=weights.to(device))
    h_rows = tokens * (k + 1)
    h = {
        "h_codes": found("h_codes", torch.float8_e4m3fn, h_rows, case.inner),
        "h_scale": found("h_scale", torch.uint8, h_rows, case.inner // K_BLOCK),
    }
    if case.rounds_to_nvfp4:
        h |= _packed(found, inputs)
    elif not case.is_tiled:
        h["h"] = found("h", torch.bfloat16, h_rows, case.inner)
    steps = {
        **h,
        "rows": found("rows", torch.bfloat16, tokens, k + 1, case.hidden),
        "y": outcome["out"],
    }
    assert_experts_close(Outcome(steps, {}), routed)
    assert_whole_close(outcome["out"], routed, is_model)


def _packed(found, inputs: LayerInputs) -> dict[str, Tensor]:
    """Rows of h in NVFP4, once those of x are as they must be."""
    case, x = inputs.case, inputs.inputs.x
    groups, pairs = NVFP4_GROUP, case.tokens * case.top_k
    whole = found("packed_whole", torch.float32, 1)
    wanted = whole_scales(inputs.inputs.routed, 0)[0]
    assert torch.equal(whole[0], wanted.cpu()), f"scale of x: got {whole}, needs {wanted}"
    codes, scales = quantize_nvfp4(x, wanted.expand(1))
    own = (
        found("packed", torch.uint8, case.tokens, case.hidden // 2),
        found("packed_scales", torch.uint8, case.tokens, case.hidden // groups),
    )
    scales = scales.view(torch.uint8).cpu()
    assert torch.equal(own[1], scales), f"x: {int((own[1] != scales).sum())} scales are others"
    # A code beside a NaN is none.
    is_number = (scales & E4M3_NAN != E4M3_NAN).repeat_interleave(groups // 2, 1)
    off = is_number & (own[0] != codes.cpu())
    assert not off.any(), f"x: {int(off.sum())} pairs of codes are others"
    return {
        "packed_h": found("packed_h", torch.uint8, pairs, case.inner // 2),
        "packed_h_scales": found("packed_h_scales", torch.uint8, pairs, case.inner // groups),
    }


def expected(inputs: Inputs, truncation: float = 0.0, draw: int = 0) -> Tensor:
    """y [T, D] in fp64 for given routing: sums in fp64, h rounded to bf16 and to e4m3.

    Args:
        truncation: error of the sums of FP8 products, at random, relative to what they are by the
            norm: a control.
        draw: seed of that.
    """
    case = inputs.case
    x, ids = inputs.x, inputs.ids.long()
    total = torch.zeros_like(x, dtype=torch.float64)
    live = torch.arange(len(x), device=x.device) < case.num_live
    units = [(e, (ids == e).nonzero(as_tuple=True)) for e in ids.unique().tolist() if e >= 0]
    units.append((None, (live.nonzero()[:, 0], None)))
    generator = torch.Generator(x.device).manual_seed(draw)
    for expert, (tokens, slots) in units:
        part = inputs.shared if expert is None else inputs.routed
        w1, w3, w2 = (part[name].dense(expert) for name in MATRICES)
        down = part["w2"]
        factor = x.new_ones(len(tokens)) if slots is None else inputs.weights[tokens, slots]
        of_x, of_h = whole_scales(part, expert)
        own = down.activations(x[tokens], of_x)
        off = 0.0 if down.is_bf16 else truncation
        gate, up = (_sums(own, weight, off, generator) for weight in (w1, w3))
        h, *_ = swiglu(gate, up, factor.double()[:, None], case.limit)
        read = down.activations(h.bfloat16(), of_h)
        total[tokens] += _sums(read, w2, off, generator)
    return total


def _sums(x: Tensor, weight: Tensor, truncation: float, generator: torch.Generator) -> Tensor:
    """x [n, K] weight [m, K]^T in fp64, each moved by this part of the root of its squared terms'
    sum, at random."""
    sums = x @ weight.T
    if not truncation:
        return sums
    noise = torch.randn(sums.shape, generator=generator, device=x.device, dtype=x.dtype)
    off = noise * (x.square() @ weight.square().T).sqrt() * truncation
    return torch.where(sums.isfinite(), sums + off, sums)


def assert_whole_close(actual: Tensor, inputs: Inputs, is_model: bool = False) -> None:
    """Fail where a token's result is further from the oracle than tipping codes explain.

    Args:
        is_model: whether all tokens together must be within `MAX_RELATIVE_ERROR`, as those of the
            models' sizes are.
    """
    wanted = expected(inputs)
    actual = actual.to(wanted.device).double()
    lost = actual.isfinite() != wanted.isfinite()
    assert not lost.any(), f"y: {int(lost.sum())} elements are finite where they should not be"
    if is_model:
        whole = float(_relative(actual.reshape(1, -1), wanted.reshape(1, -1)))
        assert whole <= MAX_RELATIVE_ERROR, f"y: relative error {whole:.2e}"
    relative = _relative(actual, wanted)
    if (relative <= MAX_RELATIVE_ERROR).all():
        return
    controls = [
        _relative(expected(inputs, TRUNCATION, draw), wanted) for draw in range(CONTROL_DRAWS)
    ]
    allowed = (torch.stack(controls).amax() * CONTROL_FACTOR).clamp(min=MAX_RELATIVE_ERROR)
    assert (relative <= allowed).all(), (
        f"y: relative error {float(relative.max()):.2e} of a token, needs {float(allowed):.2e}"
    )


def _relative(actual: Tensor, wanted: Tensor) -> Tensor:
    """Error of each token by its norm; elements that are not finite count as equal."""
    finite = wanted.isfinite()
    off = torch.where(finite, actual - wanted, 0.0).norm(dim=1)
    return off / torch.where(finite, wanted, 0.0).norm(dim=1).clamp(min=1e-30)
