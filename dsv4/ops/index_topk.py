"""`index_topk`: the indexer's choice among compressed entries, as function and operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Integral
from operator import index
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.kernels.indexer.config import (
    ARGS,
    BINS,
    KERNEL_DIM,
    KERNEL_HEADS,
    KERNEL_ROPE_DIM,
    RANKS,
    IndexTopkConfig,
    has_kernel,
    values,
)
from dsv4.kernels.indexer.plan import choose_launch, clusters_of
from dsv4.kernels.kit.index_entry import INDEX_FORMATS, format_of
from dsv4.ops.index_keys import decode_index, encode_index, read_keys, round_index
from dsv4.ops.index_rounding import rotated_heads
from dsv4.ops.runtime import state as states
from dsv4.ops.runtime.backend import Device
from dsv4.ops.runtime.checks import check_is_tensor
from dsv4.ops.runtime.kernel_op import KernelOp, Sizes
from dsv4.ops.runtime.launch import Launch
from dsv4.ops.topk import topk_stable
from dsv4.quoting import quoted

MODEL_PAGE = 32  # entries of a block of 128 tokens
MODEL_TOPK = {"Flash": 512, "Pro": 1024}
MAX_SCORES = 1 << 27
"""Bound on the scores of a launch: more tokens go in several."""
MAX_PRODUCTS = 1 << 26
"""Bound on the products [tokens, heads or channels, entries] of the torch implementation at
once."""
_FORMATS = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_ALIGNED = 8  # scores, a vector of which kernels load


class IndexTopk(KernelOp):
    """Scores of index keys for each token, and the best entries in ascending order."""

    name = "index_topk"
    config = IndexTopkConfig
    args = ARGS
    kernels: ClassVar = {
        "sm_90a": "dsv4.kernels.indexer.sm90.index_topk",
        "sm_100a": "dsv4.kernels.indexer.sm100.index_topk",
    }
    early = ("rope", "positions", "lens", "request_ids", "block_table")

    def values(self, config: IndexTopkConfig) -> Mapping[str, int | str]:
        return values(config)

    def has_kernel(self, config: IndexTopkConfig) -> bool:
        return has_kernel(config)

    def plan(self, config: IndexTopkConfig, sizes: Sizes, device: Device) -> tuple[int, ...]:
        """CTAs of the scores' launch, 0 where there is one launch, and CTAs that choose for a
        token."""
        return choose_launch(sizes["T"], sizes["N"], device.num_sms, config.rank)

    def workspace_size(
        self, config: IndexTopkConfig, sizes: Sizes, scalars: tuple[int, ...]
    ) -> int:
        return BINS * sizes["T"]

    def max_workspace_size(self, config: IndexTopkConfig, rows: int, device: Device) -> int:
        return BINS * rows

    def needs(self, config: IndexTopkConfig, name: str) -> bool | None:
        return config.has_codes if name == "q_scale" else None

    def check_sizes(self, config: IndexTopkConfig, *tensors: Tensor | None) -> None:
        rope, keys, q_scale = tensors[2], tensors[7], tensors[10]
        _check_scale(config, q_scale, weights=tensors[1])
        if config.has_codes and tensors[0].dtype != torch.bfloat16:
            raise TypeError(f"q: got {tensors[0].dtype}, pairs of codes are torch.bfloat16")
        if rope.shape[0] == 0:
            raise ValueError("rope: got no rows, needs one per position")
        size, row = keys.shape[1:]
        if config.is_packed and size > 1 and keys.stride(1) != row:
            raise ValueError(
                f"keys: got strides {tuple(keys.stride())}, each page of FP8 or FP4 keys must be "
                f"contiguous: [any, {row}, 1]"
            )

    def make_launch(self, state: states.State) -> Launch:
        """The usual launch; of codes behind a check of their scales: the compiled function takes
        any number of rows."""
        launch, config = super().make_launch(state), state.config
        if not config.has_codes:
            return launch
        place = self.num_required + 1  # behind the runner's id

        def checked(*arguments: Any) -> None:
            q_scale = arguments[place] if len(arguments) > place else None
            _check_scale(config, q_scale, arguments[1])
            launch(*arguments)

        return checked

    def probes(
        self, config: IndexTopkConfig, target: Device, device: torch.device
    ) -> Iterator[tuple[Tensor | int, ...]]:
        """A call for each kernel that chooses."""
        for ctas, clusters in enumerate(clusters_of(config.rank)):
            for cluster in clusters:
                yield states.smallest_call(self, config, (ctas, cluster), device)

    def torch(
        self,
        config: IndexTopkConfig,
        q: Tensor,
        weights: Tensor,
        rope: Tensor,
        positions: Tensor,
        lens: Tensor,
        request_ids: Tensor,
        block_table: Tensor,
        keys: Tensor,
        indices: Tensor,
        scores: Tensor,
        q_scale: Tensor | None = None,
    ) -> None:
        requests, columns = block_table.shape
        entries = min(columns * config.page, scores.shape[1])
        if 0 in (q.shape[0], requests, entries, keys.shape[0]):
            indices.fill_(-1)
            return
        queries = _queries_of(config, q, q_scale, rope, positions)
        factors = (weights * config.weight_scale).float()
        is_request = (request_ids >= 0) & (request_ids < requests)
        counts = torch.where(is_request, lens, 0).clamp(0, entries)
        table = block_table[torch.where(is_request, request_ids, 0)]
        numbers = torch.arange(entries, device=q.device)
        pages = table[:, numbers // config.page]
        step = max(1, MAX_PRODUCTS // (entries * max(config.heads, config.dim)))
        for start in range(0, q.shape[0], step):
            part = slice(start, start + step)
            found = _keys_of(config, keys, pages[part].clamp(0, keys.shape[0] - 1), numbers)
            products = torch.matmul(queries[part].float(), found.mT).relu_()
            found = torch.matmul(factors[part, None], products).squeeze(1)
            is_seen = numbers < counts[part, None]
            found = torch.where(is_seen, found, 0.0).to(scores.dtype)
            scores[part, :entries] = found
            best, number = topk_stable(found.float(), config.topk, is_seen)
            is_chosen = torch.arange(config.topk, device=q.device) < number[:, None]
            best = torch.where(is_chosen, best, entries).sort(-1).values
            is_chosen = best < entries
            names = torch.where(is_chosen, best, 0)
            if config.gives_slots:
                page = pages[part].gather(1, names)
                is_chosen &= page >= 0
                names = page * config.page + names % config.page
            indices[part] = torch.where(is_chosen, names, -1).to(torch.int32)

    def aot(self) -> Mapping[str, IndexTopkConfig]:
        """The indexers of Flash and Pro, in this package's pages of either format."""
        scale = KERNEL_DIM**-0.5 * KERNEL_HEADS**-0.5
        sizes = (KERNEL_HEADS, KERNEL_DIM, KERNEL_ROPE_DIM)
        return {
            f"{label}, {keys}": IndexTopkConfig(
                *sizes, topk, MODEL_PAGE, scale, keys, gives_slots=True
            )
            for label, topk in MODEL_TOPK.items()
            for keys in INDEX_FORMATS
        }


