"""Plan of Blackwell's combine kernel: threads of a row, shared memory, blocks that run at a time.

Plain Python like the plans of the attention kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.kernels.attention.split_kv import MAX_SPLITS
from dsv4.kernels.kit.plan import SMEM_CAPACITY

THREADS = 128  # of a group
BATCH = 4  # splits of a group: a thread's loads of them are in flight together
SM_THREADS = 2048
BLOCK_RESERVE = 1024  # bytes of shared memory that every block takes besides its own


@dataclass(frozen=True)
class PlanCombine:
    """Blocks of `THREADS` x groups threads, a group for every `BATCH` splits."""

    head_dim: int

    @property
    def vector(self) -> int:
        """Columns of a thread. A warp never holds two rows: its lanes hold the weights of one
        row's splits.
        """
        return min(4, self.head_dim // 32)

    @property
    def threads_per_row(self) -> int:
        return self.head_dim // self.vector

    @property
    def rows_per_block(self) -> int:
        return THREADS // self.threads_per_row

    @property
    def groups(self) -> int:
        """Most groups of a block."""
        return MAX_SPLITS // BATCH

    @property
    def smem_bytes(self) -> int:
        """Sums of the groups, fp32, for the most splits that there can be."""
        return 4 * self.vector * THREADS * self.groups

    def blocks_per_sm(self, num_splits: int) -> int:
        """Blocks that an SM runs at a time, as threads and shared memory allow."""
        threads = THREADS * -(-num_splits // BATCH)
        return min(SM_THREADS // threads, SMEM_CAPACITY // (self.smem_bytes + BLOCK_RESERVE))

    def __post_init__(self) -> None:
        assert self.rows_per_block * self.threads_per_row == THREADS, (
            f"combine: rows of {self.head_dim} columns do not divide {THREADS} threads"
        )
