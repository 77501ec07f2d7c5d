"""Gather of bf16 rows of a paged cache by TMA: one warp of a CTA fills its KV stages.

`tile::gather4` fetches a swizzle span of four rows that are named by coordinates; a row outside the
tensor becomes zeros without being read, which serves what is no key. A lane resolves two of a
tile's 64 rows, and issues the gathers of its own four rows and columns.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsv4.kernels.attention.key_span import KeySpan
from dsv4.kernels.attention.paged_keys import KeyPool
from dsv4.kernels.attention.sm100.paged_context import PagedParams, TileInfo
from dsv4.kernels.attention.sm100.plan_1cta import BF16_BYTES, KEYS
from dsv4.kernels.kit.swizzle import SPAN_BYTES
from dsv4.kernels.kit.tma import tma_gather4

HALF_TILE = KEYS // 2  # rows of a ballot
GROUPS = KEYS // 4  # of four rows
SPAN_COLUMNS = SPAN_BYTES // BF16_BYTES
BOX_BYTES = KEYS * SPAN_BYTES  # 64 rows of a swizzle span


@dataclass(frozen=True)
class TmaRows:
    """Gather of `columns` columns of key tiles; the whole warp calls its methods.

    Args:
        is_pair: whether bytes are counted in the even CTA of a pair.
    """

    columns: int
    is_pair: bool

    def fetch(self, params: PagedParams, span: KeySpan, token, i) -> tuple:
        """Words of the lane's two rows of key tile i; see `KeyPool.fetch`."""
        lane = cute.arch.lane_idx()
        return tuple(
            params.keys.fetch(span, token, i, lane + HALF_TILE * h, KEYS) for h in range(2)
        )

    @cute.jit
    def coordinates(self, params: PagedParams, span: KeySpan, i, words: tuple) -> tuple:
        """Coordinates of the lane's two rows of key tile i, -1 where there is no key."""
        is_window, first, _ = span.tile(i, KEYS)
        keys, lane = params.keys, cute.arch.lane_idx()
        rows = [Int32(-1), Int32(-1)]
        for h in cutlass.range_constexpr(2):
            n = first + lane + HALF_TILE * h
            if is_window:
                rows[h] = self._coordinate(keys.window, params.steps[1], words[h], n)
            else:
                rows[h] = self._coordinate(keys.compressed, params.steps[0], words[h], n)
        return tuple(rows)

    def _coordinate(self, pool: KeyPool, steps: tuple, word, n) -> Int32:
        page, offset, is_key = pool.place(word, n)
        row = page * Int32(steps[0]) + offset * Int32(steps[1])
        return cutlass.select_(is_key, row, Int32(-1))

    def describe(self, info: TileInfo, count: Int32, rows: tuple, is_window) -> None:
        """Say which rows of tile number `count` are keys."""
        is_key = tuple(cute.arch.vote_ballot_sync(row >= 0) for row in rows)
        info.send(count, is_key, is_window, Int32(0), cute.arch.lane_idx(), HALF_TILE)

    @cute.jit
    def quads(self, rows: tuple) -> tuple:
        """Coordinates of the four rows that the lane fetches."""
        group = cute.arch.lane_idx() % GROUPS
        is_low = group < GROUPS // 2
        quad = []
        for j in cutlass.range_constexpr(4):
            source = group * 4 % HALF_TILE + j
            low, high = (cute.arch.shuffle_sync(row, source) for row in rows)
            quad.append(cutlass.select_(is_low, low, high))
        return tuple(quad)

    @cute.jit
    def copy(
        self, params: PagedParams, is_window, quad: tuple, column, stage: cute.Pointer,
        barrier: cute.Pointer,
    ):  # fmt: skip
        """Gather columns from `column` on of a tile into a stage that has been acquired."""
        lane = cute.arch.lane_idx()
        group, box = lane % GROUPS, lane // GROUPS
        boxes = self.columns // SPAN_COLUMNS
        compressed, window = params.maps
        descriptor = cutlass.select_(is_window, window, compressed)
        start = Int32(stage.toint()) + group * (4 * SPAN_BYTES)
        full = Int32(barrier.toint())
        for i in cutlass.range_constexpr(-(-boxes // 2)):
            own = box + 2 * i
            if own < boxes:
                tma_gather4(
                    *(descriptor, start + own * BOX_BYTES),
                    *(column + own * SPAN_COLUMNS, quad, full, self.is_pair),
                )
