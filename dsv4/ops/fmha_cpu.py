"""`sparse_fmha_with_swa` in plain torch: the CPU backend, and every GPU without a kernel of ours.

Tokens are processed in chunks and keys in tiles with an online softmax, so that the temporaries
stay below a constant whatever the sizes; no Python loop runs per token. On CUDA tensors it does
not synchronise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.kernels.attention.config import FmhaConfig

TILE = 256  # keys per step of the online softmax
_CHUNK_ELEMENTS = 1 << 21  # float32 elements of one gathered tile of keys
# Start of the running maximum. Finite, so that exp(-inf - maximum) of a masked logit is 0, not NaN.
_LOWEST = torch.finfo(torch.float32).min / 2


@dataclass(frozen=True)
class Keys:
    """Keys of one branch for a chunk of tokens: rows first[t] .. first[t] + count[t] - 1.

    `table` [R, K, head_dim]; `rows` [c] is each token's entry of the first dimension, None when
    token i uses entry i. `count` None means all K rows.
    """

    table: Tensor
    rows: Tensor | None
    first: Tensor | None
    count: Tensor | None
    capacity: int

    def tile(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Keys start..stop of every token in float32 [c, n, head_dim], and their mask [c, n].

        Masked rows are zero: a NaN left in them would survive a zero weight.
        """
        index = torch.arange(start, stop, device=self.table.device)
        mask = None if self.count is None else index < self.count[:, None]
        if self.rows is None:
            keys = self.table[:, start:stop].float()
        elif self.first is None:
            keys = self.table[:, start:stop].index_select(0, self.rows).float()
        else:
            row = (self.first[:, None] + index).clamp_(max=self.table.shape[1] - 1)
            keys = self.table[self.rows[:, None], row].float()
        if mask is not None:
            # Out of place: float() of float32 keys is the caller's own tensor.
            keys = torch.where(mask[..., None], keys, 0.0)
        return keys, mask


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
    tokens, _, head_dim = q.shape
    if tokens == 0:
        return
    batch, window_rows, _ = swa_kv.shape
    first, count, capacity = _window(config, swa_lens, request_ids, batch, window_rows)
    rows = request_ids.clamp(0, max(batch - 1, 0)).long()
    active = request_ids >= 0
    top_k = compressed_kv.shape[1]
    compressed_count = torch.full_like(request_ids, top_k)
    if compressed_lens is not None:
        compressed_count = compressed_lens.clamp(0, top_k)
    compressed_count = compressed_count * active

    chunk = max(1, _CHUNK_ELEMENTS // (head_dim * TILE))
    for begin in range(0, tokens, chunk):
        part = slice(begin, begin + chunk)
        compressed = _branch(
            config, q[part], Keys(compressed_kv[part], None, None, compressed_count[part], top_k)
        )
        window = _branch(
            config,
            q[part],
            Keys(swa_kv, rows[part], None if first is None else first[part], count[part], capacity),
        )
        part_o, part_lse = _merge(config.sink_mode, *compressed, *window, sink_logits)
        o[part] = part_o
        if lse is not None:
            lse[part] = part_lse


def _window(
    config: FmhaConfig, swa_lens: Tensor, request_ids: Tensor, batch: int, window_rows: int
) -> tuple[Tensor | None, Tensor, int]:
    """First visible row (None: 0) and number of visible rows of each token, and their bound."""
    if batch == 0:
        return None, torch.zeros_like(request_ids), 0
    active = request_ids >= 0
    rows = request_ids.clamp(min=0).long()
    lens = swa_lens.clamp(0, window_rows)[rows]
    if not config.is_causal:
        return None, lens * active, window_rows
    # Token j of the c consecutive tokens of a request sits at row p = len - c + j.
    index = torch.arange(request_ids.numel(), device=request_ids.device)
    slot = torch.where(active, rows, batch)
    last = torch.full((batch + 1,), -1, device=index.device)
    last = last.scatter_reduce(0, slot, index, "amax")[slot]
    position = lens - 1 - (last - index)
    first = (position - config.sliding_window + 1).clamp(min=0)
    count = (position - first + 1).clamp(min=0) * active
    return first, count, min(window_rows, config.sliding_window)


def _branch(config: FmhaConfig, q: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
    """Attention of a chunk over one branch: normalised output [c, n_h, d] and lse [c, n_h].

    A token without keys gets output 0 and lse -inf.
    """
    round_p = q.dtype == torch.bfloat16
    q = q.float() * config.scale
    maximum = q.new_full(q.shape[:2], _LOWEST)
    total = q.new_zeros(q.shape[:2])
    output = torch.zeros_like(q)
    for start in range(0, _longest(keys), TILE):
        tile, mask = keys.tile(start, min(start + TILE, keys.capacity))
        logits = torch.bmm(q, tile.mT)
        if mask is not None:
            logits.masked_fill_(~mask[:, None, :], -torch.inf)
        new_maximum = torch.maximum(maximum, logits.amax(-1))
        weights = logits.sub_(new_maximum[..., None]).exp_()
        decay = (maximum - new_maximum).exp_()
        total = total.mul_(decay).add_(weights.sum(-1))
        if round_p:
            weights = weights.bfloat16().float()
        output = torch.baddbmm(output.mul_(decay[..., None]), weights, tile)
        maximum = new_maximum
    empty = total == 0
    return output / total.masked_fill(empty, 1.0)[..., None], maximum + total.log()


def _longest(keys: Keys) -> int:
    """Number of keys to visit: on the CPU no further than the longest token of the chunk."""
    if keys.count is None or keys.count.device.type != "cpu":
        return keys.capacity
    return int(keys.count.max())


def _merge(
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
    merged = weight_c[..., None] * o_c + weight_w[..., None] * o_w
    # -inf minus -inf is NaN: without keys, or with a sink of -inf beside an empty branch.
    return merged.masked_fill_(torch.isneginf(lse)[..., None], 0.0), lse
