"""Seeded inputs of `sparse_fmha_paged`, its FP32 oracle, and the comparison with it.

Every entry that no token names is NaN, and so are bytes between entries and pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from dsv4.kernels.attention.paged_args import ARGS, values
from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.kit.head_squares import CHANNELS
from dsv4.kernels.kit.kv_entry import ROPE_DIM
from dsv4.ops.code_terms import num_term_rows, own_rows, to_terms
from dsv4.reference.paged_attention import sparse_fmha_paged as oracle
from dsv4.testing.accuracy import BFLOAT16, Tolerance, assert_close
from dsv4.testing.attention import assert_attention_close, assert_lse_close
from dsv4.testing.harness import Call
from dsv4.testing.kernel_call import make_call
from dsv4.testing.paged_pools import Pool

# FlashMLA's bounds: of an output absolutely or relatively, and of the angle between the tensors; of
# lse the same.
OUT_ABSOLUTE, OUT_RELATIVE, OUT_COSINE = 1e-3, 2.01 / 128, 5e-6
LSE_ABSOLUTE, LSE_RELATIVE = 1e-6, 8.01 / 65536
FLASH_MLA_DEVIATION = 0.1
NORM_EPS = 1e-2  # large enough to be seen
MAX_LOGITS_BOUND = 1e-4  # relative to the larger of 1 and the score
# Of products of FP8 codes, by `compute`: outputs, then lse and largest scores, absolute or
# relative. Outputs of two terms are held to what those of bf16 products are, but for elements where
# scores or keys are large: Hopper's tensor core keeps 14 bits of a score. One term of queries and
# weights errs by a few percent, as an element of few keys shows.
_ONE_TERM = (Tolerance(relative=8e-2, cosine=0.997, element=0.5), 0.5)
CODES_BOUNDS = {"fp8x2": (BFLOAT16, 5e-3), "fp8": _ONE_TERM}
CODES_FAR_BOUNDS = {"fp8x2": (replace(BFLOAT16, element=1.5e-2), 2e-2), "fp8": _ONE_TERM}


@dataclass(frozen=True)
class Case:
    """Sizes and options of one call.

    Attributes:
        requests, queries: tokens are `queries` for each of `requests`.
        heads, head_dim, kv_format, sink_mode, compute: as in `PagedFmhaConfig`.
        window, entries: keys of a token in the window and among the compressed entries, at most.
        window_page, entry_page: entries of a page of each pool.
        form: "list": index lists; "table": tables; "mixed": a table for the window alone.
        ragged: lengths (positions, with tables) of every kind, else full.
        wild: index lists hold values that are no slots, and some tokens nothing else; tables hold
            values that are no pages.
        growing: later keys score higher, so that the running maximum moves.
        padded: pages and index rows lie apart.
        uniform: FP8 entries have one scale for all groups.
        has_rope, has_factor: the optional inputs.
        has_signs: some factors are negative, or 0.
        has_squares: queries come with sums of squares in place of factors.
        ratio: positions per compressed entry of a table.
        rounds_output: whether the output is codes.
        deviation: of queries and keys; FlashMLA's tests take 0.1, which its bounds are meant for.
        name: what a table calls it.
    """

    requests: int = 3
    queries: int = 1
    heads: int = 8
    head_dim: int = 512
    kv_format: str = "bf16"
    window: int = 128
    entries: int = 192
    window_page: int = 64
    entry_page: int = 64
    form: str = "list"
    sink_mode: str = "softmax"
    compute: str = "bf16"
    ragged: bool = False
    wild: bool = False
    growing: bool = False
    padded: bool = False
    uniform: bool = False
    has_rope: bool = False
    has_factor: bool = False
    has_signs: bool = False
    has_squares: bool = False
    ratio: int = 4
    softmax_scale: float | None = None
    batch_invariant: bool = False
    num_splits: int | None = None
    rounds_output: bool = False
    deviation: float = 1.0
    name: str = ""

    @property
    def tokens(self) -> int:
        """T of the call."""
        return self.requests * self.queries

    @property
    def rope_dim(self) -> int:
        return min(ROPE_DIM, self.head_dim)

    @property
    def has_unit_scores(self) -> bool:
        """Whether scores have a deviation of 1 at most."""
        return not (self.growing or self.has_factor or self.has_squares)

    @property
    def config(self) -> PagedFmhaConfig:
        """What a kernel of the case is asked for."""
        return PagedFmhaConfig(
            self.head_dim,
            self.heads,
            self.kv_format,
            self.sink_mode,
            self.softmax_scale,
            0 if self.form == "list" else self.window,
            self.ratio if self.form == "table" else 0,
            self.num_splits,
            self.batch_invariant,
            self.compute,
            self.rope_dim,
            NORM_EPS if self.has_squares else None,
            self.rounds_output,
        )

    def __str__(self) -> str:
        names = (
            *("ragged", "wild", "growing", "padded", "uniform", "has_rope"),
            *("has_factor", "has_signs", "has_squares", "rounds_output"),
        )
        flags = [name for name in names if getattr(self, name)]
        sizes = (
            f"{self.kv_format}-h{self.heads}-d{self.head_dim}-b{self.requests}x{self.queries}"
            f"-w{self.window}p{self.window_page}-k{self.entries}p{self.entry_page}"
        )
        compute = [] if self.compute == "bf16" else [self.compute]
        return "-".join([sizes, self.form, self.sink_mode, *compute, *flags])


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call, by name; the tensors are as in the operator."""

    q: Tensor
    window_pool: Tensor
    window_indices: Tensor | None
    window_lens: Tensor | None
    compressed_pool: Tensor | None
    compressed_indices: Tensor | None
    compressed_lens: Tensor | None
    sink_logits: Tensor
    q_factor: Tensor | None = None
    q_squares: Tensor | None = None
    rope: Tensor | None = None
    positions: Tensor | None = None
    block_table: Tensor | None = None
    request_ids: Tensor | None = None
    window_table: Tensor | None = None
    case: Case | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The positional arguments."""
        return tuple(getattr(self, field.name) for field in fields(self)[:8])

    @property
    def optional(self) -> dict[str, Tensor | None]:
        """The tensors among the keyword arguments."""
        return {field.name: getattr(self, field.name) for field in fields(self)[8:-1]}

    @property
    def options(self) -> dict[str, object]:
        """The keyword arguments that the public function and the oracle share."""
        config = self.case.config
        return {
            **self.optional,
            "sink_mode": config.sink_mode,
            "softmax_scale": config.softmax_scale,
            "sliding_window": config.sliding_window,
            "ratio": config.ratio,
            "rope_dim": config.rope_dim,
            "q_eps": config.q_eps,
        }

    @property
    def kernel_options(self) -> dict[str, object]:
        """Further keyword arguments of the public function."""
        config = self.case.config
        return {
            "num_splits": config.num_splits,
            "batch_invariant": config.batch_invariant,
            "compute": config.compute,
        }

    def to(self, device: torch.device | str) -> Inputs:
        """The same inputs on a device, as strided as these."""
        moved = {name: _moved(x, device) for name, x in vars(self).items() if torch.is_tensor(x)}
        return replace(self, **moved)

    def of_tokens(self, tokens: slice) -> Inputs:
        """Some of the tokens alone."""
        names = ("q", "window_indices", "window_lens", "compressed_indices", "compressed_lens")
        names += ("q_factor", "q_squares", "positions", "request_ids")
        values = {name: getattr(self, name) for name in names}
        return replace(self, **{name: x[tokens] for name, x in values.items() if x is not None})

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """The FP32 oracle's o, lse and largest scores."""
        return oracle(*self.tensors, **self.options)

    def call(self, scalars: tuple[int, ...], workspace: int = 0) -> Call:
        """A call of the compiled kernel, with every output. Where that is codes, `o` is there for
        what kernels do not round on their way.

        Args:
            scalars: num_splits, num_ctas, sliding_window and ratio.
            workspace: fp32 elements.
        """
        names = ("num_splits", "num_ctas", "sliding_window", "ratio")
        required = {field.name: getattr(self, field.name) for field in fields(self)[:8]}
        rounds_output = self.case.rounds_output
        return make_call(
            ARGS,
            values(self.case.config),
            {**required, **self.optional},
            dict(zip(names, scalars, strict=True)),
            wanted=("codes", "code_scales") if rounds_output else ("lse", "max_logits"),
            workspace=workspace,
            sizes={"C": num_term_rows(self.case.tokens)},
        )


