"""Context of a grouped product of experts on Blackwell: what its roles share while it is traced."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from dsv4.kernels.kit import mbarrier
from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.kit.storage import storage_struct
from dsv4.kernels.kit.tcgen05 import Tmem
from dsv4.kernels.moe.packed_rows import PackedRows
from dsv4.kernels.moe.routing import GROUP_WORDS
from dsv4.kernels.moe.sm100.plan import CHUNK, NamedBarriers, ProductPlan


class PackedOperands(NamedTuple):
    """Those of routed experts in NVFP4, beside codes of the shared one."""

    x: PackedRows  # of tokens, or by position of a pair
    x_whole: cute.Tensor  # [1] fp32, of tokens
    y: PackedRows  # of h, by position of a pair; written by the first product
    global_scales: cute.Tensor  # [6, E] fp32


class Operands(NamedTuple):
    """Tensors of a product that are not read through TMA alone.

    Those of two weights are of gate and of up; else both are the same.
    """

    x: cute.Tensor  # codes: [T, K] of tokens, or [P + T, K] of rows in the order of tiles
    x_scale: cute.Tensor  # [.., K / 128] bytes
    weights: tuple[cute.Tensor, cute.Tensor]  # [E, M, ..], tiled
    scales: tuple[cute.Tensor, cute.Tensor]
    shared_weights: tuple[cute.Tensor, cute.Tensor]  # [M, K], tiled
    shared_scales: tuple[cute.Tensor, cute.Tensor]  # [M / 128, K / 128] bytes
    groups: cute.Tensor  # [G, 4]
    counts: cute.Tensor  # [2]
    pairs: cute.Tensor  # [P]
    factors: cute.Tensor  # [T, k], routing weights
    y: cute.Tensor  # written: codes of h, or rows
    y_scale: cute.Tensor  # [P + T, M / 128] bytes, written, of codes of h
    packed: PackedOperands | None = None


class WorkTile(NamedTuple):
    """128 rows of each weight of one expert's product with some of its tokens."""

    is_shared: Boolean
    row_tile: Int32
    expert: Int32
    first: Int32  # position of a pair, or token of the shared expert
    columns: Int32  # that are loaded and multiplied, a multiple of eight
    count: Int32  # of them, that are stored
    steps: Int32  # k blocks, or none of a tile of padding


NO_ROW = -1  # outside of every tensor: a gather gives zeros


@cute.jit
def in_chunks(count: Int32) -> Int32:
    """So many columns as there are in whole chunks, one at least."""
    return cutlass.max((count + (CHUNK - 1)) // CHUNK, 1) * CHUNK


class Division(NamedTuple):
    """Division of a launch's turns among clusters, made on the host: it divides faster."""

    clusters: Int32
    shared_tiles: Int32
    shared_turns: Int32  # of every cluster, and one more of the first few
    rest: Int32


@dataclass(frozen=True)
class TileScheduler:
    """Tiles of a CTA.

    A turn of a cluster is one tile of the shared expert, or as many of the routed ones as take
    about as long: `width` for each CTA. Tiles of the shared expert come first: their weights are
    known before the launch before has made the lists. Those of padding are there, too, and empty,
    so that where the group of a tile lies does not wait for the number of tokens.
    """

    plan: ProductPlan
    groups: cute.Tensor  # [G, 4]
    tokens: Int32
    division: Division
    cluster: Int32
    rank: Int32

    @property
    def shared_turns(self) -> Int32:
        """Of this cluster."""
        division = self.division
        more = cutlass.select_(self.cluster < division.rest, Int32(1), Int32(0))
        return division.shared_turns + more

    def has_tile(self, num_groups: Int32) -> Boolean:
        """Whether this CTA has any."""
        return (self.shared_turns > 0) | (self._routed(0) < num_groups * self.plan.row_tiles)

    def count(self, num_groups: Int32) -> Int32:
        """Tiles of this CTA."""
        plan, shared = self.plan, self.shared_turns
        together, tiles = plan.cluster * plan.width, num_groups * plan.row_tiles
        clusters = self.division.clusters
        turns = self.division.shared_tiles + (tiles + together - 1) // together
        turns = cutlass.max(turns - self.cluster + clusters - 1, 0) // clusters
        # The last turn of all may have fewer tiles.
        routed = (turns - shared) * plan.width
        missing = cutlass.max(self._routed(routed - plan.width) + plan.width - tiles, 0)
        missing = cutlass.select_(routed > 0, cutlass.min(missing, plan.width), Int32(0))
        return shared + routed - missing

    def _routed(self, n: Int32) -> Int32:
        """Index among the tiles of routed experts of the n-th one of this CTA."""
        plan, division = self.plan, self.division
        # Shifts: the compiler does not know that n is no negative number.
        bits = plan.width.bit_length() - 1
        turn = self.cluster + (self.shared_turns + (n >> bits)) * division.clusters
        first = ((turn - division.shared_tiles) * plan.cluster + self.rank) << bits
        return first + (n & (plan.width - 1))

    @cute.jit
    def words(self, n: Int32):
        """Ask for the group of the CTA's n-th tile: expert, first position, positions; of a tile of
        the shared expert, and of one that does not exist, those of another one."""
        index = cutlass.max(self._routed(n - self.shared_turns), 0)
        group = cutlass.min(index // self.plan.row_tiles, self.groups.shape[0] - 1)
        words = cute.make_rmem_tensor(GROUP_WORDS, Int32)
        source = pointer_at(self.groups.iterator, Int64(group) * GROUP_WORDS, Int32)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(GROUP_WORDS)), words)
        return words[0], words[1], words[2]

    def shared(self, n: Int32, live: Int32) -> WorkTile:
        """The n-th tile of the shared expert, with `live` tokens."""
        plan = self.plan
        index, most = self.cluster + n * self.division.clusters, plan.tiling.shared_tokens
        first = index // plan.row_tiles * most
        count, stored = (
            cutlass.max(cutlass.min(tokens - first, most), 0) for tokens in (self.tokens, live)
        )
        # The weights of the first one are asked for before it is known whether there is a token.
        is_used = (stored > 0) | (first == 0)
        steps = cutlass.select_(is_used, Int32(plan.k_blocks), Int32(0))
        row_tile = index % plan.row_tiles
        return WorkTile(
            Boolean(True), row_tile, Int32(0), first, in_chunks(count), stored, steps
        )  # fmt: skip

    @cute.jit
    def tile(self, n: Int32, words, live: Int32) -> WorkTile:
        """The CTA's n-th tile, of the group that `words` gave."""
        plan, shared = self.plan, self.shared_turns
        tile = self.shared(n, live)
        if n >= shared:
            expert, first, count = words
            row_tile = self._routed(n - shared) % plan.row_tiles
            tile = WorkTile(
                Boolean(False), row_tile, expert, first, in_chunks(count), count,
                Int32(plan.k_blocks),
            )  # fmt: skip
        return tile


