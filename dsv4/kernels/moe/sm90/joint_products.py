"""Both products of all experts in one launch, for few tokens.

Between two launches memory rests: the last products, the end of a grid, the lists, the first access
to the weights. Here a CTA takes tiles one after the other, all of gate and up before those of down,
and asks for the weights of the next one while it multiplies the last of this one: which weights
these are does not depend on h. What multiplies them waits for all tiles of its group's h.

Tiles are taken by ticket, in that order, so that no CTA waits for one that may not have started: a
tile of h with a lower ticket has a CTA that runs, and which has nothing to wait for before it. The
next ticket is drawn with the last stages of a tile: CTAs that are ahead take more of them. The
shared expert's h is that of the launch before: its down product comes between, for CTAs that have
no tile of gate and up.

Memory order: the named barrier of the consumers puts the stores of a tile of h before one thread's
reduction, whose release at GPU scope is cumulative; a lane of an activation warp acquires, the
named barrier of these warps extends that to the others. All accesses are of the generic proxy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from dsv4.kernels.kit import mbarrier, pdl
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.moe.plan import BOARD_WORDS, ProductPlan
from dsv4.kernels.moe.routing import GROUP_WORDS
from dsv4.kernels.moe.sm90.context import (
    Operands,
    ProductContext,
    WorkTile,
    allocate,
    load_group,
)
from dsv4.kernels.moe.sm90.product import GroupedProduct, launch_options

UP, DOWN, NONE = 0, 1, 2
ARRIVED = 3  # word of a group: tiles of its h that are there
H_STORED, H_THERE = 1, 2  # named barriers, of the consumers and of the activation warps
WARP = 32
VECTOR = 4  # words of a load


class JointTile(NamedTuple):
    """A tile of one of the products, as the board shows it."""

    product: Int32  # UP, DOWN, or NONE after the last tile
    group: Int32
    is_shared: Boolean
    row_tile: Int32
    expert: Int32
    first: Int32
    count: Int32

    @property
    def work(self) -> WorkTile:
        return WorkTile(self.is_shared, self.row_tile, self.expert, self.first, self.count)


@dataclass(frozen=True)
class JointContext:
    """A CTA's part of the launch: the same shared memory and mbarriers for both products."""

    up: ProductContext
    down: ProductContext
    taken: cute.Tensor  # [1] int32: tickets


