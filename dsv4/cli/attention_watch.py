"""The attention calls of a model: counted, kept with their outputs, or made without entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4.ops.head_rotation import norm_factor
from dsv4.ops.runtime.runner import runner_config
from dsv4.reference.paged_attention import decoded, listed_slots, tabled_slots
from dsv4.reference.paged_attention import sparse_fmha_paged as oracle

if TYPE_CHECKING:
    from dsv4.kernels.attention.paged_config import PagedFmhaConfig
    from dsv4.testing.attention import Inputs

OPERATOR = torch.ops.dsv4.sparse_fmha_paged.default
OUTPUTS = ("o", "lse", "max_logits", "workspace")


@dataclass(frozen=True)
class AttentionCall:
    """A call of the attention operator.

    Attributes:
        arguments: its input tensors, by name, as they were.
        config: what it computes.
        o: its output, [T, n_h, head_dim].
    """

    arguments: dict[str, Tensor | None]
    config: PagedFmhaConfig
    o: Tensor

    def expected(self, **changes: Tensor | None) -> Tensor:
        """The FP32 oracle's output.

        Args:
            changes: arguments instead of those of the call.
        """
        config = self.config
        return oracle(
            **{**self.arguments, **changes},
            q_eps=config.q_eps,
            sink_mode=config.sink_mode,
            softmax_scale=config.softmax_scale,
            sliding_window=config.sliding_window,
            ratio=config.ratio,
            rope_dim=config.rope_dim,
        )[0]

    def gathered(self) -> Inputs:
        """The same attention as a call of `sparse_fmha_with_swa`, which reads keys side by side,
        takes queries with their factors, and leaves the output rotated."""
        from dsv4.testing.attention import Inputs

        given, config = self.arguments, self.config
        keys, lens = zip(*(self._keys(branch) for branch in ("compressed", "window")))
        q, factor, squares = given["q"], given["q_factor"], given["q_squares"]
        if squares is not None:
            factor = norm_factor(squares, q.shape[-1], config.q_eps)
        return Inputs(
            q if factor is None else (q * factor[..., None]).to(q.dtype),
            keys[0],
            keys[1],
            lens[1],
            given["sink_logits"],
            torch.arange(len(q), dtype=torch.int32, device=q.device),
            compressed_lens=lens[0],
            sink_mode=config.sink_mode,
            is_causal=False,
            sliding_window=config.sliding_window,
            softmax_scale=config.softmax_scale,
        )

    def _keys(self, branch: str) -> tuple[Tensor, Tensor]:
        """Keys [T, k, head_dim] of every token's branch, zeros behind its own, and lengths [T]."""
        q, pool = self.arguments["q"], self.arguments[f"{branch}_pool"]
        slots = [[] if pool is None else self._slots(branch, t) for t in range(len(q))]
        lens = torch.tensor([len(row) for row in slots], dtype=torch.int32, device=q.device)
        keys = q.new_zeros(len(q), max(map(len, slots)), q.shape[-1])
        if pool is not None:
            rows = decoded(pool, q.shape[-1], self.config.rope_dim)
            for key, row in zip(keys, slots):
                key[: len(row)] = rows[row]
        return keys, lens

    def _slots(self, branch: str, token: int) -> list[int]:
        given, pool = self.arguments, self.arguments[f"{branch}_pool"]
        pages, size, _ = pool.shape
        request = int(given["request_ids"][token])
        if request < 0:
            return []
        indices, lens = given[f"{branch}_indices"], given[f"{branch}_lens"]
        if indices is not None:
            return listed_slots(indices[token], int(lens[token]), pages * size)
        end = int(given["positions"][token]) + 1
        if branch == "window":
            table, numbers = "window_table", range(max(0, end - self.config.sliding_window), end)
        else:
            table, numbers = "block_table", range(end // self.config.ratio)
        return tabled_slots(given[table][request], numbers, size, pages)


class AttentionWatch(TorchDispatchMode):
    """Counter of the attention operator's calls, with the latest ones.

    With `drop_compressed` no call sees compressed entries: that branch is off, and nothing else of
    the model changes.
    """

    def __init__(self, keep: int = 0, drop_compressed: bool = False) -> None:
        super().__init__()
        self.keep = keep
        self.drop_compressed = drop_compressed
        self.calls = 0
        self.kept: list[AttentionCall] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not OPERATOR:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        names = (argument.name for argument in func._schema.arguments)
        named = {**dict(zip(names, args)), **(kwargs or {})}
        if self.drop_compressed:
            entries = ("compressed_pool", "compressed_indices", "compressed_lens", "block_table")
            named |= dict.fromkeys(entries)
        result = func(**named)
        if self.keep:
            self.kept = [*self.kept, _call(named)][-self.keep :]
        return result


def _call(named: dict[str, Any]) -> AttentionCall:
    inputs = {
        name: value.clone() if torch.is_tensor(value) else None
        for name, value in named.items()
        if name not in (*OUTPUTS, "runner_id")
    }
    return AttentionCall(inputs, runner_config(named["runner_id"]), named["o"].clone())
