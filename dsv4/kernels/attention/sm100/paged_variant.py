"""Common part of Blackwell's paged variants: tiles are gathered, and the gather tells the softmax
which of their rows are keys.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, GridConstant, Int32
from cutlass.experimental.cuda.tensor_map import TensorMap

from dsv4.kernels.attention.gather_fp8 import Fp8Rows
from dsv4.kernels.attention.inverse_rope import rope_row, rotate_back, rotation
from dsv4.kernels.attention.key_span import BOTH_BRANCHES, KeySpan
from dsv4.kernels.attention.paged_context import PagedArguments
from dsv4.kernels.attention.paged_plan import may_round_rows
from dsv4.kernels.attention.row_codes import GROUP_PAIRS, store_group_codes
from dsv4.kernels.attention.sm100.paged_context import PagedParams, TileInfo, gather_maps
from dsv4.kernels.attention.sm100.paged_gather import TmaRows
from dsv4.kernels.attention.sm100.plan_paged import GATHER_WARPS
from dsv4.kernels.attention.sm100.work_tile import COLUMNS, WorkTile
from dsv4.kernels.kit import quant


class PagedVariant:
    """Overrides of `Fmha1Cta` and `Fmha2Cta` that do not depend on the number of CTAs."""

    has_empty_tiles = True

    @property
    def is_fp8(self) -> bool:
        """Whether the pools hold FP8 entries."""
        return self.config.kv_format == "fp8"

    @property
    def rounds_rows(self) -> bool:
        """Whether rows of the output become codes."""
        return may_round_rows(self.config, "sm_100a")

    def _gather_of(self, columns: int, is_pair: bool) -> TmaRows | Fp8Rows:
        """Gather of slices of `columns` columns."""
        if self.is_fp8:
            return Fp8Rows(self.config.head_dim, columns, (), 1, GATHER_WARPS)
        return TmaRows(columns, is_pair)

    # ---- kernels -------------------------------------------------------------------------------

    def _kernel_of(self, arguments: PagedArguments, params: PagedParams):
        """The kernel of the pools' format with its parameters, to be launched; host code."""
        if self.is_fp8:
            return self.entry_kernel(params)
        return self.row_kernel(gather_maps(arguments, params.steps), params)

    @cute.kernel
    def entry_kernel(self, params: PagedParams):
        """The kernel of FP8 entries."""
        self.run(params)

    @cute.kernel
    def row_kernel(
        self, maps: tuple[GridConstant[TensorMap], GridConstant[TensorMap]], params: PagedParams
    ):
        """The kernel of rows, which TMA gathers."""
        self.run(params.with_maps(maps))

    # ---- roles ---------------------------------------------------------------------------------

    def _create_info(self, storage) -> TileInfo:
        return TileInfo.create(storage, self.barriers)

    def _is_load(self, warp_idx: Int32) -> Boolean:
        return warp_idx >= self.warps["load"].first

    def _has_both_branches(self, keys: KeySpan) -> Boolean:
        return keys.has(BOTH_BRANCHES)

    def _gather_warp(self) -> tuple[Int32, Int32]:
        """Number among the warps that convert entries, and lane."""
        lane = cute.arch.lane_idx()
        first = self.warps["load"].first
        return cute.arch.make_warp_uniform(cute.arch.warp_idx() - first), lane

    # ---- epilogue ------------------------------------------------------------------------------

    def _pack_columns(
        self, values: cute.Tensor, words: cute.Tensor, i: int, first_row: int = 0
    ) -> None:
        """Round columns i, 64 of a group of 128, of a thread's rows.

        Args:
            values: (rows, (2, 8)) of the thread, as TMEM loads give them.
            words: [pair, row] bf16 pairs of the group, of some rows from `first_row` on.
        """
        groups = COLUMNS // 8
        for row in range(cute.size(words, mode=[1])):
            for j in range(groups):
                pair = values[first_row + row, (0, j)], values[first_row + row, (1, j)]
                words[i * groups + j, row] = quant.pack_bf16(*pair)

    @cute.jit
    def _store_codes(self, params: PagedParams, token, heads, block, words: cute.Tensor):
        """Write the codes of a group of a thread's rows.

        Args:
            heads: of the rows.
            words: [pair, row] bf16 pairs.
        """
        config = self.config
        for row in cutlass.range_constexpr(cute.size(words, mode=[1])):
            store_group_codes(
                *(params.rounded, token, heads[row], block),
                [words[i, row] for i in range(GROUP_PAIRS)],
                *(config.num_query_heads, config.head_dim),
            )

    @cute.jit
    def _rotate_rows(
        self,
        params: PagedParams,
        work: WorkTile,
        values: cute.Tensor,
        rows: cutlass.Constexpr[int],
        lane: Int32,
    ):
        """Rotate the last 64 columns of O: (rows, (2, 8)) of a thread, as TMEM loads give them."""
        rope = params.rope
        table_row = rope_row(rope, params.keys.positions, work.token)
        first = lane % 4
        for group in cutlass.range_constexpr(COLUMNS // 8):
            angle = rotation(rope, table_row, group * 4 + first)
            for row in cutlass.range_constexpr(rows):
                values[row, (0, group)], values[row, (1, group)] = rotate_back(
                    values[row, (0, group)], values[row, (1, group)], angle
                )
