"""The experts of a layer under test: inputs, what they must give, and the comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.kernels.moe.args import ARGS, values
from dsv4.kernels.moe.config import FP4_GROUP, K_BLOCK, ExpertsConfig
from dsv4.kernels.moe.layer_config import NVFP4_GROUP
from dsv4.kernels.moe.layout import MAX_SPREAD
from dsv4.kernels.moe.wide_plan import scale_columns
from dsv4.ops.moe import layout
from dsv4.ops.quantize import (
    dequantize_e2m1,
    dequantize_e4m3_blocks,
    qdq_nvfp4,
    quantize_e4m3,
)
from dsv4.reference.moe import group_pairs
from dsv4.testing.fp8_linear import SUM_ERROR, block_magnitudes
from dsv4.testing.harness import Call, Outcome
from dsv4.testing.kernel_call import make_call
from dsv4.testing.moe_hidden import Hidden, PackedHidden, check_values

# Derivative of silu, and of a product of two factors that are both off: more than enough.
SILU_SLOPE = 1.1
# silu by fast exponential and division, relative.
SILU_ERROR = 2**-18
# Of bf16 products, which the tensor core adds up over a whole K.
BF16_SUM_ERROR = 2**-20
E2M1_DEVIATION, E4M3_DEVIATION = 2.6, 1.0  # of random codes
MATRICES = ("w1", "w3", "w2")
UNWRITTEN = 0x3F3F3F3F  # of lists: large, so that it is no place in anything
# fp32 scales of x and of h in NVFP4, about: of the latter such that some blocks saturate.
INPUT_SCALES = (2.0**-7, 2.0**-12)


@dataclass(frozen=True)
class Case:
    """Sizes and options of a call.

    Attributes:
        tokens, hidden, inner, experts, top_k: T, D, I, E and k.
        expert_dtype: "fp4", "fp8", "nvfp4" or "bfloat16".
        scale_dtype: of FP8 scales, those of the shared expert too.
        spread: largest distance of the exponents of a row's FP4 groups.
        live: tokens that are not padding; None: all. Padding rows are NaN.
        one_expert: whether all tokens go to expert E - 1, and to others.
        is_graded: whether expert after expert has fewer of the tokens, by even steps: of twice as
            many experts as a token has.
        has_missing: whether some tokens lack some experts, or all.
        has_special_rows: whether some live tokens are NaN, Inf in one place, zero, or huge in one.
        limit: of gate and up; small enough to bind.
        out_dtype: of the result.
        is_tiled: whether weights are prepared for Blackwell, whose kernels leave codes of h.
        shared_dtype: of the shared expert, "fp8" or "bfloat16".
        is_row_packed: whether FP4 scales that can be packed have one least exponent a row.
    """

    tokens: int
    hidden: int = 512
    inner: int = 256
    experts: int = 8
    top_k: int = 3
    expert_dtype: str = "fp4"
    scale_dtype: str = "float8_e8m0fnu"
    spread: int = MAX_SPREAD
    live: int | None = None
    one_expert: bool = False
    is_graded: bool = False
    has_missing: bool = False
    has_special_rows: bool = False
    limit: float = 4.0
    out_dtype: str = "bfloat16"
    is_tiled: bool = False
    shared_dtype: str = "fp8"
    is_row_packed: bool = False

    @property
    def rounds_to_nvfp4(self) -> bool:
        return self.expert_dtype == "nvfp4" and self.is_tiled

    @property
    def num_live(self) -> int:
        return self.tokens if self.live is None else min(max(self.live, 0), self.tokens)

    @property
    def scale_form(self) -> str:
        if self.is_tiled:
            return "tiled"
        if self.spread > MAX_SPREAD:
            return "raw"
        return "row_packed" if self.is_row_packed else "packed"

    @property
    def config(self) -> ExpertsConfig:
        return ExpertsConfig(
            self.hidden, self.inner, self.top_k, self.expert_dtype, self.scale_form,
            self.scale_dtype, self.scale_dtype, self.limit, self.out_dtype, self.shared_dtype,
        )  # fmt: skip

    def shape(self, matrix: str) -> tuple[int, int]:
        """Rows and columns of a weight."""
        sizes = (self.inner, self.hidden)
        return sizes[::-1] if matrix == "w2" else sizes


@dataclass(frozen=True)
class Weight:
    """A weight as checkpoints store it, of all experts or of the shared one.

    Attributes:
        scale: None of bf16 weights.
        whole: [E] fp32 of NVFP4.
        inputs: [E] fp32, of inputs, where those of NVFP4 are rounded to it.
    """

    codes: Tensor
    scale: Tensor | None
    whole: Tensor | None = None
    inputs: Tensor | None = None

    @property
    def is_bf16(self) -> bool:
        """Whether products with it are of bf16, activations as they are."""
        is_nvfp4 = self.codes.dtype == torch.uint8 and self.inputs is None
        return is_nvfp4 or self.codes.dtype == torch.bfloat16

    def activations(self, x: Tensor, whole: Tensor | None) -> Tensor:
        """What products read of x, fp64.

        Args:
            whole: fp32 scale of x in NVFP4.
        """
        if whole is not None:
            return qdq_nvfp4(x, whole.expand(1)).double()
        return x.double() if self.is_bf16 else rounded(x)

    def sum_error(self, x: Tensor, weight: Tensor) -> Tensor:
        """Bound on the errors of sums of x [n, K] and the decoded weight [m, K], fp64."""
        if self.is_bf16:
            return x.abs() @ weight.abs().T * BF16_SUM_ERROR
        return block_magnitudes(x, weight) * SUM_ERROR

    def dense(self, expert: int | None = None) -> Tensor:
        """[out, in] fp64, of one expert."""
        codes, scale = self.codes, self.scale
        if self.codes.dtype == torch.bfloat16:
            return (codes if expert is None else codes[expert]).double()
        if expert is not None:
            codes, scale = codes[expert], scale[expert]
        if codes.dtype == torch.uint8:
            return dequantize_e2m1(codes, scale, torch.float64) * self.whole[expert].double()
        if codes.dtype == torch.int8:
            return dequantize_e2m1(codes, scale, torch.float32).double()
        return dequantize_e4m3_blocks(codes, scale, (K_BLOCK, K_BLOCK), torch.float32).double()

    def prepared(self, form: str) -> Weight:
        """The same in the order of the kernels' reads."""
        codes = layout.prepare_codes(self.codes, form)
        if self.codes.dtype in (torch.int8, torch.uint8):
            return replace(self, codes=codes, scale=layout.prepare_scales(self.scale, form))
        return replace(self, codes=codes)


