"""`index_topk` under test: inputs, what they must give, and the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.kernels.indexer.config import RANKS, IndexTopkConfig
from dsv4.kernels.indexer.plan import HELD_KEYS
from dsv4.kernels.kit.index_entry import IndexEntry
from dsv4.ops.index_keys import key_views, pack_index, packed_views, read_keys
from dsv4.ops.index_rounding import round_heads
from dsv4.ops.index_topk import INDEX_TOPK, index_topk
from dsv4.ops.quantize import e2m1_as_e4m3
from dsv4.reference.hadamard import hadamard
from dsv4.reference.indexer import index_scores, select_top_k
from dsv4.reference.quantize import fake_quantize_e2m1
from dsv4.testing.kernel_call import OpInputs

REGISTERS = 16_384  # scores that the registers of a CTA hold that chooses in a launch of its own
FEW_LEVELS = 30  # of keys: the bin of the k-th best has some of every thread
# Of what is no key: e4m3's NaN, of which four are a NaN in fp32, too; E8M0's NaN.
NAN_BYTES = {"fp8": 0x7F, "fp4": 0xFF}


@dataclass(frozen=True)
class Case:
    """Sizes and options of a call.

    Attributes:
        lens: entries that each token sees.
        topk, page, gives_slots: as in `IndexTopkConfig`.
        tokens_per_request: neighbours that share a request.
        heads, dim, rope_dim: of the indexer.
        spread: of the keys' magnitudes, in powers of two; 0 with few channels gives ties.
        levels: distinct keys of a request; few of them give ties at every rank.
        padding_rows: tokens at the end without a request, which are NaN.
        columns: of the block table; 0: as many as the longest list needs, and one.
        gap: bytes between pages.
        key_format: of the pages: "fp8" or "fp4".
        far: magnitudes of a key's groups differ by up to so many powers of two.
        has_codes: whether queries are rounded before the call.
        rank: as in `IndexTopkConfig`.
    """

    lens: tuple[int, ...]
    topk: int = 512
    page: int = 32
    gives_slots: bool = False
    tokens_per_request: int = 1
    heads: int = 64
    dim: int = 128
    rope_dim: int = 64
    spread: int = 2
    levels: int = 0
    padding_rows: int = 0
    columns: int = 0
    gap: int = 48
    key_format: str = "fp8"
    far: int = 0
    has_codes: bool = False
    rank: str = "bf16"

    @property
    def config(self) -> IndexTopkConfig:
        scale = (self.heads * self.dim) ** -0.5
        sizes = (self.heads, self.dim, self.rope_dim, self.topk, self.page, scale)
        options = {"gives_slots": self.gives_slots, "has_codes": self.has_codes, "rank": self.rank}
        return IndexTopkConfig(*sizes, self.key_format, **options)


def longest(num_ctas: int, cluster: int) -> Case:
    """A list that reaches every copy of a choice's unrolled loops, and one that chooses all: as
    long as the CTAs of one launch hold, or in two as their registers hold, and no less than two
    turns of a CTA.

    Args:
        num_ctas, cluster: of the launch.
    """
    entries = max(cluster, 2) * REGISTERS if num_ctas else cluster * HELD_KEYS
    return Case((entries - 3, 50), topk=64, gives_slots=True, levels=FEW_LEVELS)


@dataclass(frozen=True)
class Inputs(OpInputs):
    """Tensors of a case."""

    op = INDEX_TOPK

    case: Case
    tensors: dict[str, Tensor]

    @classmethod
    def make(cls, case: Case, seed: int, device: torch.device | str = "cpu") -> Inputs:
        """Random queries, weights of both signs, keys in pages in random order; the rest of the
        pool is NaN."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        tokens = len(case.lens)
        requests = -(-tokens // case.tokens_per_request)
        columns = case.columns or -(-max((1, *case.lens)) // case.page) + 1
        pages = requests * columns
        pool = _empty_pool(pages + 2, case, device)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
        table = (order + 1).view(requests, columns).to(device)
        for request in range(requests):
            first = request * case.tokens_per_request
            count = max((0, *case.lens[first : first + case.tokens_per_request]))
            count = min(count, columns * case.page)
            keys = normal(max(case.levels, 1) if case.levels else count, case.dim)
            if case.levels:
                which = torch.randint(case.levels, (count,), generator=generator, device=device)
                keys = keys[which]
            elif case.spread:
                shape = (count, 1)
                exponents = torch.randint(
                    -case.spread, case.spread, shape, generator=generator, device=device
                )
                keys = keys * torch.exp2(exponents.float())
            numbers = torch.arange(count, device=device)
            slots = table[request, numbers // case.page] * case.page + numbers % case.page
            _write(case, keys.bfloat16(), slots, pool, generator)
        angles = normal(max(case.lens, default=0) + 9, case.rope_dim // 2) * 10
        ids = torch.arange(tokens, device=device) // case.tokens_per_request
        positions = torch.randint(0, len(angles), (tokens,), generator=torch.Generator())
        found = {
            "q": normal(tokens, case.heads * case.dim).bfloat16(),
            "weights": normal(tokens, case.heads).bfloat16(),
            "rope": torch.cat((angles.cos(), angles.sin()), 1),
            "positions": positions.to(device, torch.int32),
            "lens": torch.tensor(case.lens, dtype=torch.int32, device=device),
            "request_ids": ids.to(torch.int32),
            "block_table": table.to(torch.int32),
            "keys": pool,
        }
        if case.padding_rows:
            rows = slice(tokens - case.padding_rows, tokens)
            for name in ("q", "weights"):
                found[name][rows] = torch.nan
            found["request_ids"][rows] = -1
        return cls(case, found)

    @property
    def config(self) -> IndexTopkConfig:
        return self.case.config

    @property
    def entries(self) -> int:
        """N of the scores."""
        return self.tensors["block_table"].shape[1] * self.case.page

    @property
    def arguments(self) -> dict[str, Tensor]:
        """By the table's names, with scores of their own."""
        shape = (len(self.case.lens), self.entries + -self.entries % 8)
        dtype = getattr(torch, RANKS[self.case.rank])
        scores = torch.empty(shape, dtype=dtype, device=self.tensors["q"].device)
        found = {**self.tensors, "scores": scores}
        if self.case.has_codes:
            codes, found["q_scale"] = self.codes()
            found["q"] = codes.view(torch.bfloat16)
        return found

    def codes(self) -> tuple[Tensor, Tensor]:
        """Queries in codes, and their scales; those of padding are NaN."""
        tensors, live = self.tensors, len(self.case.lens) - self.case.padding_rows
        codes, scales = round_heads(tensors["q"], tensors["rope"], tensors["positions"])
        codes.view(torch.uint8)[live:] = NAN_BYTES["fp8"]
        scales[live:] = torch.nan
        return codes, scales

    def rows(self, start: int, stop: int) -> Inputs:
        """The same for some of the tokens."""
        names = ("q", "weights", "positions", "lens", "request_ids")
        tensors = {n: x[start:stop] if n in names else x for n, x in self.tensors.items()}
        case = replace(self.case, lens=self.case.lens[start:stop], padding_rows=0)
        return Inputs(case, tensors)

    def counts(self) -> list[int]:
        """Entries that each token sees."""
        live = len(self.case.lens) - self.case.padding_rows
        return [min(max(n, 0), self.entries) * (t < live) for t, n in enumerate(self.case.lens)]

    def oracle(self, token: int) -> tuple[Tensor, Tensor]:
        """Scores [n] of a token's entries in fp32, and the sums of their terms' magnitudes."""
        tensors, case = self._of(token), self.case
        query = tensors["q"].view(case.heads, case.dim).float()
        cos, sin = tensors["rope"].chunk(2)
        tail = query[:, case.dim - case.rope_dim :]
        even, odd = tail[:, 0::2].clone(), tail[:, 1::2].clone()
        tail[:, 0::2], tail[:, 1::2] = even * cos - odd * sin, even * sin + odd * cos
        query = fake_quantize_e2m1(hadamard(query.bfloat16()).bfloat16().float(), 32)
        weights = (tensors["weights"] * case.config.weight_scale).float()
        keys = tensors["keys"]
        scores = index_scores(query[None], keys, weights[None])[0]
        return scores, index_scores(query[None], keys, weights[None].abs())[0]

    def named(self, token: int, chosen: Tensor) -> Tensor:
        """Entries [k] of a token, -1 where there are none, in the operator's order and names."""
        case, end = self.case, self.entries
        chosen = torch.where(chosen < 0, end, chosen).sort().values
        is_chosen = chosen < end
        if case.gives_slots:
            request = int(self.tensors["request_ids"][token])
            numbers = torch.where(is_chosen, chosen, 0)
            pages = self.tensors["block_table"].long()[request, numbers // case.page]
            chosen = pages * case.page + numbers % case.page
        return torch.where(is_chosen, chosen, -1).to(torch.int32)

    def clone(self) -> Inputs:
        """The same in memory of its own."""
        tensors = {
            name: x.clone() if name != "keys" else _cloned_pool(x)
            for name, x in self.tensors.items()
        }
        return Inputs(self.case, tensors)

    def _of(self, token: int) -> dict[str, Tensor]:
        """Tensors of one token, its keys decoded."""
        tensors, count = self.tensors, self.counts()[token]
        numbers = torch.arange(count, device=tensors["q"].device)
        request = int(tensors["request_ids"][token])
        page = tensors["block_table"][request, numbers // self.case.page].long()
        place = numbers % self.case.page
        return {
            "q": tensors["q"][token],
            "weights": tensors["weights"][token],
            "rope": tensors["rope"][int(tensors["positions"][token])],
            "keys": read_keys(tensors["keys"], self.case.dim, page, place),
        }


def _empty_pool(pages: int, case: Case, device: torch.device | str) -> Tensor:
    """[pages, P, row] of NaN."""
    row = case.config.row
    stride = IndexEntry(case.dim, case.key_format).page_bytes(case.page) + case.gap
    byte = NAN_BYTES[case.key_format]
    frame = torch.full((pages * stride,), byte, dtype=torch.uint8, device=device)
    return frame.as_strided((pages, case.page, row), (stride, row, 1))


def _write(
    case: Case, keys: Tensor, slots: Tensor, pool: Tensor, generator: torch.Generator
) -> None:
    """Round keys, and write them to slots of the pool: the same numbers in both formats."""
    codes, scales = pack_index(keys)
    if case.far:
        apart = torch.randint(-case.far, 1, scales.shape, generator=generator, device=scales.device)
        scales = (scales + apart).clamp(1, 254).to(torch.uint8)
    if case.key_format == "fp4":
        rows, views = (codes, scales), packed_views(pool, case.dim)
    else:
        codes, scales = e2m1_as_e4m3(codes, scales)
        rows = codes.view(torch.uint8), scales[:, None]
        codes, scales = key_views(pool)
        views = codes.view(torch.uint8), scales[..., None]
    for row, view in zip(rows, views, strict=True):
        view[slots // case.page, slots % case.page] = row


def _cloned_pool(pool: Tensor) -> Tensor:
    """A pool with the bytes between its pages."""
    frame = torch.empty(0, dtype=torch.uint8, device=pool.device).set_(pool.untyped_storage())
    return frame.clone().as_strided(pool.shape, pool.stride())


def run_op(inputs: Inputs) -> dict[str, Tensor]:
    """Results of the public function by the operator's names."""
    arguments, case = inputs.arguments, inputs.case
    scores = arguments.pop("scores").fill_(torch.nan)
    if case.has_codes:
        arguments["q"] = arguments["q"].view(torch.float8_e4m3fn)
    found = index_topk(
        **arguments,
        topk=case.topk,
        weight_scale=case.config.weight_scale,
        rank=case.rank,
        gives_slots=case.gives_slots,
        scores_out=scores,
    )
    return {"indices": found, "scores": scores}


def assert_choice(
    inputs: Inputs, outputs: dict[str, Tensor], tokens: Sequence[int] | None = None
) -> None:
    """Compare scores with the oracle's; and the choice with the oracle's among these scores.

    Args:
        tokens: those that are compared; None: all.
    """
    case, device = inputs.case, inputs.tensors["q"].device
    indices = outputs["indices"].to(device)
    for token in range(len(case.lens)) if tokens is None else tokens:
        count = inputs.counts()[token]
        found = torch.zeros(count, device=device)
        if count > case.topk:
            found = outputs["scores"][token, :count].to(device).float()
            wanted, magnitude = inputs.oracle(token)
            # bf16 rounds by 2^-8; the tensor core by some 2^-12 of the largest terms.
            error = (found - wanted).abs()
            rounding = 1.01 * 2**-8 if case.rank == "bf16" else 2**-22
            limit = rounding * wanted.abs() + 5e-4 * magnitude
            worst = (error / limit.clamp(min=1e-30)).max()
            assert (error <= limit).all(), f"token {token}: scores off by {worst:.2f} of the bound"
        chosen = inputs.named(token, select_top_k(found, torch.ones_like(found).bool(), case.topk))
        wrong = (chosen != indices[token]).nonzero()
        assert not len(wrong), (
            f"token {token}: {len(wrong)} of {case.topk} differ, the first at {int(wrong[0])}: "
            f"{int(indices[token, wrong[0]])}, expected {int(chosen[wrong[0]])}"
        )