def make_inputs(case: Case, seed: int, device: torch.device | str = "cpu") -> Inputs:
    """Random inputs of a case: unit queries, keys of unit scale or growing along a direction."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tokens, dim = case.tokens, case.head_dim
    q, sinks = normal(tokens, case.heads, dim), normal(case.heads)
    direction = normal(dim)
    direction /= direction.norm()
    if case.growing:
        q += 11 * direction
    q *= case.deviation
    window = Pool.make(case, case.window, case.window_page, direction, generator)
    entries = Pool.make(case, case.entries, case.entry_page, direction, generator)
    if case.wild:
        for pool, is_tabled in ((window, case.form != "list"), (entries, case.form == "table")):
            if is_tabled:
                pool.lose_pages(generator)
    positions = _positions(case, generator)
    names: dict[str, Tensor | None] = {}
    if case.form == "list":
        names["window_indices"], names["window_lens"] = window.lists(case, generator)
    else:
        names["window_table"] = window.table
        window.keep(window.positions_seen(case, positions))
    if case.entries == 0:
        entries = None
    elif case.form == "table":
        names["block_table"] = entries.table
        entries.keep(entries.entries_seen(case, positions))
    else:
        lists = entries.lists(case, generator)
        names["compressed_indices"], names["compressed_lens"] = lists
    factor = torch.rand(tokens, case.heads, generator=generator) + 0.5
    if case.has_signs:
        factor[:, 1::3] *= -1
        factor[:, 3::8] = 0
    angles = normal(case.window + case.entries * case.ratio + 8, case.rope_dim // 2)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    inputs = Inputs(
        q.bfloat16(),
        window.packed(case),
        names.get("window_indices"),
        names.get("window_lens"),
        None if entries is None else entries.packed(case),
        names.get("compressed_indices"),
        names.get("compressed_lens"),
        sinks,
        factor if case.has_factor else None,
        _squares(q.bfloat16()) if case.has_squares else None,
        table if case.has_rope else None,
        positions if case.has_rope or case.form != "list" else None,
        names.get("block_table"),
        _request_ids(case) if case.form != "list" else None,
        names.get("window_table"),
        case,
    )
    return inputs.to(device)


def _squares(q: Tensor) -> Tensor:
    """[T, n_h, parts] sums of squares of 16 channels."""
    return q.float().square().unflatten(-1, (-1, CHANNELS)).sum(-1)


def _request_ids(case: Case) -> Tensor:
    ids = torch.arange(case.requests, dtype=torch.int32).repeat_interleave(case.queries)
    if case.wild and case.tokens > 2:
        ids[1] = -1
    return ids


def _positions(case: Case, generator: torch.Generator) -> Tensor:
    """[T] int32 of consecutive tokens: far enough for every key to exist, or anything."""
    last = max(case.window, case.entries * case.ratio) + case.queries
    ends = torch.full((case.requests,), last)
    if case.ragged:
        ends = torch.randint(case.queries, last + 1, (case.requests,), generator=generator)
        ends[0] = case.queries
    back = torch.arange(-case.queries, 0)
    return (ends[:, None] + back).flatten().to(torch.int32)


def _moved(x: Tensor, device: torch.device | str) -> Tensor:
    """A tensor on a device with the same strides, what lies between its elements included."""
    if x.device == torch.device(device):
        return x
    storage = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return storage.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


# ---- comparison ----------------------------------------------------------------------------------


def assert_codes_of(found: Mapping[str, Tensor], o: Tensor) -> None:
    """Check codes and scales against what bf16 rows become, bit for bit; rows of codes of no token
    are looked at by nobody."""
    codes, scales = to_terms(o.flatten(1))
    own = own_rows(len(o))
    for name, wanted in (("codes", codes), ("code_scales", scales)):
        got, rows = found[name].view(torch.uint8).cpu(), wanted.view(torch.uint8).cpu()
        wrong = got[own] != rows[own] if name == "codes" else got != rows
        assert not wrong.any(), f"{name}: {int(wrong.sum())} of {wrong.numel()} bytes differ"


def assert_paged_close(
    inputs: Inputs,
    o: Tensor,
    lse: Tensor,
    max_logits: Tensor,
    *,
    is_unit_scale: bool = True,
) -> None:
    """Check outputs against the oracle by this package's bounds, and inputs in FlashMLA's style by
    FlashMLA's.

    Args:
        is_unit_scale: whether keys have the deviation of the case.
    """
    expected, compute = inputs.expected(), inputs.case.compute
    score_bound = MAX_LOGITS_BOUND
    if compute == "bf16":
        assert_attention_close(o, expected[0], lse, expected[1])
    else:
        is_near = is_unit_scale and inputs.case.has_unit_scores
        bound, score_bound = (CODES_BOUNDS if is_near else CODES_FAR_BOUNDS)[compute]
        assert_close("o", o, expected[0], bound)
        silent = (expected[0] == 0).all(-1)
        assert (o[silent.to(o.device)] == 0).all(), "o: without weight it is exactly 0"
        assert_lse_close(lse, expected[1], score_bound)
    if compute == "bf16" and inputs.case.deviation <= FLASH_MLA_DEVIATION:
        bounds = (OUT_ABSOLUTE, OUT_RELATIVE, OUT_COSINE)
        assert_flash_mla_close("o", o.float(), expected[0], *bounds)
        assert_flash_mla_close("lse", lse, expected[1], LSE_ABSOLUTE, LSE_RELATIVE)
    wanted = expected[2].to(max_logits.device)
    none = wanted == -torch.inf
    assert torch.equal(max_logits == -torch.inf, none), "max_logits: -inf belongs to no key alone"
    error = torch.where(none, 0.0, max_logits - wanted).abs() / wanted.abs().clamp(1, 1e30)
    assert error.max() <= score_bound if error.numel() else True, (
        f"max_logits: off by {error.max():.2e}"
    )


def assert_flash_mla_close(
    name: str,
    actual: Tensor,
    expected: Tensor,
    absolute: float,
    relative: float,
    cosine: float | None = None,
) -> None:
    """FlashMLA's check: masks of NaN and infinities agree; elsewhere absolutely or relatively."""
    got, wanted = actual.double(), expected.to(actual.device).double()
    assert torch.equal(got.isnan(), wanted.isnan()), f"{name}: NaN elsewhere"
    assert torch.equal(got.isposinf(), wanted.isposinf()), f"{name}: +inf elsewhere"
    assert torch.equal(got.isneginf(), wanted.isneginf()), f"{name}: -inf elsewhere"
    finite = wanted.isfinite()
    got, wanted = got[finite], wanted[finite]
    if got.numel() == 0:
        return
    error = (got - wanted).abs()
    bad = (error >= absolute) & (error / wanted.abs().clamp(min=1e-6) >= relative)
    assert not bad.any(), (
        f"{name}: {int(bad.sum())} of {bad.numel()} elements are off, by {error[bad].max():.2e}"
    )
    if cosine is not None:
        norms = float(got.square().sum() + wanted.square().sum())
        difference = 1 - 2 * float((got * wanted).sum()) / norms if norms else 0.0
        assert difference <= cosine, f"{name}: cosine difference {difference:.2e}"
