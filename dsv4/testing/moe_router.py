"""The router's kernels under test: inputs, what they must give, and the comparison."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.kernels.moe.router_args import ARGS, values
from dsv4.kernels.moe.routing import MOST_RUNS, RoutingConfig, gate_tiling, most_groups
from dsv4.reference.moe import group_pairs
from dsv4.reference.quantize import quantize_e4m3
from dsv4.testing.harness import Call, Outcome
from dsv4.testing.kernel_call import make_call

# Error of a logit relative to the sum of its terms' magnitudes: fp32 sums of a few hundred
# products, by tensor cores that cut terms off.
LOGIT_ERROR = 2**-19
# Of a score, whose exponential and logarithm are fp32 functions; of a weight, a quotient of those.
SCORE_ERROR, WEIGHT_ERROR = 2e-6, 4e-6
FP8_BLOCK = 128


@dataclass(frozen=True)
class RouterCase:
    """Sizes and options of a call.

    Attributes:
        tokens, hidden, experts, top_k: T, D, E and k.
        is_hashed: whether a table routes; a fifth of its entries then is out of range.
        live: tokens that are not padding; None: all, without the argument. Padding rows are NaN.
        ties: whether half of the experts are copies of others, biases too.
        one_expert: whether all tokens want expert E - 1 first.
        group_tokens: rows of a group at most.
        vocabulary: rows of the table; ids of some tokens lie outside.
    """

    tokens: int
    hidden: int = 512
    experts: int = 32
    top_k: int = 3
    is_hashed: bool = False
    live: int | None = None
    ties: bool = False
    one_expert: bool = False
    group_tokens: int = 8
    vocabulary: int = 50
    scaling: float = 1.5

    @property
    def config(self) -> RoutingConfig:
        return RoutingConfig(self.hidden, self.experts, self.top_k, self.is_hashed, self.scaling)

    @property
    def num_live(self) -> int:
        return self.tokens if self.live is None else min(max(self.live, 0), self.tokens)


@dataclass(frozen=True)
class RouterInputs:
    """Tensors of a case."""

    case: RouterCase
    x: Tensor
    weight: Tensor
    bias: Tensor
    table: Tensor
    input_ids: Tensor

    @classmethod
    def make(cls, case: RouterCase, seed: int, device: torch.device | str = "cpu") -> RouterInputs:
        generator = torch.Generator(device).manual_seed(seed)
        options = {"generator": generator, "device": device}
        x = torch.randn(case.tokens, case.hidden, **options)
        x *= torch.exp2(torch.randint(-3, 3, (case.tokens, 1), **options).float())
        weight = torch.randn(case.experts, case.hidden, **options) * case.hidden**-0.5
        bias = torch.randn(case.experts, **options) * 0.2
        if case.ties:
            weight[1::2], bias[1::2] = weight[0::2], bias[0::2]
        if case.one_expert:
            bias[-1] = 1000.0
        x[case.num_live :] = torch.nan
        table = torch.rand(case.vocabulary, case.experts, **options).argsort(1)[:, : case.top_k]
        outside = torch.rand(table.shape, **options) < 0.2
        table = torch.where(outside, table * 3 * case.experts - case.experts - 1, table)
        ids = torch.randint(-2, case.vocabulary + 2, (case.tokens,), **options)
        return cls(case, x.bfloat16(), weight.bfloat16(), bias, table.contiguous(), ids)

    def first(self, tokens: int) -> RouterInputs:
        """The same with the first tokens alone."""
        case = replace(self.case, tokens=tokens)
        return replace(self, case=case, x=self.x[:tokens], input_ids=self.input_ids[:tokens])

    def call(self, tiling: tuple[int, int] | None = None) -> Call:
        """A call of the compiled kernels; default as planned."""
        case = self.case
        splits, token_tiles = gate_tiling(case.config, case.tokens) if tiling is None else tiling
        pairs = case.tokens * case.top_k
        groups = most_groups(case.experts, pairs, case.group_tokens)
        live = None
        if case.live is not None:
            live = torch.tensor([case.live], dtype=torch.int32, device=self.x.device)
        tensors = {"x": self.x, "weight": self.weight, "live_tokens": live}
        if case.is_hashed:
            tensors |= {"table": self.table, "input_ids": self.input_ids}
        else:
            tensors["bias"] = self.bias
        scalars = {"token_tiles": token_tiles, "group_tokens": case.group_tokens}
        sizes = {"S": splits, "P": pairs, "G": groups, "R": MOST_RUNS}
        return make_call(ARGS, values(case.config), tensors, scalars, sizes=sizes)

    def exact_logits(self) -> tuple[Tensor, Tensor]:
        """Logits of live tokens in fp64, and the sums of their terms' magnitudes."""
        x, weight = self.x[: self.case.num_live].double(), self.weight.double()
        return x @ weight.T, x.abs() @ weight.abs().T