@dataclass(frozen=True)
class TileList:
    """Tiles by ticket: gate and up by group, down of the shared expert, down of the routed ones.

    The groups of a CTA's first tickets are in registers: a lane has that of its number.
    """

    up: ProductPlan
    down: ProductPlan
    groups: cute.Tensor  # [G, 4]
    own_group: tuple[Int32, Int32, Int32]  # of this lane: expert, first position, positions
    num_groups: Int32
    tokens: Int32  # that are no padding
    shared_slots: Int32

    def _shared(self, slot: Int32) -> JointTile:
        """A tile of the shared expert."""
        columns, row_tiles = self.down.shared.tokens, self.down.row_tiles
        first = slot // row_tiles * columns
        count = cutlass.max(cutlass.min(self.tokens - first, columns), 0)
        return JointTile(
            Int32(DOWN), Int32(0), Boolean(True), slot % row_tiles, Int32(0), first, count
        )

    @cute.jit
    def find(self, ticket: Int32) -> JointTile:
        """The tile of a ticket; all lanes call this."""
        up_tiles = self.num_groups * self.up.row_tiles
        shared = ticket - up_tiles
        routed = shared - self.shared_slots
        tile = self._shared(shared)
        if ticket < up_tiles:
            tile = self._routed(UP, ticket // self.up.row_tiles, ticket % self.up.row_tiles)
        elif routed >= self.num_groups * self.down.row_tiles:
            tile = JointTile(
                Int32(NONE), Int32(0), Boolean(False), Int32(0), Int32(0), Int32(0), Int32(0)
            )
        elif routed >= 0:
            tile = self._routed(DOWN, routed // self.down.row_tiles, routed % self.down.row_tiles)
        return tile

    @cute.jit
    def _routed(self, product: cutlass.Constexpr, group: Int32, row_tile: Int32) -> JointTile:
        words = tuple(cute.arch.shuffle_sync(word, group % WARP) for word in self.own_group)
        if group >= WARP:
            words = load_group(self.groups, group)
        return JointTile(Int32(product), group, Boolean(False), row_tile, *words)


class JointProducts:
    """Kernel: gate and up of the routed experts, and down of all.

    Args:
        up: of the routed experts.
        down: of all.
    """

    def __init__(self, up: GroupedProduct, down: GroupedProduct):
        self.up = up
        self.down = down
        assert up.plan.smem == down.plan.smem, f"{up.plan}\n{down.plan}"
        assert up.plan.barriers == down.plan.barriers, f"{up.plan}\n{down.plan}"
        self.consumer_threads = up.plan.warps["consumers"].threads

    @cute.jit
    def launch(self, up: Operands, down: Operands, taken: cute.Tensor, stream, num_sms):
        """Launch as many CTAs as the GPU holds, or as there can be tiles."""
        plan = self.down.plan
        tiles = up.groups.shape[0] * (self.up.plan.row_tiles + plan.row_tiles)
        tiles += self.shared_slots(up)
        grid = [cutlass.min(tiles, num_sms * plan.tiling.ctas_per_sm), 1, 1]
        self.kernel(up, down, taken).launch(grid=grid, stream=stream, **launch_options(plan))

    @cute.kernel
    def kernel(self, up: Operands, down: Operands, taken: cute.Tensor):
        plan = self.down.plan
        smem, pipes = allocate(plan)
        cta, ctas = Int32(cute.arch.block_idx()[0]), Int32(cute.arch.grid_dim()[0])
        ctx = JointContext(
            ProductContext(up, smem, pipes, cta, ctas),
            ProductContext(down, smem, pipes, cta, ctas),
            taken,
        )
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                mbarrier.init(plan.barriers, pipes.edges)
            cute.arch.mbarrier_init_fence()
        self.down.activations.clear(ctx.down)
        cute.arch.sync_threads()
        if warp == plan.warps["load"].first:
            pdl.launch_dependents()
            self.load(ctx)
        elif warp >= plan.warps["activations"].first:
            self.fill(ctx, warp - plan.warps["activations"].first)
        else:
            self.compute(ctx, warp)

    def shared_slots(self, operands: Operands) -> Int32:
        """Tiles of the shared expert, those of padding too."""
        plan, tokens = self.down.plan, operands.weights.shape[0]
        return cute.ceil_div(Int32(tokens), plan.shared.tokens) * plan.row_tiles

    # ---- load warp ----

    @cute.jit
    def load(self, ctx: JointContext):
        """Take tiles, show them to the other warps, and load their weights."""
        plan = self.down.plan
        ring, board = ctx.down.pipes.ring, ctx.down.pipes.board
        lane = cute.arch.lane_idx()
        pdl.wait_for_previous_launch()
        ticket = self._take(ctx, lane)
        tiles = self._read_list(ctx, lane)
        cursor, place = ring.producer(), board.producer()
        tile = tiles.find(cute.arch.shuffle_sync(ticket, 0))
        place = self._show(ctx, tile, lane, place)
        while tile.product != NONE:
            # The next ticket is on its way while the last stages wait for room in the ring.
            last = cutlass.max(self._steps(tile) - plan.stages, 0)
            cursor = self._load_tile(ctx, tile, lane, Int32(0), last, cursor)
            ticket = self._take(ctx, lane)
            cursor = self._load_tile(ctx, tile, lane, last, Int32(plan.stages), cursor)
            tile = tiles.find(cute.arch.shuffle_sync(ticket, 0))
            place = self._show(ctx, tile, lane, place)

    def _steps(self, tile: JointTile) -> Int32:
        """Stages of a tile."""
        up, down = self.up.plan.routed[0].steps, self.down.plan.routed[0].steps
        routed = cutlass.select_(tile.product == UP, Int32(up), Int32(down))
        return cutlass.select_(tile.is_shared, Int32(self.down.plan.shared.steps), routed)

    @cute.jit
    def _read_list(self, ctx: JointContext, lane) -> TileList:
        """The tiles of the launch, from the lists that the launch before has made."""
        operands = ctx.down.operands
        groups = operands.groups
        own = (Int32(0), Int32(0), Int32(0))
        if lane < groups.shape[0]:
            own = load_group(groups, Int32(lane))
        return TileList(
            self.up.plan, self.down.plan, groups, own, operands.counts[0], operands.counts[1],
            self.shared_slots(operands),
        )  # fmt: skip

    @cute.jit
    def _take(self, ctx: JointContext, lane) -> Int32:
        """The next ticket, of lane 0."""
        ticket = Int32(0)
        if lane == 0:
            counter = pointer_at(ctx.taken.iterator, Int64(0), Int32, align=4)
            ticket = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
        return ticket

    @cute.jit
    def _show(self, ctx: JointContext, tile: JointTile, lane, place: Cursor) -> Cursor:
        """Write a tile on the board."""
        board = ctx.down.pipes.board
        board.acquire(place)
        if lane == 0:
            words = cute.make_rmem_tensor(BOARD_WORDS, Int32)
            words.fill(0)
            for i, word in enumerate(tile):
                words[i] = Int32(word)
            target = self._board(ctx, place)
            cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(BOARD_WORDS)))
        board.at(place.stage).commit(lane)
        return board.next(place)

    def _board(self, ctx: JointContext, place: Cursor) -> cute.Pointer:
        return ctx.down.smem.board + cute.assume(place.stage * BOARD_WORDS, divby=VECTOR)

    @cute.jit
    def _load_tile(self, ctx: JointContext, tile: JointTile, lane, first, most, cursor: Cursor):
        """Load at most so many stages of a tile from `first` on."""
        if tile.product == UP:
            cursor = self.up.loader.load_tile(
                ctx.up, self.up.plan.routed[0], False, tile.work, lane, first, cursor, most
            )
        elif tile.is_shared:
            cursor = self.down.loader.load_tile(
                ctx.down, self.down.plan.shared, True, tile.work, lane, first, cursor, most
            )
        else:
            cursor = self.down.loader.load_tile(
                ctx.down, self.down.plan.routed[0], False, tile.work, lane, first, cursor, most
            )
        return cursor

    # ---- the others ----

    @cute.jit
    def _read(self, ctx: JointContext, lane, place: Cursor):
        """The next tile on the board."""
        board = ctx.down.pipes.board
        board.wait(place)
        words = cute.make_rmem_tensor(BOARD_WORDS, Int32)
        source = self._board(ctx, place)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(BOARD_WORDS)), words)
        board.release(place, lane)
        found = [words[i] for i in range(len(JointTile._fields))]
        is_shared = JointTile._fields.index("is_shared")
        found[is_shared] = found[is_shared] != 0
        return JointTile(*found), board.next(place)

    @cute.jit
    def fill(self, ctx: JointContext, warp):
        """Fill the stages of every tile; `warp` counts within the role."""
        lane = cute.arch.lane_idx()
        pdl.wait_for_previous_launch()
        cursor, turn = ctx.down.pipes.ring.producer(), Int32(0)
        tile, place = self._read(ctx, lane, ctx.down.pipes.board.consumer())
        while tile.product != NONE:
            if tile.product == UP:
                cursor, turn = self._fill_tile(
                    self.up.activations, ctx.up, tile, warp, lane, cursor, turn
                )
            else:
                if not tile.is_shared:
                    self._wait_for_h(ctx, tile.group, warp, lane)
                cursor, turn = self._fill_tile(
                    self.down.activations, ctx.down, tile, warp, lane, cursor, turn
                )
            tile, place = self._read(ctx, lane, place)

    @cute.jit
    def _fill_tile(
        self, role: cutlass.Constexpr, ctx: ProductContext, tile: JointTile, warp, lane,
        cursor: Cursor, turn,
    ):  # fmt: skip
        rows = role.rows(ctx, tile.work, lane)
        return role.fill_tile(ctx, tile.work, rows, warp, lane, cursor, turn)

    @cute.jit
    def compute(self, ctx: JointContext, warp):
        """Every tile of the CTA."""
        lane = cute.arch.lane_idx()
        pdl.wait_for_previous_launch()
        cursor = ctx.down.pipes.ring.consumer()
        tile, place = self._read(ctx, lane, ctx.down.pipes.board.consumer())
        while tile.product != NONE:
            if tile.product == UP:
                cursor = self.up.consumers.compute_tile(ctx.up, tile.work, warp, lane, cursor)
                self._publish_h(ctx, tile.group, warp, lane)
            else:
                cursor = self.down.consumers.compute_tile(ctx.down, tile.work, warp, lane, cursor)
            tile, place = self._read(ctx, lane, place)

    # ---- h ----

    @cute.jit
    def _publish_h(self, ctx: JointContext, group: Int32, warp, lane):
        """Count a tile of h, which all consumers have stored."""
        cute.arch.barrier(barrier_id=H_STORED, number_of_threads=self.consumer_threads)
        if warp == 0 and lane == 0:
            arrived = self._arrived(ctx, group)
            cute.arch.red(arrived, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")

    @cute.jit
    def _wait_for_h(self, ctx: JointContext, group: Int32, warp, lane):
        """Wait for all tiles of a group's h. One thread polls: those of all CTAs meet in L2."""
        if warp == 0 and lane == 0:
            arrived, found = self._arrived(ctx, group), Int32(0)
            while found < self.up.plan.row_tiles:
                found = cute.arch.load(arrived, Int32, sem="acquire", scope="gpu")
        threads = self.down.plan.warps["activations"].threads
        cute.arch.barrier(barrier_id=H_THERE, number_of_threads=threads)

    def _arrived(self, ctx: JointContext, group: Int32) -> cute.Pointer:
        offset = Int64(group) * GROUP_WORDS + ARRIVED
        return pointer_at(ctx.down.operands.groups.iterator, offset, Int32, align=4)
