"""`sparse_fmha_with_swa` in plain torch: the CPU backend, and every GPU without a kernel of ours.

Tokens are processed in chunks and keys in tiles with an online softmax, so that the temporaries
stay below a constant whatever the sizes; no Python loop runs per token. On CUDA tensors it does
not synchronise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dsv4.kernels.attention.config import FmhaConfig

TILE = 256  # keys per step of the online softmax
# Float32 elements of one tile of keys: on the CPU 4 MiB, which caches hold; on a GPU 64 MiB, which
# keeps it busy between launches.
_CPU_TILE_ELEMENTS = 1 << 20
_GPU_TILE_ELEMENTS = 1 << 24
# Start of the running maximum. Finite, so that exp(-inf - maximum) of a masked logit is 0, not NaN.
_LOWEST = torch.finfo(torch.float32).min / 2


@dataclass(frozen=True)
class Keys:
    """Keys of one branch for a chunk of c tokens.

    Token t has the `count[t]` rows of `table[entry[t]]` from `first[t]` on.

    Attributes:
        table: [R, K, head_dim].
        entry: [c] int64; None: token t uses entry t.
        first: [c] int64; None: 0.
        count: [c] int64.
        lo, hi: bounds of `count`, as close as they are known without synchronising.
    """

    table: Tensor
    entry: Tensor | None
    first: Tensor | None
    count: Tensor
    lo: int
    hi: int

    @classmethod
    def of(cls, table: Tensor, entry: Tensor | None, first: Tensor | None, count: Tensor) -> Keys:
        """Keys with their bounds: read off `count` on the CPU, the capacity elsewhere."""
        lo, hi = 0, table.shape[1]
        if count.device.type == "cpu":
            lo, hi = (int(bound) for bound in count.aminmax())
        return cls(table, entry, first, count, lo, hi)

    def tile(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Keys start..stop of every token in float32 [c, n, head_dim], and their mask [c, 1, n].

        No mask means that all are valid. A masked key repeats a valid one: what lies past the end
        may be NaN, and a weight of zero does not remove a NaN.
        """
        full = stop <= self.lo
        if full and self.entry is None:
            return self.table[:, start:stop].float(), None
        index = torch.arange(start, stop, device=self.table.device)
        entry = self.entry
        if entry is None:
            entry = torch.arange(len(self.count), device=index.device)
        row = index if full else index.minimum((self.count - 1).clamp_(min=0)[:, None])
        if self.first is not None:
            row = row + self.first[:, None]
        keys = self.table[entry[:, None], row].float()
        return keys, None if full else (index < self.count[:, None]).unsqueeze(1)


def sparse_fmha(
    config: FmhaConfig,
    q: Tensor,
    compressed_kv: Tensor,
    swa_kv: Tensor,
    swa_lens: Tensor,
    sink_logits: Tensor,
    request_ids: Tensor,
    o: Tensor,
    compressed_lens: Tensor | None,
    lse: Tensor | None,
) -> None:
    """Write `o` [T, n_h, head_dim] and, when given, `lse` [T, n_h]. Arguments are checked ones.

    bfloat16 inputs: float32 products and sums, probabilities rounded to bfloat16 before the second
    product, the normaliser from unrounded ones (official inference/kernel.py, sparse_attn).
    float32 inputs: no rounding.
    """
    tokens = q.shape[0]
    if tokens == 0:
        return
    top_k = compressed_kv.shape[1]
    # On a GPU ids are not checked: as for kernels, one that names no request is padding.
    active = (request_ids >= 0) & (request_ids < swa_kv.shape[0])
    entry = torch.where(active, request_ids, 0).long()
    count = active * top_k if compressed_lens is None else compressed_lens.clamp(0, top_k) * active
    window_first, window_count = _window(config, swa_kv, swa_lens, entry, active)
    chunk = tokens_at_once(q)
    for begin in range(0, tokens, chunk):
        part = slice(begin, begin + chunk)
        first = None if window_first is None else window_first[part]
        compressed = Keys.of(compressed_kv[part], None, None, count[part])
        window = Keys.of(swa_kv, entry[part], first, window_count[part])
        scaled_q = q[part].float() * config.scale
        round_p = q.dtype == torch.bfloat16
        o_c, lse_c, _ = attend(scaled_q, compressed, round_p)
        o_w, lse_w, _ = attend(scaled_q, window, round_p)
        part_o, part_lse = merge(config.sink_mode, o_c, lse_c, o_w, lse_w, sink_logits)
        o[part] = part_o
        if lse is not None:
            lse[part] = part_lse