def assert_routed(outcome: Outcome, inputs: RouterInputs) -> None:
    """Fail with what the kernels got wrong."""
    case, live = inputs.case, inputs.case.num_live
    logits = _check_logits(outcome, inputs)
    _check_codes(outcome, inputs)
    ids, weights = outcome["ids"].long(), outcome["weights"]
    assert (ids[live:] == -1).all(), "ids: padding tokens have experts"
    assert (weights[live:] == 0).all(), "weights: those of padding tokens are not 0"
    order = torch.where(ids < 0, case.experts, ids)
    assert (order.diff(dim=1) >= 0).all(), "ids: not ascending"
    scores = torch.nn.functional.softplus(logits.double()).sqrt()
    wanted = _table_ids(inputs) if case.is_hashed else None
    if case.is_hashed:
        assert torch.equal(ids[:live], wanted), "ids: not those of the table"
    else:
        _check_best(ids[:live], scores, inputs.bias.cpu().double())
    chosen = scores.gather(1, ids[:live].clamp(min=0)) * (ids[:live] >= 0)
    total = chosen.sum(1, keepdim=True).clamp(min=1e-300)
    error = (weights[:live] - chosen / total * case.scaling).abs()
    assert (error <= WEIGHT_ERROR * case.scaling).all(), f"weights: off by {error.max():.2e}"
    pairs, groups = group_pairs(ids, case.experts, case.group_tokens)
    assert outcome["counts"].tolist() == [len(groups), live], "counts"
    assert torch.equal(outcome["pairs"][: len(pairs)].long(), pairs), "pairs"
    assert torch.equal(outcome["groups"][: len(groups)].long(), groups), "groups"


def _check_logits(outcome: Outcome, inputs: RouterInputs) -> Tensor:
    logits = torch.zeros(())
    for partial in outcome["partials"][:, : inputs.case.num_live]:
        logits = logits + partial
    wanted, magnitude = (t.cpu() for t in inputs.exact_logits())
    error = (logits - wanted).abs() / magnitude.clamp(min=1e-30)
    assert (error <= LOGIT_ERROR).all(), f"logits: relative error {error.max():.2e}"
    return logits


def _check_codes(outcome: Outcome, inputs: RouterInputs) -> None:
    live = inputs.case.num_live
    values, scales = quantize_e4m3(inputs.x[:live].cpu(), FP8_BLOCK)
    assert torch.equal(outcome["codes"][:live].float(), values), "codes"
    assert torch.equal(outcome["scales"][:live].float(), scales), "scales"


def _table_ids(inputs: RouterInputs) -> Tensor:
    """ids of live tokens by the table: ascending, -1 and then last where there is no expert."""
    case = inputs.case
    rows = inputs.input_ids[: case.num_live].cpu()
    known = (rows >= 0) & (rows < case.vocabulary)
    found = inputs.table.cpu()[rows.clamp(0, case.vocabulary - 1)]
    valid = known[:, None] & (found >= 0) & (found < case.experts)
    order = torch.where(valid, found, case.experts).sort(1).values
    return torch.where(order == case.experts, -1, order)


def _check_best(ids: Tensor, scores: Tensor, bias: Tensor) -> None:
    """Fail where an expert was left out that is clearly better than a chosen one, or as good by
    the bits and of a lower id."""
    biased = scores + bias
    margin = SCORE_ERROR * (1 + biased.abs().amax(1, keepdim=True))
    is_chosen = torch.zeros_like(biased, dtype=torch.bool).scatter_(1, ids, True)
    assert (is_chosen.sum(1) == ids.shape[1]).all(), "ids: an expert twice"
    worst = torch.where(is_chosen, biased, torch.inf).amin(1, keepdim=True)
    best = torch.where(is_chosen, -torch.inf, biased).amax(1, keepdim=True)
    assert (best <= worst + margin).all(), "ids: a better expert was left out"
    # Experts of equal bits: the first of them are chosen.
    for token in range(len(ids)):
        level = biased[token]
        lowest = {}
        for expert in range(level.numel()):
            value = (float(scores[token, expert]), float(bias[expert]))
            lowest.setdefault(value, []).append(bool(is_chosen[token, expert]))
        for found in lowest.values():
            assert found == sorted(found, reverse=True), "ids: a tie went to the higher id"
