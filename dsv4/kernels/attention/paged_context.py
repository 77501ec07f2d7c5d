"""Arguments of a paged attention launch, as the Hopper kernels' `launch` takes them."""

from typing import NamedTuple

from cutlass import Int32, cute

from dsv4.kernels.attention.paged_keys import KeyPool, PagedKeys
from dsv4.kernels.kit.divisor import divisor


class PagedArguments(NamedTuple):
    """Arguments of a kernel's call, in its order but for the stream."""

    q: cute.Tensor  # [T, n_h, head_dim] bf16
    window_pool: cute.Tensor  # [pages, P, row]
    window_indices: cute.Tensor  # [T, k] int32
    window_lens: cute.Tensor  # [T] int32, or [0]
    compressed_pool: cute.Tensor
    compressed_indices: cute.Tensor
    compressed_lens: cute.Tensor
    sink_logits: cute.Tensor  # [n_h] fp32
    o: cute.Tensor  # [T, n_h, head_dim] bf16, written; scratch, or none, where it is rounded
    # [T, n_h] fp32, or [0, n_h]: 1; of a configuration with `q_eps` sums of squares [T, n_h, parts]
    q_factor: cute.Tensor
    rope: cute.Tensor  # [positions, 64] fp32, or [0, 64]: none
    positions: cute.Tensor  # [T] int32, or [0]
    block_table: cute.Tensor  # [B, c] int32, or [0, 0]: lists
    request_ids: cute.Tensor  # [T] int32, or [0]
    window_table: cute.Tensor
    lse: cute.Tensor  # [T, n_h] fp32, written, or [0, n_h]
    max_logits: cute.Tensor  # the same
    codes: cute.Tensor  # [C, n_h head_dim] e4m3, written where the output is rounded
    code_scales: cute.Tensor  # [T, n_h head_dim / 128] E8M0 bytes, the same
    workspace: cute.Tensor  # fp32, see `split_kv`
    num_splits: Int32
    num_sms: Int32  # CTAs that run at a time
    sliding_window: Int32
    ratio: Int32

    def keys(self) -> PagedKeys:
        """All that says which keys there are."""
        return PagedKeys(
            _pool(
                self.compressed_pool,
                self.compressed_indices,
                self.compressed_lens,
                self.block_table,
            ),
            _pool(self.window_pool, self.window_indices, self.window_lens, self.window_table),
            self.positions,
            self.request_ids,
            self.sliding_window,
            self.ratio,
        )


def _pool(pool, indices, lens, table) -> KeyPool:
    by_page, by_columns = divisor(pool.shape[1]), divisor(table.shape[1])
    return KeyPool(pool, indices, lens, table, by_page, by_columns)