def tokens_at_once(q: Tensor) -> int:
    """Tokens whose tiles of keys are held at the same time."""
    elements = _CPU_TILE_ELEMENTS if q.device.type == "cpu" else _GPU_TILE_ELEMENTS
    return max(1, elements // (q.shape[-1] * TILE))


def _window(
    config: FmhaConfig, swa_kv: Tensor, swa_lens: Tensor, entry: Tensor, active: Tensor
) -> tuple[Tensor | None, Tensor]:
    """First visible window row (None: 0) and number of visible rows of each token."""
    batch, rows, _ = swa_kv.shape
    if batch == 0:
        return None, torch.zeros_like(entry)
    lens = swa_lens.clamp(0, rows)[entry] * active
    if not config.is_causal:
        return None, lens
    # The j-th of the c consecutive tokens of a request sits at row len - c + j, so each token is as
    # far from the end of the rows as from the last token of its request.
    index = torch.arange(len(entry), device=entry.device)
    slot = torch.where(active, entry, batch)
    last = index.new_zeros(batch + 1).scatter_reduce_(0, slot, index, "amax")[slot]
    end = (lens - (last - index)).clamp_(min=0) * active
    first = (end - config.sliding_window).clamp_(min=0)
    return first, end - first


class KeyTiles(Protocol):
    """Keys of one branch for a chunk of c tokens: `hi` at most for a token, taken in tiles."""

    hi: int

    def tile(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]: ...


def attend(q: Tensor, keys: KeyTiles, round_p: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of scaled queries [c, n_h, d] over one branch.

    Returns:
        The normalised output [c, n_h, d], lse [c, n_h] and the largest logit [c, n_h]; 0, -inf and
        -inf for a token without keys.
    """
    maximum = q.new_full((*q.shape[:2], 1), _LOWEST)
    total = torch.zeros_like(maximum)
    output = torch.zeros_like(q)
    for start in range(0, keys.hi, TILE):
        tile, mask = keys.tile(start, min(start + TILE, keys.hi))
        logits = torch.bmm(q, tile.mT)
        if mask is not None:
            logits.masked_fill_(~mask, -torch.inf)
        previous, maximum = maximum, torch.maximum(maximum, logits.amax(-1, keepdim=True))
        decay = (previous - maximum).exp_()
        weights = logits.sub_(maximum).exp_()
        total = total.mul_(decay).add_(weights.sum(-1, keepdim=True))
        if round_p:
            weights = weights.bfloat16().float()
        output.mul_(decay).baddbmm_(weights, tile)
    empty = total == 0
    output.div_(total.masked_fill(empty, 1.0)).masked_fill_(empty, 0.0)
    lse = (maximum + total.log_()).squeeze(-1)
    return output, lse, maximum.masked_fill(empty, -torch.inf).squeeze(-1)


def merge(
    sink_mode: str, o_c: Tensor, lse_c: Tensor, o_w: Tensor, lse_w: Tensor, sink: Tensor
) -> tuple[Tensor, Tensor]:
    """Combine both branches and the sink [n_h]: output [c, n_h, d] and lse [c, n_h].

    Weights are sigmoids of differences of logarithms, which neither overflow nor lose an infinite
    sink. Both branches empty: output 0, lse -inf.
    """
    if sink_mode == "swa_gate":
        either_empty = torch.isneginf(lse_c) | torch.isneginf(lse_w)
        lse_w = lse_w + torch.where(either_empty, 0.0, sink)
    lse = torch.logaddexp(lse_c, lse_w)
    weight_c, weight_w = torch.sigmoid(lse_c - lse_w), torch.sigmoid(lse_w - lse_c)
    if sink_mode == "softmax":
        keep = torch.sigmoid(lse - sink)
        weight_c, weight_w = weight_c * keep, weight_w * keep
    merged = (weight_c[..., None] * o_c).addcmul_(weight_w[..., None], o_w)
    # Without any key the weights are NaN: -inf minus -inf.
    return merged.masked_fill_(torch.isneginf(lse)[..., None], 0.0), lse
