"""Seeded inputs of `sparse_fmha_with_swa`, its FP32 oracle, and the comparison with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.reference.attention import sparse_fmha_with_swa as oracle
from dsv4.testing.accuracy import TOLERANCES, assert_close

ELEMENT_BYTES = 2  # bf16
LSE_BOUND = 1e-4  # absolute
LSE_BOUNDS = {torch.bfloat16: LSE_BOUND, torch.float32: 2e-5}  # by the dtype of o
LSE_ROUNDING = 2.0**-23  # relative: float32 keeps 24 bits
MASKED = (torch.nan, torch.inf, -torch.inf)  # what rows that must be ignored hold


@dataclass(frozen=True)
class Case:
    """Sizes and options of one call.

    Attributes:
        requests: which request each run of consecutive tokens belongs to, -1 for padding:
            ((0, 3), (-1, 1), (2, 2)) are three tokens of request 0, a padding token, two of 2.
        ragged: `compressed_lens` of every kind, else none.
        full_windows: every window is as long as it has rows, else of every kind.
        growing: later keys score higher, so that the running maximum moves.
        name: what a table calls it.
    """

    heads: int = 8
    head_dim: int = 64
    top_k: int = 200
    window_rows: int = 200
    sliding_window: int = 128
    requests: Sequence[tuple[int, int]] = ((0, 3), (1, 1), (-1, 1), (2, 4))
    batch: int = 4
    sink_mode: str = "softmax"
    is_causal: bool = False
    ragged: bool = True
    growing: bool = False
    softmax_scale: float | None = None
    full_windows: bool = False
    name: str = ""

    @classmethod
    def decode(
        cls,
        tokens: int,
        heads: int,
        top_k: int,
        window: int = 128,
        head_dim: int = 512,
        name: str = "",
    ) -> Case:
        """One decode step of a model: every token a request of its own, every row valid."""
        return cls(
            heads=heads,
            head_dim=head_dim,
            top_k=top_k,
            window_rows=window,
            sliding_window=window,
            requests=tuple((token, 1) for token in range(tokens)),
            batch=tokens,
            ragged=False,
            full_windows=True,
            name=name,
        )

    @classmethod
    def random(
        cls,
        tokens: int,
        heads: int,
        head_dim: int,
        top_k: int,
        window_rows: int,
        batch: int,
        seed: int,
        *,
        padding: int = 0,
        ragged: bool = False,
        **options: object,
    ) -> Case:
        """Tokens of random requests, padding last; windows are ragged where compressed rows are."""
        return cls(
            heads=heads,
            head_dim=head_dim,
            top_k=top_k,
            window_rows=window_rows,
            requests=_random_requests(tokens, batch, seed, padding),
            batch=batch,
            ragged=ragged,
            full_windows=not ragged,
            **options,
        )

    @property
    def tokens(self) -> int:
        """T of the call."""
        return sum(count for _, count in self.requests)

    @property
    def keys(self) -> int:
        """Rows that a token sees at most."""
        return self.top_k + self.window_rows

    @property
    def bytes(self) -> int:
        """Compulsory traffic of a decode step: KV and q read once, o written once."""
        return ELEMENT_BYTES * self.tokens * self.head_dim * (self.keys + 2 * self.heads)

    @property
    def flops(self) -> int:
        """Operations of both products of a decode step."""
        return 4 * self.tokens * self.heads * self.keys * self.head_dim

    def __str__(self) -> str:
        flags = [name for name in ("is_causal", "ragged", "growing") if getattr(self, name)]
        sizes = f"h{self.heads}-d{self.head_dim}-k{self.top_k}-w{self.window_rows}"
        return "-".join([sizes, self.sink_mode, *flags])


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call, by name; the tensors are as in the operator."""

    q: Tensor
    compressed_kv: Tensor
    swa_kv: Tensor
    swa_lens: Tensor
    sink_logits: Tensor
    request_ids: Tensor
    compressed_lens: Tensor | None = None
    sink_mode: str = "softmax"
    is_causal: bool = False
    sliding_window: int | None = None
    softmax_scale: float | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The positional arguments."""
        return (
            *(self.q, self.compressed_kv, self.swa_kv),
            *(self.swa_lens, self.sink_logits, self.request_ids),
        )

    @property
    def arguments(self) -> dict[str, Tensor | None]:
        """The tensors by their names in the operator's table."""
        names = ("q", "compressed_kv", "swa_kv", "swa_lens", "sink_logits", "request_ids")
        return {name: getattr(self, name) for name in (*names, "compressed_lens")}

    @property
    def options(self) -> dict[str, object]:
        """The keyword arguments, of the public function and of the oracle."""
        return {
            "sink_mode": self.sink_mode,
            "is_causal": self.is_causal,
            "sliding_window": self.sliding_window,
            "softmax_scale": self.softmax_scale,
            "compressed_lens": self.compressed_lens,
        }

    @property
    def size(self) -> tuple[int, int, int]:
        """T, n_h, head_dim."""
        tokens, heads, head_dim = self.q.shape
        return tokens, heads, head_dim

    def replaced(self, **changes: object) -> Inputs:
        """Other arguments, by name."""
        return replace(self, **changes)

    def to(self, device: torch.device | str) -> Inputs:
        """The same inputs on a device, as strided as these."""
        moved = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    def of_tokens(self, tokens: slice) -> Inputs:
        """Some of the tokens alone."""
        names = ("q", "compressed_kv", "request_ids", "compressed_lens")
        values = {name: getattr(self, name) for name in names}
        return replace(self, **{name: x[tokens] for name, x in values.items() if x is not None})

    def with_larger_later_keys(self) -> Inputs:
        """Keys scaled from 0.1 for the first row to 1.2 for the last."""

        def scaled(keys: Tensor) -> Tensor:
            factors = torch.linspace(0.1, 1.2, keys.shape[1], device=keys.device)
            return (keys * factors[:, None]).to(keys.dtype)

        compressed_kv, swa_kv = scaled(self.compressed_kv), scaled(self.swa_kv)
        return replace(self, compressed_kv=compressed_kv, swa_kv=swa_kv)

    def without_window(self) -> Inputs:
        """Windows of no rows."""
        return replace(self, swa_lens=torch.zeros_like(self.swa_lens))

    def window_only(self) -> Inputs:
        """No compressed rows, as in layers that have none."""
        rows, lens = self.compressed_kv[:, :0], self.compressed_lens
        none = None if lens is None else torch.zeros_like(lens)
        return replace(self, compressed_kv=rows, compressed_lens=none)

    def strided(self) -> Inputs:
        """q and KV as slices of wider tensors that hold NaN elsewhere."""
        return replace(
            self,
            **{name: widened(getattr(self, name)) for name in ("q", "compressed_kv", "swa_kv")},
        )

    def expected(self) -> tuple[Tensor, Tensor]:
        """The FP32 oracle's o and lse."""
        return oracle(*self.tensors, **self.options)