def whole_scales(unit: dict[str, Weight], expert: int | None) -> tuple[Tensor | None, ...]:
    """fp32 scales of an expert's x and h, where both are rounded to NVFP4: that of x is the largest
    of all experts'."""
    if unit["w2"].inputs is None:
        return None, None
    of_x = torch.cat([unit[name].inputs for name in ("w1", "w3")]).amax()
    return of_x, unit["w2"].inputs[expert]


def make_weight(
    shape: tuple[int, ...], dtype: str, scale_dtype: str, spread: int, generator: torch.Generator
) -> Weight:
    """Random codes [..., out, in] and scales; products with unit inputs are of unit size."""
    options = {"generator": generator, "device": generator.device}
    *lead, rows, columns = shape
    deviation = E2M1_DEVIATION if dtype == "fp4" else E4M3_DEVIATION
    top = 127 - round(math.log2(deviation * columns**0.5)) + 1
    if dtype == "bfloat16":
        return Weight((torch.randn(shape, **options) * columns**-0.5).bfloat16(), None)
    if dtype == "nvfp4":
        return _make_nvfp4(shape, generator)
    if dtype == "fp4":
        codes = torch.randint(0, 256, (*lead, rows, columns // 2), dtype=torch.uint8, **options)
        groups = (*lead, rows, columns // FP4_GROUP)
        # Most groups are near the largest, as in checkpoints; every row has one far below.
        below = torch.randint(0, 3, groups, **options)
        below[..., :: K_BLOCK // FP4_GROUP] = spread
        return Weight(codes.view(torch.int8), (top - below).byte().view(torch.float8_e8m0fnu))
    codes = torch.randn(shape, **options).to(torch.float8_e4m3fn)
    blocks = (*lead, -(-rows // K_BLOCK), -(-columns // K_BLOCK))
    if scale_dtype == "float32":
        return Weight(codes, (torch.rand(blocks, **options) + 0.5) * 2.0 ** (top - 127))
    below = torch.randint(0, 3, blocks, **options)
    return Weight(codes, (top - below).byte().view(torch.float8_e8m0fnu))


def _make_nvfp4(shape: tuple[int, ...], generator: torch.Generator) -> Weight:
    """Any codes and scales of every exponent, zeros among them, of either sign."""
    options = {"generator": generator, "device": generator.device}
    *lead, rows, columns = shape
    codes = torch.randint(0, 256, (*lead, rows, columns // 2), dtype=torch.uint8, **options)
    groups = (*lead, rows, columns // NVFP4_GROUP)
    scale = torch.randn(groups, **options)
    # Most are near one, some are subnormal or zero.
    far = torch.randint(0, 16, groups, **options)
    scale = torch.where(far == 0, scale * 2.0**-8, torch.where(far == 1, 0.0, scale))
    whole = (torch.rand(lead, **options) + 0.5) / (E2M1_DEVIATION * columns**0.5)
    return Weight(codes, scale.to(torch.float8_e4m3fn), whole)


def make_x(case: Case, generator: torch.Generator) -> Tensor:
    """[T, D] bf16 normal values, rows and groups of different magnitude; padding is NaN."""
    options = {"generator": generator, "device": generator.device}
    x = torch.randn(case.tokens, case.hidden, **options)
    exponents = torch.randint(-2, 2, (case.tokens, case.hidden // K_BLOCK), **options)
    x *= torch.exp2(exponents.float()).repeat_interleave(K_BLOCK, 1)
    if case.has_special_rows:
        x[0::5], x[1::5, 1], x[2::5], x[3::5, -1] = torch.nan, torch.inf, 0, 2.0**60
    x[case.num_live :] = torch.nan
    return x.bfloat16()


def make_ids(case: Case, generator: torch.Generator) -> Tensor:
    """[T, k] int32: experts of each token, ascending, then -1."""
    if case.is_graded:
        return _graded_ids(case).to(generator.device)
    options = {"generator": generator, "device": generator.device}
    order = torch.rand(case.tokens, case.experts, **options)
    if case.one_expert:
        order[:, -1] = -1.0
    ids = order.argsort(1)[:, : case.top_k].sort(1).values
    if case.has_missing:
        keep = torch.randint(0, case.top_k + 1, (case.tokens, 1), **options)
        ids = torch.where(torch.arange(case.top_k, device=ids.device) < keep, ids, -1)
    ids[case.num_live :] = -1
    return ids.int()


def _graded_ids(case: Case) -> Tensor:
    """Experts that share the pairs by even steps: (2 k - 1 - e) / 2 k of the tokens have expert e,
    and expert 2 k - 1 has what is left."""
    live, steps = case.num_live, 2 * case.top_k
    counts = torch.tensor([live * (steps - 1 - e) // steps for e in range(steps - 1)])
    experts = torch.arange(steps - 1).repeat_interleave(counts)
    experts = torch.cat((experts, torch.full((live * case.top_k - len(experts),), steps - 1)))
    ids = torch.full((case.tokens, case.top_k), -1)
    # Pairs of an expert follow each other, one a token.
    ids[:live] = experts.view(case.top_k, live).T
    return ids.int()


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case: activations, released weights by matrix, and routing."""

    case: Case
    x: Tensor
    routed: dict[str, Weight]
    shared: dict[str, Weight]
    ids: Tensor
    weights: Tensor

    @classmethod
    def make(cls, case: Case, seed: int, device: torch.device | str = "cpu") -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        x = make_x(case, generator)
        options = (case.scale_dtype, case.spread, generator)
        routed = {
            name: make_weight((case.experts, *case.shape(name)), case.expert_dtype, *options)
            for name in MATRICES
        }
        shared = {
            name: make_weight(case.shape(name), case.shared_dtype, *options) for name in MATRICES
        }
        if case.rounds_to_nvfp4:
            for i, name in enumerate(MATRICES):
                scales = torch.rand(case.experts, generator=generator, device=device) + 0.5
                weight = routed[name]
                # Blackwell's scales have no sign.
                positive = weight.scale.float().abs().to(weight.scale.dtype)
                inputs = scales * INPUT_SCALES[i == 2]
                routed[name] = replace(weight, scale=positive, inputs=inputs)
        ids = make_ids(case, generator)
        shape = (case.tokens, case.top_k)
        weights = torch.rand(shape, generator=generator, device=device) + 0.1
        return cls(case, x, routed, shared, ids, weights * (ids >= 0))

    def first(self, tokens: int) -> Inputs:
        """The same with the first tokens alone."""
        case = replace(self.case, tokens=tokens)
        rows = {name: getattr(self, name)[:tokens] for name in ("x", "ids", "weights")}
        return replace(self, case=case, **rows)

    def experts_call(self, tiling: int, num_sms: int, group_tokens: int) -> Call:
        """A call of the experts' kernels, with weights prepared and lists made here."""
        case = self.case
        codes, scales = quantize_e4m3(self.x, K_BLOCK)
        pairs, groups = group_pairs(self.ids.cpu(), case.experts, group_tokens)
        # Behind what lists have, anything: here what leads out of every tensor.
        all_pairs = torch.full((case.tokens * case.top_k,), UNWRITTEN, dtype=torch.int32)
        all_pairs[: len(pairs)] = pairs
        all_groups = torch.full((len(groups) + 2, 4), UNWRITTEN, dtype=torch.int32)
        all_groups[: len(groups)] = groups
        counts = torch.tensor([len(groups), case.num_live], dtype=torch.int32)
        taken = torch.zeros(1, dtype=torch.int32)
        lists = {"groups": all_groups, "counts": counts, "taken": taken, "pairs": all_pairs}
        tensors = {"x_codes": codes, "x_scale": scales, "ids": self.ids, "weights": self.weights}
        tensors |= {name: one.to(self.x.device) for name, one in lists.items()}
        for prefix, part in (("", self.routed), ("shared_", self.shared)):
            for name in MATRICES:
                weight = part[name].prepared(case.scale_form)
                tensors[prefix + name] = weight.codes
                tensors[prefix + name.replace("w", "s")] = weight.scale
        scalars = {"tiling": tiling, "num_sms": num_sms}
        count = case.tokens * (case.top_k + 1)
        rows = {"R": count, "Q": scale_columns(count)}
        return make_call(ARGS, values(case.config), tensors, scalars, sizes=rows)


# ---- what the products must give -----------------------------------------------------------------


def rounded(x: Tensor) -> Tensor:
    """x [.., K] in e4m3 with one scale per 128, and back, fp64."""
    codes, scales = quantize_e4m3(x, K_BLOCK)
    return codes.double() * scales.double().repeat_interleave(K_BLOCK, -1)


def swiglu(gate: Tensor, up: Tensor, weights: Tensor, limit: float) -> tuple[Tensor, ...]:
    """h [n, I] = silu(min(gate, limit)) * clamp(up) * weights, fp64, and its first two factors."""
    silu = torch.nn.functional.silu(gate.clamp(max=limit))
    up = up.clamp(-limit, limit)
    return silu * up * weights, silu, up


def gated(
    x: Tensor, w1: Tensor, w3: Tensor, weights: Tensor, limit: float, weight: Weight
) -> tuple[Tensor, Tensor]:
    """`swiglu` of x [n, K] by decoded weights like `weight`, and how far off it may be for errors
    of both sums."""
    gate, up = x @ w1.T, x @ w3.T
    # An infinite sum is exact: an infinite error would become NaN beside a routing weight of 0.
    gate_error, up_error = (
        torch.where(found.isfinite(), weight.sum_error(x, dense), 0.0)
        for found, dense in ((gate, w1), (up, w3))
    )
    h, silu, up = swiglu(gate, up, weights, limit)
    error = SILU_SLOPE * gate_error * (up.abs() + up_error) + silu.abs() * up_error
    # A weight of 0 leaves nothing of an error, however large.
    error = torch.where(weights == 0, 0.0, error * weights.abs())
    return h, error + h.abs() * SILU_ERROR


def assert_experts_close(outcome: Outcome, inputs: Inputs) -> None:
    """Fail where h, the rows of the second product, or their sums are further from the oracle than
    rounding and the accumulator allow; each is compared for what the kernel had before it."""
    case = inputs.case
    ids = inputs.ids.cpu().long()
    pairs, _ = group_pairs(ids, case.experts, 1)
    device = inputs.x.device
    rows = outcome["rows"].to(device)
    begin = case.tokens * case.top_k
    h = Hidden.of(outcome, case, device, slice(begin))
    x = inputs.x
    found = rows.new_zeros(rows.shape[:2], dtype=torch.bool)
    positions = torch.arange(len(pairs), device=device)
    tokens, slots = (pairs // case.top_k).to(device), (pairs % case.top_k).to(device)
    experts = ids.flatten()[pairs].to(device)
    for expert in experts.unique().tolist():
        own = experts == expert
        at = tokens[own], slots[own]
        factors = inputs.weights[at].double().unsqueeze(1)
        part, whole = positions[own], whole_scales(inputs.routed, expert)[1]
        of_expert = h.first(part)
        if whole is not None:
            of_expert = PackedHidden.of_expert(outcome, part, whole, device)
        _check_products(of_expert, rows[at], x[at[0]], inputs.routed, expert, factors, case.limit)
        found[at] = True
    live = case.num_live
    h = Hidden.of(outcome, case, device, slice(begin, begin + live))
    ones = torch.ones(live, 1, dtype=torch.float64, device=device)
    _check_products(h, rows[:live, -1], x[:live], inputs.shared, None, ones, case.limit)
    found[:live, -1] = True
    total = torch.zeros(case.tokens, case.hidden, device=device)
    for slot in range(case.top_k + 1):
        total = torch.where(found[:, slot, None], total + rows[:, slot].float(), total)
    wanted = total.to(getattr(torch, case.out_dtype)).cpu()
    same = (outcome["y"] == wanted) | (outcome["y"].isnan() & wanted.isnan())
    assert same.all(), f"y: {int((~same).sum())} elements are not the sums of their rows"


def _check_products(
    h: Hidden, rows: Tensor, x: Tensor, unit: dict[str, Weight], expert: int | None,
    factors: Tensor, limit: float,
) -> None:  # fmt: skip
    """Compare one expert's h with its inputs, and its rows with its h."""
    name = "shared" if expert is None else f"{expert}"
    w1, w3, w2 = (unit[matrix].dense(expert) for matrix in MATRICES)
    down = unit["w2"]
    x = down.activations(x, whole_scales(unit, expert)[0])
    wanted, error = gated(x, w1, w3, factors, limit, down)
    h.check(f"h of expert {name}", wanted, error)
    read = h.read_by(down)
    wanted, error = read @ w2.T, down.sum_error(read, w2)
    check_values(f"rows of expert {name}", rows, wanted, error)
