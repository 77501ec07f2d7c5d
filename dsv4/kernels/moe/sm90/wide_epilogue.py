"""Epilogues of products of many tokens. What they need of a column, a lane or a thread holds until
the sums are there, so that few registers wait for them."""

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.kit.quant import pack_bf16
from dsv4.kernels.kit.swizzle import VECTOR_BYTES
from dsv4.kernels.moe.layout import PANEL_ROWS, UNIT_ROWS
from dsv4.kernels.moe.sm90.context import WorkTile
from dsv4.kernels.moe.sm90.epilogue import SwiGlu
from dsv4.kernels.moe.sm90.wide_context import WideContext
from dsv4.kernels.moe.wide_plan import WidePlan

WARP = 32
MATRIX = 8  # rows, and columns, of what an instruction stores transposed
MATRICES = 4  # at a time
GROUPS = WARP // MATRIX  # of eight columns, that a register of each lane holds
CONSUMERS = 1  # named barrier


def runs_of(matrices: int) -> list[tuple[int, int]]:
    """First one and number of those that an instruction stores: 4, 2 or 1."""
    runs, first = [], 0
    while first < matrices:
        count = MATRICES
        while count > matrices - first:
            count //= 2
        runs.append((first, count))
        first += count
    return runs


class WideSwiGlu(SwiGlu):
    """`SwiGlu` with routing weights in the order of tiles."""

    @cute.jit
    def load_columns(
        self, ctx: WideContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        tile: WorkTile, warp, lane,
    ):  # fmt: skip
        """Routing weights of columns `lane`, `lane` + 32 and so on."""
        held = cute.make_rmem_tensor(-(-kind.tokens // WARP), Float32)
        held.fill(1.0)
        if cutlass.const_expr(not is_shared):
            for i in cutlass.range_constexpr(cute.size(held)):
                column = i * WARP + lane
                if column < tile.count:
                    held[i] = ctx.factors[tile.first + column]
        return held

    def _weights(self, factors: cute.Tensor, n: int, lane) -> list[Float32]:
        first = n % GROUPS * 8 + lane % 4 * 2
        return [cute.arch.shuffle_sync(factors[n // GROUPS], first + c) for c in range(2)]


class WideRows:
    """Rows of an expert's output, bf16, by token and its place: they pass through shared memory,
    from where each is written whole.

    Args:
        plan: of the product.
    """

    def __init__(self, plan: WidePlan, top_k: int):
        self.plan = plan
        self.top_k = top_k
        self.threads = plan.warps["consumers"].threads

    @cute.jit
    def load_columns(
        self, ctx: WideContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        tile: WorkTile, warp, lane,
    ):  # fmt: skip
        """Row of y of the column of a thread's number."""
        row, column = Int32(0), warp * WARP + lane
        if column < tile.count:
            token, place = tile.first + column, Int32(self.top_k)
            if cutlass.const_expr(not is_shared):
                pair = ctx.operands.pairs[tile.first + column]
                token, place = pair // self.top_k, pair % self.top_k
            row = token * (self.top_k + 1) + place
        return row

    @cute.jit
    def store(
        self, ctx: WideContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        sums: cute.Tensor, row, tile: WorkTile, warp, lane,
    ):  # fmt: skip
        thread = warp * WARP + lane
        # The outputs of the tile before have been read.
        self._sync()
        if thread < tile.count:
            (ctx.smem.places + thread).store(row)
        for r in cutlass.range_constexpr(2):
            words = []
            for n in cutlass.range_constexpr(kind.column_groups):
                words.append(pack_bf16(*(sums[4 * n + 2 * r + c] for c in range(2))))
            channel = r * (self.plan.panels * PANEL_ROWS) + warp * UNIT_ROWS
            self._stage(ctx, words, channel, lane)
        self._sync()
        self._copy(ctx, tile, thread)

    def _sync(self) -> None:
        """Named barrier of the consumers."""
        cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=self.threads)

    @cute.jit
    def _stage(self, ctx: WideContext, words: cutlass.Constexpr, channel, lane):
        """Write pairs of bf16, of which a lane holds channel `lane / 4` of columns
        2 (lane % 4) + {0, 1} of each group of eight, as rows of eight channels.

        Args:
            words: by group of columns.
            channel: of the tile, the first of eight.
        """
        for first, count in runs_of(len(words)):
            part = words[first : first + count]
            # Each lane has the address of a column of one of the matrices.
            column = first * MATRIX + lane % (len(part) * MATRIX)
            target = ctx.smem.staged.toint() + column * self.plan.staged_row + channel * 2
            registers = ", ".join(f"{{$r{i + 1}}}" for i in range(len(part)))
            cute.arch.inline_ptx(
                f"stmatrix.sync.aligned.m8n8.x{len(part)}.trans.shared.b16 [{{$r0}}], "
                f"{{{registers}}};",
                read_only_args=[target, *part],
            )

    @cute.jit
    def _copy(self, ctx: WideContext, tile: WorkTile, thread):
        """Copy the rows of the used columns to their places in y."""
        vectors = self.plan.tile_rows * 2 // VECTOR_BYTES
        y, channel = ctx.operands.y, tile.row_tile * self.plan.tile_rows
        for index in cutlass.range(thread, tile.count * vectors, self.threads, unroll=2):
            column, vector = index // vectors, index % vectors
            words = cute.make_rmem_tensor(4, Uint32)
            offset = column * self.plan.staged_row + vector * VECTOR_BYTES
            source = ctx.smem.staged + cute.assume(offset, divby=VECTOR_BYTES)
            source = cute.recast_ptr(source, dtype=Uint32)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), words)
            row = (ctx.smem.places + column).load()
            offset = Int64(row) * y.stride[0] + (channel + vector * (VECTOR_BYTES // 2))
            target = pointer_at(y.iterator, offset, Uint32)
            cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(4)))