def widened(x: Tensor, margin: float = torch.nan) -> Tensor:
    """The same [a, b, c] tensor as the inner slice of [a, b + 2, c + 64] elements of `margin`."""
    shape = (x.shape[0], x.shape[1] + 2, x.shape[2] + 64)
    wide = torch.full(shape, margin, dtype=x.dtype, device=x.device)
    view = wide[:, 1:-1, :-64]
    view.copy_(x)
    return view


def _random_requests(
    tokens: int, batch: int, seed: int, padding: int = 0
) -> tuple[tuple[int, int], ...]:
    """Runs of tokens of random length, one for each request at most; padding comes last."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(max(batch, 1), (tokens - padding,), generator=generator)
    counts = torch.bincount(drawn, minlength=1).tolist()
    runs = tuple((request, count) for request, count in enumerate(counts) if count)
    return (*runs, (-1, padding)) if padding else runs


def make_inputs(
    case: Case,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Inputs:
    """Unit-scale random inputs of a case; rows that must be ignored hold NaN and infinities."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    tokens = case.tokens
    q = normal(tokens, case.heads, case.head_dim)
    compressed_kv = normal(tokens, case.top_k, case.head_dim)
    swa_kv = normal(case.batch, case.window_rows, case.head_dim)
    if case.growing:
        direction = normal(case.head_dim)
        _let_grow(q, (compressed_kv, swa_kv), direction / direction.norm())
    lens = _lengths(
        case.top_k, (case.top_k, 0, min(64, case.top_k)), tokens, case.ragged, generator
    )
    rows = case.window_rows
    swa_lens = _lengths(rows, (rows, min(3, rows)), case.batch, not case.full_windows, generator)
    poison_rows(compressed_kv, lens)
    poison_rows(swa_kv, swa_lens)
    ids = [request for request, count in case.requests for _ in range(count)]
    return Inputs(
        q.to(dtype),
        compressed_kv.to(dtype),
        swa_kv.to(dtype),
        swa_lens,
        normal(case.heads),
        torch.tensor(ids, dtype=torch.int32, device=device).reshape(tokens),
        lens if case.ragged else None,
        case.sink_mode,
        case.is_causal,
        case.sliding_window,
        case.softmax_scale,
    )