@dataclass(frozen=True)
class Smem:
    """Shared memory."""

    weight: cute.Pointer  # swizzled [row, 128], by stage and weight; packed [row, 64]
    x: cute.Pointer  # swizzled [token, 128], by stage; packed [token, 64]
    weight_scales: cute.Pointer  # [lane, word] of each atom, by stage and weight
    x_scales: cute.Pointer  # [lane, word] of each atom, by stage
    up: cute.Pointer | None  # fp32 [column, row], to or from the other CTA
    amax: cute.Pointer | None  # [turn, warp, column]


@dataclass(frozen=True)
class Pipelines:
    """The edges of `ProductPlan.barriers`."""

    ring: mbarrier.Ring
    sums: mbarrier.Ring
    up: mbarrier.Buffer | None


@dataclass(frozen=True)
class ProductContext:
    """A CTA's part of a launch."""

    operands: Operands
    smem: Smem
    pipes: Pipelines
    tmem: Tmem
    division: Division
    cluster: Int32
    rank: Int32

    def schedule(self, plan: ProductPlan) -> TileScheduler:
        """The tiles of the CTA."""
        operands = self.operands
        return TileScheduler(
            plan, operands.groups, Int32(operands.factors.shape[0]), self.division, self.cluster,
            self.rank,
        )  # fmt: skip

    def places(self, tile: WorkTile, columns: list) -> list:
        """Ask for the pairs of a routed expert's columns; of others, for any. A tile that does not
        exist may have anything for its group."""
        pairs = self.operands.pairs
        last, found = pairs.shape[0] - 1, []
        for column in columns:
            is_none = tile.is_shared | (column >= tile.count)
            position = cutlass.select_(is_none, Int32(0), tile.first + column)
            found.append(pairs[cutlass.min(cutlass.max(position, 0), last)])
        return found

    def rows(self, plan: ProductPlan, top_k: int, tile: WorkTile, columns: list, found) -> tuple:
        """Rows of x of a tile's columns, whose pairs `places` gave; of a column without a token one
        that x does not have."""
        rows = ()
        for column, pair in zip(columns, found):
            routed = shared = tile.first + column
            if plan.is_gated:
                routed = pair // top_k
            else:
                shared = routed + self.operands.pairs.shape[0]
            routed = cutlass.select_(column < tile.count, routed, Int32(NO_ROW))
            rows += (cutlass.select_(tile.is_shared, shared, routed),)
        return rows


def allocate(plan: ProductPlan, start: cute.Pointer) -> tuple[Smem, Pipelines, Tmem]:
    """Shared memory of a CTA from `start` on: its parts, the mbarriers in it, and what holds the
    address of its TMEM."""
    storage = storage_struct(plan.smem)(start)
    smem = Smem(
        weight=storage.weight.data_ptr(),
        x=storage.x.data_ptr(),
        weight_scales=storage.weight_scales.data_ptr(),
        x_scales=storage.x_scales.data_ptr(),
        up=storage.up.data_ptr() if plan.is_gated else None,
        amax=storage.amax.data_ptr() if plan.is_gated else None,
    )
    names = [edge.name for edge in plan.barriers.edges]
    pipes = {name: mbarrier.pipeline(plan.barriers, storage, name) for name in names}
    tmem = Tmem(storage.tmem_address.data_ptr(), NamedBarriers.TMEM_ALLOCATED)
    return smem, Pipelines(pipes["ring"], pipes["sums"], pipes.get("up")), tmem