INDEX_TOPK = IndexTopk()
_op = INDEX_TOPK.overload


def index_topk(
    q: Tensor,
    weights: Tensor,
    rope: Tensor,
    positions: Tensor,
    lens: Tensor,
    request_ids: Tensor,
    block_table: Tensor,
    keys: Tensor,
    *,
    q_scale: Tensor | None = None,
    topk: int,
    weight_scale: float,
    is_rounded: bool = True,
    rank: str = "bf16",
    gives_slots: bool = False,
    max_entries: int | None = None,
    out: Tensor | None = None,
    scores_out: Tensor | None = None,
) -> Tensor:
    """Choose the `topk` best entries of each of T tokens.

    I[t, n] = sum over heads of w[t, h] * relu(q[t, h] . k[n]), in fp32, rounded once; the higher
    score first, of equals the lower number; -0 equals 0. Queries are rotated by the token's
    position, rounded to their dtype, and where `is_rounded` Hadamard-transformed and rounded to FP4
    per 32 channels, as the keys have been. w is `weights * weight_scale` in their dtype. A token
    that sees no more than `topk` entries chooses all, and nothing is scored. Technical report
    section 2.3.1; official inference/model.py, `Indexer`. A token's bits depend on that token and
    its keys alone. Nothing is read back to the host.

    Args:
        q: [T, h * d] bfloat16 (float32 by the torch implementation); or float8_e4m3fn with
            `q_scale`: rotated and rounded before, as `fp8_linear` does it with `IndexRounding`.
        weights: [T, h], in the dtype of q; of codes bfloat16.
        rope: [R, rope_dim] float32, cosines, then sines, per position.
        positions: [T] int32, clamped to 0..R - 1.
        lens: [T] int32, entries that each token sees: the first ones of its request. Clamped to
            what the table has room for, and to `max_entries`.
        request_ids: [T] int32, row of `block_table`; another number: padding, which sees nothing.
            GPUs read `positions`, `lens`, `request_ids` and `block_table` while the launch before
            may still run: they must not be what a kernel with programmatic dependent launch just
            wrote.
        block_table: [B, W] int32, page of every P entries.
        keys: [pages, P, d + 4] uint8 of FP8 keys or [pages, P, d / 2 + d / 32] uint8 of FP4 keys
            (`dsv4.kernels.kit.index_entry`), which give the same bits; or [pages, P, d] rows in the
            dtype of q. Pages may lie apart. Kernels take FP8 and FP4 keys of 128 channels.
        q_scale: [T, h] float32, of the heads of codes.
        topk: entries chosen.
        rank: "bf16", or "fp32": scores are not rounded. Kernels take longer then: they have two
            launches for any size, and a CTA chooses for a token.
        gives_slots: return slots, page * P + place, instead of entries.
        max_entries: host's bound on `lens`; it sizes the scores in memory.
        out: [T, topk] int32.
        scores_out: [T, N] in the dtype of `rank`, N at least the entries: the scores of entries
            that a token sees, where it sees more than `topk`; the rest is undefined.

    Returns:
        [T, topk] int32 in ascending order, -1 behind the last.

    Raises:
        ValueError, TypeError: an argument does not fit, or requires grad; the message names it.
    """
    has_codes = _have_codes(q, weights, q_scale)
    if has_codes:
        # What the table has of them: the dtype of q is that of the weights.
        q = q.view(torch.bfloat16)
    given = (q, weights, rope, positions, lens, request_ids, block_table, keys)
    try:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            INDEX_TOPK.check_no_gradients(*given)
        heads, tokens = index(weights.shape[1]), q.shape[0]
        dim = index(q.shape[1]) * (2 if has_codes else 1) // max(heads, 1)
        key_format = _FORMATS.get(keys.dtype) or format_of(dim, index(keys.shape[2]))
        identity = index_topk_runner_id(
            heads, dim, index(rope.shape[1]), topk, index(keys.shape[1]), weight_scale, key_format,
            is_rounded, rank, gives_slots, has_codes,
        )  # fmt: skip
        if out is None:
            size = tokens, _integer("topk", topk)
            out = torch.empty(size, dtype=torch.int32, device=q.device)
        entries = block_table.shape[1] * keys.shape[1]
        if max_entries is not None:
            entries = min(entries, _checked_bound(max_entries))
        if scores_out is not None:
            _op(*given, out, scores_out, identity, *([q_scale] if has_codes else []))
            return out
        entries += -entries % _ALIGNED
        dtype = getattr(torch, RANKS[rank])
        step = max(1, min(tokens, MAX_SCORES // max(entries, 1)))
        scores = torch.empty((step, entries), dtype=dtype, device=q.device)
        for start in range(0, max(tokens, 1), step):
            part = slice(start, start + step)
            rows = (q[part], weights[part], rope, *(x[part] for x in given[3:6]), *given[6:])
            chosen = out[part]
            scales = [q_scale[part]] if has_codes else []
            _op(*rows, chosen, scores[: chosen.shape[0]], identity, *scales)
    except Exception:
        INDEX_TOPK.explain(*given, out, scores_out, q_scale)
        for name, tensor in (("out", out), ("scores_out", scores_out)):
            if tensor is not None:
                check_is_tensor(name, tensor)
        raise
    return out


@torch.compiler.assume_constant_result
def index_topk_runner_id(
    heads: int,
    dim: int,
    rope_dim: int,
    topk: int,
    page: int,
    weight_scale: float,
    key_format: str = "fp8",
    is_rounded: bool = True,
    rank: str = "bf16",
    gives_slots: bool = False,
    has_codes: bool = False,
) -> int:
    """Id of a configuration, what `torch.ops.dsv4.index_topk` takes; see `IndexTopkConfig`."""
    return INDEX_TOPK.runner_id(
        heads, dim, rope_dim, topk, page, weight_scale, key_format, is_rounded, rank, gives_slots,
        has_codes,
    )  # fmt: skip


def _have_codes(q: Tensor, weights: Tensor, q_scale: Tensor | None) -> bool:
    """Whether queries come in codes; TypeError or ValueError where they lack their scales, or have
    some without codes."""
    for name, tensor in (("q", q), ("weights", weights)):
        check_is_tensor(name, tensor)
    has_codes = q.dtype == torch.float8_e4m3fn
    if has_codes == (q_scale is None):
        got = "nothing" if q_scale is None else "a tensor"
        raise ValueError(f"q_scale: got {got}, q is {q.dtype}")
    if not has_codes:
        return False
    check_is_tensor("q_scale", q_scale)
    if weights.dtype != torch.bfloat16:
        raise TypeError(
            f"weights: got {weights.dtype}, beside codes of queries needs torch.bfloat16"
        )
    odd = q.dim() != 2 or q.shape[1] % 2 or q.stride(0) % 2 or q.storage_offset() % 2
    if odd or q.stride(1) != 1:
        raise ValueError(
            f"q: got shape {quoted(q.shape)}, strides {quoted(q.stride())}, codes need [T, h * d] "
            "in contiguous rows that start at multiples of two bytes"
        )
    return True


def _check_scale(config: IndexTopkConfig, q_scale: Tensor | None, weights: Tensor) -> None:
    """Refuse scales of queries without codes, and codes without theirs: ValueError."""
    if config.has_codes == (q_scale is None):
        got = "nothing" if q_scale is None else "a tensor"
        raise ValueError(
            f"q_scale: got {got}, q is {'in codes' if config.has_codes else 'no codes'}"
        )
    if q_scale is not None and q_scale.shape[0] != weights.shape[0]:
        raise ValueError(f"q_scale: got {q_scale.shape[0]} rows, needs {weights.shape[0]}")


def _checked_bound(max_entries: object) -> int:
    bound = _integer("max_entries", max_entries, " or None")
    if bound < 0:
        raise ValueError(f"max_entries: got {bound}, needs at least 0")
    return bound


def _integer(name: str, value: object, others: str = "") -> int:
    """A number that is an integer, not only equal to one; TypeError for another."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: got a {type(value).__name__}, needs an integer{others}")
    return int(value)


# ---- torch implementation ------------------------------------------------------------------------


def _queries_of(
    config: IndexTopkConfig, q: Tensor, q_scale: Tensor | None, rope: Tensor, positions: Tensor
) -> Tensor:
    """Queries [T, h, d] as they are multiplied."""
    if config.has_codes:
        codes = q.view(torch.float8_e4m3fn).unflatten(1, (config.heads, config.dim))
        return decode_index(codes, q_scale)
    queries = rotated_heads(q, config.dim, rope, positions)
    if config.is_packed:
        return decode_index(*encode_index(queries))
    return round_index(queries) if config.is_rounded else queries


def _keys_of(config: IndexTopkConfig, keys: Tensor, pages: Tensor, numbers: Tensor) -> Tensor:
    """Keys [tokens, N, d] fp32 of entries `numbers` [N] in `pages` [tokens, N]."""
    place = numbers % config.page
    if config.is_packed:
        return read_keys(keys, config.dim, pages, place)
    return keys[pages, place].float()
