"""Inputs of `sparse_fmha_with_swa`, made from a seed: what every backend is tested with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dsv4.reference.attention import sparse_fmha_with_swa as oracle


@dataclass(frozen=True)
class Case:
    """Sizes and options of one call.

    `requests` says which request each run of consecutive tokens belongs to, -1 for padding:
    ((0, 3), (-1, 1), (2, 2)) are three tokens of request 0, a padding token, two of request 2.
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
    ragged: bool = True  # compressed_lens of every kind, else none
    growing: bool = False  # later keys score higher, so that the running maximum moves
    softmax_scale: float | None = None

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.requests)

    def __str__(self) -> str:
        flags = [name for name in ("is_causal", "ragged", "growing") if getattr(self, name)]
        sizes = f"h{self.heads}-d{self.head_dim}-k{self.top_k}-w{self.window_rows}"
        return "-".join([sizes, self.sink_mode, *flags])


@dataclass(frozen=True)
class Inputs:
    """Positional tensors and keyword options of one call."""

    tensors: tuple[Tensor, ...]
    options: dict = field(default_factory=dict)

    def to(self, device: torch.device | str) -> Inputs:
        """The same inputs on a device."""
        options = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in self.options.items()
        }
        return Inputs(tuple(tensor.to(device) for tensor in self.tensors), options)

    def expected(self) -> tuple[Tensor, Tensor]:
        """The FP32 oracle's o and lse."""
        host = self.to("cpu")
        floats = [x.float() if x.is_floating_point() else x for x in host.tensors]
        return oracle(*floats, **host.options)

    def replaced(self, **changes: Tensor) -> Inputs:
        """Other tensors, by argument name."""
        names = ("q", "compressed_kv", "swa_kv", "swa_lens", "sink_logits", "request_ids")
        tensors = tuple(changes.pop(name, value) for name, value in zip(names, self.tensors))
        return Inputs(tensors, {**self.options, **changes})


def make_inputs(case: Case, seed: int, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Unit-scale random inputs of a case; rows that must be ignored hold NaN and Inf."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def integers(low: int, high: int, size: int) -> Tensor:
        return torch.randint(low, high + 1, (size,), generator=generator, dtype=torch.int32)

    tokens, top_k, rows = case.tokens, case.top_k, case.window_rows
    q = normal(tokens, case.heads, case.head_dim)
    compressed_kv = normal(tokens, top_k, case.head_dim)
    swa_kv = normal(case.batch, rows, case.head_dim)
    if case.growing:
        direction = normal(case.head_dim)
        direction /= direction.norm()
        # Maxima of blocks rise by 2^11 to 2^22 over 600 keys: every row is rescaled.
        q += 11 * direction
        for keys in (compressed_kv, swa_kv):
            rise = torch.linspace(-1, 1, keys.shape[1])[:, None]
            keys += rise * math.sqrt(case.head_dim) * direction
            keys /= (1 + rise.square()).sqrt()
            # A few keys may get all weight here. bf16 then errs by up to 2^-8 |v| in the weights,
            # which up to |v| = 1.28 is within the absolute bound, and by 2^-8 |o| in the output,
            # which is within the relative one. A value of 5.9 missed both together.
            keys.clamp_(-1.25, 1.25)
    ids = [request for request, count in case.requests for _ in range(count)]
    request_ids = torch.tensor(ids, dtype=torch.int32).reshape(tokens)
    # One window is exactly full, one nearly empty, the others of any length.
    swa_lens = integers(0, rows, case.batch)
    for place, length in enumerate((rows, min(3, rows))[: case.batch]):
        swa_lens[place] = length
    lens = torch.full((tokens,), top_k, dtype=torch.int32)
    if case.ragged and tokens:
        lens = integers(0, top_k, tokens)
        for place, length in enumerate((top_k, 0, min(64, top_k))[:tokens]):
            lens[place] = length
    _poison(compressed_kv, lens)
    _poison(swa_kv, swa_lens)
    options = {
        "sink_mode": case.sink_mode,
        "is_causal": case.is_causal,
        "sliding_window": case.sliding_window,
        "softmax_scale": case.softmax_scale,
        "compressed_lens": lens if case.ragged else None,
    }
    sinks = normal(case.heads)
    tensors = (q.to(dtype), compressed_kv.to(dtype), swa_kv.to(dtype), swa_lens, sinks, request_ids)
    return Inputs(tensors, options)


def _poison(keys: Tensor, lens: Tensor) -> None:
    """Fill rows at and past their length with NaN and infinities."""
    values = torch.tensor([torch.nan, torch.inf, -torch.inf])
    masked = torch.arange(keys.shape[1]) >= lens[:, None]
    keys[masked] = values[torch.arange(int(masked.sum())) % 3][:, None].expand(-1, keys.shape[2])


# Every head count with every head_dim, each sink mode and window rule several times, at least three
# tiles of compressed keys with a ragged last one.
GRID = [
    Case(
        heads=heads,
        head_dim=head_dim,
        top_k=(200, 333, 600, 1)[place % 4],
        window_rows=(128, 150, 300)[place % 3],
        sink_mode=("softmax", "swa_gate")[(place + place // 4) % 2],
        is_causal=(place // 2) % 2 == 1,
        ragged=place % 3 != 0,
        growing=place % 2 == 1,
        softmax_scale=(None, 1.5 * head_dim**-0.5)[place % 5 == 4],
    )
    for place, (heads, head_dim) in enumerate(
        (heads, head_dim) for head_dim in (64, 128, 512) for heads in (8, 16, 64, 128)
    )
]

# Everything with everything.
FULL_GRID = [
    Case(
        heads=heads,
        head_dim=head_dim,
        top_k=top_k,
        window_rows=window_rows,
        sink_mode=sink_mode,
        is_causal=is_causal,
        ragged=ragged,
        growing=growing,
    )
    for heads in (8, 16, 64, 128)
    for head_dim in (64, 128, 256, 512)
    for top_k, window_rows in ((0, 128), (64, 1), (200, 160), (640, 300))
    for sink_mode in ("softmax", "swa_gate")
    for is_causal in (False, True)
    for ragged, growing in ((True, False), (False, True))
]

# One request of many tokens, as in prefill; and many requests of one token, as in decode.
PREFILL = Case(
    requests=((0, 150), (1, 77), (-1, 5)), batch=2, window_rows=277, is_causal=True, top_k=90
)
DECODE = Case(requests=tuple((row, 1) for row in range(70)), batch=70, window_rows=128)
SHAPES = [PREFILL, DECODE, replace(PREFILL, sink_mode="swa_gate", heads=16, head_dim=128)]