def _lengths(
    most: int, first: Sequence[int], count: int, is_ragged: bool, generator: torch.Generator
) -> Tensor:
    """`count` lengths up to `most`: all of them, or the `first` ones given and others at random."""
    device = generator.device
    lens = torch.full((count,), most, dtype=torch.int32, device=device)
    if is_ragged:
        lens.random_(0, most + 1, generator=generator)
        lens[: len(first)] = torch.tensor(first[:count], dtype=torch.int32, device=device)
    return lens


def _let_grow(q: Tensor, all_keys: Sequence[Tensor], direction: Tensor) -> None:
    """Make maxima of blocks rise by 2^11 to 2^22 over 600 keys: every row is rescaled."""
    q += 11 * direction
    for keys in all_keys:
        rise = torch.linspace(-1, 1, keys.shape[1], device=q.device)[:, None]
        keys += rise * math.sqrt(q.shape[2]) * direction
        keys /= (1 + rise.square()).sqrt()
        # A few keys may get all weight here. bf16 then errs by up to 2^-8 |v| in the weights, which
        # up to |v| = 1.28 is within the absolute bound, and by 2^-8 |o| in the output, which is
        # within the relative one. A value of 5.9 missed both together.
        keys.clamp_(-1.25, 1.25)


def poison_rows(keys: Tensor, lens: Tensor) -> None:
    """Fill rows [n, rows, d] at and past their length [n] with NaN and infinities."""
    values = torch.tensor(MASKED, device=keys.device)
    masked = torch.arange(keys.shape[1], device=keys.device) >= lens[:, None]
    kinds = torch.arange(int(masked.sum()), device=keys.device) % len(MASKED)
    keys[masked] = values[kinds][:, None].expand(-1, keys.shape[2])


def assert_attention_close(
    o: Tensor,
    expected_o: Tensor,
    lse: Tensor | None = None,
    expected_lse: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Check an output [T, n_h, d], and lse [T, n_h] where given.

    A token and head whose oracle is exactly zero must be exactly zero. Infinite lse must agree
    exactly. `dtype` is that of the computation whose bounds count, where it is not that of `o`.
    """
    dtype = dtype or o.dtype
    assert_close("o", o, expected_o, TOLERANCES[dtype])
    silent = (expected_o == 0).all(-1)
    assert (o[silent.to(o.device)] == 0).all(), (
        "o: a token and head without weight must give exactly 0"
    )
    if lse is not None:
        assert_lse_close(lse, expected_lse, LSE_BOUNDS[dtype])


def assert_lse_close(lse: Tensor, expected: Tensor, bound: float = LSE_BOUND) -> None:
    """Check lse [T, n_h]; infinities must agree, NaN never passes.

    The bound is absolute, widened by a few units in the last place where lse is in the thousands.
    """
    error = lse_error(lse, expected)
    assert error <= bound, f"lse: off by {error:.2e}"


def lse_error(lse: Tensor, expected: Tensor) -> float:
    """Largest |difference| of two lse, without what float32 rounds; infinite where one is NaN or
    infinities differ."""
    assert lse.shape == expected.shape, f"lse: shape {lse.shape}, oracle {expected.shape}"
    actual, wanted = lse.double(), expected.to(lse.device).double()
    infinite = wanted.isinf()
    if actual.isnan().any() or not torch.equal(actual[infinite], wanted[infinite]):
        return math.inf
    actual, wanted = actual[~infinite], wanted[~infinite]
    if actual.numel() == 0:
        return 0.0
    excess = (actual - wanted).abs() - LSE_ROUNDING * wanted.abs()
    return max(excess.max().item(), 0.0)
