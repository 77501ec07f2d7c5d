"""Plans of the Hopper attention kernels: tile shape, warps, registers, shared memory, barriers.

Plain Python: `print(HeadsMPlan(512))` and `print(SwapAbPlan(512, 16, 1))` show them. The kernels
take every size and every arrival count from their plans.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.kernels.attention.key_tiles import TILE_INFO_WORDS
from dsv4.kernels.kit.plan import (
    SMEM_CAPACITY,
    Arrival,
    Arrive,
    BarrierGraph,
    Buffer,
    Edge,
    Registers,
    SmemPlan,
    Warps,
)

KEYS = 64  # of a key tile
SPAN_WORDS = 8  # of a `key_span.KeySpan`, 32 bits each
HEADS = 64  # heads in M: rows of a head tile, the M of a wgmma
STAGES = 3  # heads in M: of the KV ring
HALVES = 2  # heads in M: of the columns of a key tile; each has mbarriers of its own
CHUNK = 64  # swap-AB: columns of a swizzle span, and of a PV product: its M
ELEMENT_BYTES = 2
SMEM_LINE_BYTES = 128  # all banks of shared memory
GATHER_WARPS = 4  # that gather a key tile of a paged cache
ROW_INPUTS = 3  # words of a row of a paged head tile: see `paged_score`


@dataclass(frozen=True)
class HeadsMPlan:
    """Every budget of the heads-in-M kernel.

    Attributes:
        lanes_per_warp: lanes that arrive for their warp; 32 for a checker that follows threads.
    """

    head_dim: int
    lanes_per_warp: int = 1

    # ---- tile shape ----

    @property
    def stages(self) -> int:
        """Key tiles of the KV ring."""
        return STAGES

    @property
    def half_dim(self) -> int:
        """Output columns of an output warpgroup."""
        return self.head_dim // 2

    @property
    def pv_dim(self) -> int:
        """Columns of a PV product: the N of a wgmma, and an accumulator sub-tile."""
        return min(128, self.half_dim)

    @property
    def subtiles(self) -> int:
        """Accumulator sub-tiles of an output warpgroup."""
        return self.half_dim // self.pv_dim

    @property
    def chunk(self) -> int:
        """Columns of a swizzle span."""
        return min(64, self.half_dim)

    @property
    def chunk_bytes(self) -> int:
        return self.chunk * ELEMENT_BYTES

    @property
    def q_smem_dim(self) -> int:
        """Columns of Q in shared memory; the others pass through the KV ring into registers, which
        leaves shared memory for three stages of head_dim 512."""
        return 192 if self.head_dim == 512 else self.head_dim

    @property
    def q_register_dim(self) -> int:
        return self.head_dim - self.q_smem_dim

    @property
    def q_bytes(self) -> int:
        return HEADS * self.q_smem_dim * ELEMENT_BYTES

    @property
    def half_bytes(self) -> int:
        """Bytes of half of a key tile."""
        return KEYS * self.half_dim * ELEMENT_BYTES

    # ---- budgets ----

    @property
    def warps(self) -> Warps:
        return Warps.of(score=4, output=8, load=1, scheduler=1, prefetch=1, idle=1)

    @property
    def registers(self) -> Registers:
        few = dict.fromkeys(("load", "scheduler", "prefetch", "idle"), 24)
        return Registers.of(self.warps, score=152, output=168, **few)

    @property
    def smem(self) -> SmemPlan:
        return SmemPlan((
            Buffer("kv", "BFloat16", self.stages * KEYS * self.head_dim, 1024),
            Buffer("q", "BFloat16", HEADS * self.q_smem_dim, 1024),
            Buffer("p", "BFloat16", HEADS * KEYS, 1024),
            # Factors of a thread's older accumulators that go with P.
            Buffer("rescale", "Float32", 2 * 128, 8),
            # Output scale of each row; with splits the gate's offset of its lse.
            Buffer("row_scale", "Float32", HEADS),
            Buffer("span", "Int32", SPAN_WORDS, 16),
            # Slices of the split tile that each output warpgroup combines.
            Buffer("slices", "Int32", 2),
            self.tile_info,
            *((self.row_inputs,) if self.row_inputs else ()),
            *((self.staging,) if self.staging else ()),
            *self.barriers.split_buffers,
        ))  # fmt: skip

    @property
    def row_inputs(self) -> Buffer | None:
        """Sinks, factors and largest scores of rows, which are in registers."""
        return None

    @property
    def staging(self) -> Buffer | None:
        """What else the warps that load need."""
        return None

    @property
    def tile_info(self) -> Buffer:
        """Valid keys of the key tile in each stage, plus WINDOW_FLAG in the window."""
        return Buffer("tile_info", "Int32", self.stages)

    @property
    def _product_edges(self) -> tuple[Edge, ...]:
        """Between the warpgroups that compute."""
        score, output = Arrival("score", Arrive.WARP), Arrival("output", Arrive.WARP)
        one = Arrival("output", Arrive.WARP, warps=4)
        return (
            Edge("p", "P and rescale factors", (score,), (output,)),
            Edge("pv_turn", "PV of even and of odd tiles may issue",
                 (score,), (output,), stages=2, is_signal=True),
            Edge("pv_next", "PV over the first half of the columns may follow the other",
                 (one,), (output,), is_signal=True),
            Edge("rows", "row scales", (score,), (output,)),
        )  # fmt: skip

    @property
    def barriers(self) -> BarrierGraph:
        warp, lane, tma = Arrive.WARP, Arrive.LANE, Arrive.TMA
        load, score, output = Arrival("load", tma), Arrival("score", warp), Arrival("output", warp)
        # Where two CTAs slice the columns, both output warpgroups free each half.
        half = Arrival("output", warp, warps=4, factor="column_slices")
        edges = (
            Edge("q", "Q", (load,), (score,), tx_bytes=self.q_bytes),
            Edge(
                "span", "key span",
                (Arrival("scheduler", lane),), (Arrival("load", warp), score, output),
            ),
            *self._product_edges,
            # The score warpgroup releases, for the output warps, stages that hold no V.
            Edge("kv", "half of a key tile; Q for registers",
                 (load,), (half,), stages=HALVES * self.stages),
            Edge("inputs_ready", "the launch before is over",
                 (Arrival("load", lane),), (Arrival("prefetch", lane),), is_signal=True),
            Edge("lockstep", "the other CTA's load warp is about to fill a stage",
                 (Arrival("load", lane),), (Arrival("load", lane),),
                 stages=self.stages, is_signal=True),
        )  # fmt: skip
        return BarrierGraph(self.warps, edges, self.lanes_per_warp)

    def __post_init__(self) -> None:
        # Asserted where they are made.
        _ = self.registers, self.smem

    def __str__(self) -> str:
        return "\n".join((
            f"head_dim {self.head_dim}: {HEADS} heads x {KEYS} keys, PV of {self.pv_dim} columns, "
            f"{self.q_register_dim} columns of Q in registers",
            f"warps      {self.warps}",
            f"registers  {self.registers}",
            f"SMEM       {self.smem}",
            str(self.barriers),
        ))  # fmt: skip


def staging_buffer(pieces: int) -> Buffer:
    """Room for pieces of 16 bytes of each row of a key tile: four lanes have one each.

    It begins with a line: copies of neighbouring lanes that lie in two lines of shared memory made
    few tokens' attention 4 to 8 % slower.
    """
    return Buffer("staging", "Int32", 4 * pieces * 4 * KEYS, SMEM_LINE_BYTES)


@dataclass(frozen=True)
class PagedHeadsMPlan(HeadsMPlan):
    """Every budget of the heads-in-M kernel whose rows are gathered from pages.

    A warpgroup gathers instead of a load warp: `cp.async` of bf16 rows, or FP8 entries that pass
    through its registers, which is where their values become bf16. It finds the key spans, too.

    Attributes:
        is_fp8: whether the rows are FP8 entries. The registers that gather them are taken from the
            score warpgroup: Q is then in shared memory, beside two stages of keys.
    """

    is_fp8: bool = False

    @property
    def row_inputs(self) -> Buffer | None:
        """Sinks, factors and largest scores of rows: no register is free for them."""
        return Buffer("row_inputs", "Float32", ROW_INPUTS * HEADS)

    @property
    def stages(self) -> int:
        return 2 if self.is_fp8 else STAGES

    @property
    def q_smem_dim(self) -> int:
        return self.head_dim if self.is_fp8 else super().q_smem_dim

    @property
    def warps(self) -> Warps:
        return Warps.of(score=4, output=8, gather=GATHER_WARPS)

    @property
    def registers(self) -> Registers:
        if self.is_fp8:
            return Registers.of(self.warps, score=88, output=168, gather=88)
        return Registers.of(self.warps, score=144, output=168, gather=32)

    @property
    def tile_info(self) -> Buffer:
        """What `tile_info` says of the key tile in each stage."""
        return Buffer("tile_info", "Int32", TILE_INFO_WORDS * self.stages, 16)

    @property
    def staging(self) -> Buffer | None:
        """Pieces of FP8 entries on their way into the registers of the threads that asked for
        them: 16 bytes each."""
        if not self.is_fp8:
            return None
        return staging_buffer(len(self.staged_pieces))

    @property
    def staged_pieces(self) -> tuple[int, ...]:
        """Pieces of an FP8 entry that wait in shared memory: see `gather_fp8`."""
        return 0, 1, 2, 3, 7, 8

    @property
    def barriers(self) -> BarrierGraph:
        warp, lane, tma = Arrive.WARP, Arrive.LANE, Arrive.TMA
        score, output = Arrival("score", warp), Arrival("output", warp)
        gather = Arrival("gather", warp)
        # Every thread when its copies are complete, every warp for what it has stored.
        rows = (gather,) if self.is_fp8 else (Arrival("gather", Arrive.THREAD), gather)
        half = Arrival("output", warp, warps=4, factor="column_slices")
        edges = (
            Edge("q", "Q", (Arrival("gather", tma),), (score,), tx_bytes=self.q_bytes),
            Edge("span", "key span", (Arrival("gather", lane),), (score, output)),
            *self._product_edges,
            Edge("kv", "half of a key tile; Q for registers",
                 rows, (half,), stages=HALVES * self.stages),
        )  # fmt: skip
        return BarrierGraph(self.warps, edges, self.lanes_per_warp)


@dataclass(frozen=True)
class SwapAbPlan:
    """Every budget of the swap-AB kernel.

    Attributes:
        tile_heads: heads of a head tile: the N of both products.
        head_tiles: of a token.
        lanes_per_warp: as in `HeadsMPlan`.
    """

    head_dim: int
    tile_heads: int
    head_tiles: int
    lanes_per_warp: int = 1

    # ---- tile shape ----

    @property
    def chunks(self) -> int:
        """Swizzle spans of head_dim, each with an accumulator of its own."""
        return self.head_dim // CHUNK

    @property
    def slots_per_tile(self) -> int:
        """Slots of the KV ring that a key tile takes: it is loaded, and freed, by columns."""
        return min(4, self.chunks)

    @property
    def slot_chunks(self) -> int:
        return self.chunks // self.slots_per_tile

    @property
    def slot_dim(self) -> int:
        """Columns of a slot."""
        return self.head_dim // self.slots_per_tile

    @property
    def slot_bytes(self) -> int:
        return KEYS * self.slot_dim * ELEMENT_BYTES

    @property
    def q_bytes(self) -> int:
        return self.tile_heads * self.head_dim * ELEMENT_BYTES

    @property
    def slots(self) -> int:
        """Slots of the KV ring: of three key tiles, or what fits beside Q."""
        slots = 3 * self.slots_per_tile
        while SmemPlan(self._buffers(slots), capacity=slots << 30).total_bytes > SMEM_CAPACITY:
            slots -= 1
        return slots

    @property
    def tile_info_words(self) -> int:
        """Words in shared memory about the rows of gathered key tiles."""
        return 0

    @property
    def staging(self) -> Buffer | None:
        """What else the warps that load need."""
        return None

    # ---- budgets ----

    @property
    def warps(self) -> Warps:
        return Warps.of(math=4, load=1, scheduler=1)

    @property
    def registers(self) -> Registers:
        return Registers.of(self.warps)

    @property
    def smem(self) -> SmemPlan:
        return SmemPlan(self._buffers(self.slots))

    @property
    def barriers(self) -> BarrierGraph:
        return self._barriers(self.slots)

    def _buffers(self, slots: int) -> tuple[Buffer, ...]:
        heads = self.tile_heads
        return (
            Buffer("kv", "BFloat16", slots * KEYS * self.slot_dim, 1024),
            Buffer("q", "BFloat16", heads * self.head_dim, 1024),
            # Of two key tiles in turn.
            Buffer("p", "BFloat16", 2 * heads * KEYS, 1024),
            # Reductions over the warps: of a key tile, and of the row sums in the end.
            Buffer("tile_max", "Float32", heads * 4, 16),
            Buffer("row_sums", "Float32", heads * 4, 16),
            Buffer("sinks", "Float32", heads * self.head_tiles),
            Buffer("span", "Int32", SPAN_WORDS, 16),
            # Slices of the split tile that the math warpgroup combines.
            Buffer("slices", "Int32", 1),
            *self._barriers(slots).split_buffers,
        )

    def _barriers(self, slots: int) -> BarrierGraph:
        load, math = Arrival("load", Arrive.TMA), Arrival("math", Arrive.WARP)
        scheduler = Arrival("scheduler", Arrive.LANE)
        edges = (
            Edge("q", "Q", (load,), (math,), tx_bytes=self.q_bytes),
            Edge("span", "key span", (scheduler,), (Arrival("load", Arrive.WARP), math)),
            Edge("kv", "columns of a key tile", (load,), (math,), slots, self.slot_bytes),
        )
        return BarrierGraph(self.warps, edges, self.lanes_per_warp)

    def __post_init__(self) -> None:
        # Asserted where they are made.
        _ = self.registers, self.smem
        assert self.slots >= 2 * self.slots_per_tile, (
            f"SMEM: {self.slots} KV slots fit, two key tiles need {2 * self.slots_per_tile}"
        )

    def __str__(self) -> str:
        return "\n".join((
            f"head_dim {self.head_dim}: {KEYS} keys x {self.tile_heads} heads of "
            f"{self.tile_heads * self.head_tiles}, {self.slots_per_tile} slots of {self.slot_dim} "
            f"columns a key tile",
            f"warps      {self.warps}",
            f"registers  {self.registers}",
            f"SMEM       {self.smem}",
            str(self.barriers),
        ))  # fmt: skip


@dataclass(frozen=True)
class PagedSwapAbPlan(SwapAbPlan):
    """Every budget of the swap-AB kernel whose rows are gathered from pages.

    Attributes:
        is_fp8: whether the rows are FP8 entries. Raw entries of `ahead` key tiles are then on their
            way beside two key tiles that are converted.
    """

    is_fp8: bool = False

    @property
    def warps(self) -> Warps:
        # Conversion keeps two warps on each scheduler busy: one waits for its stores, or for a
        # slot, while the other converts.
        return Warps.of(math=4, gather=GATHER_WARPS * (2 if self.is_fp8 else 1))

    @property
    def tile_info_words(self) -> int:
        """As in `PagedHeadsMPlan`, at the first slot of each tile."""
        return TILE_INFO_WORDS * self.slots

    @property
    def slots(self) -> int:
        return 2 * self.slots_per_tile if self.is_fp8 else super().slots

    @property
    def pieces(self) -> int:
        """Pieces of 16 bytes of a quarter of an FP8 entry."""
        return self.head_dim // 64 + 1

    @property
    def ahead(self) -> int:
        """Key tiles of FP8 entries on their way: two where they fit."""
        two = SmemPlan(self._buffers(self.slots, 2), capacity=2 * SMEM_CAPACITY)
        return 2 if two.total_bytes <= SMEM_CAPACITY else 1

    @property
    def staging(self) -> Buffer | None:
        return staging_buffer(self.ahead * self.pieces) if self.is_fp8 else None

    @property
    def smem(self) -> SmemPlan:
        return SmemPlan(self._buffers(self.slots, self.ahead if self.is_fp8 else 0))

    def _buffers(self, slots: int, ahead: int = 0) -> tuple[Buffer, ...]:
        info = Buffer("tile_info", "Int32", TILE_INFO_WORDS * slots, 16)
        staging = (staging_buffer(ahead * self.pieces),) if ahead else ()
        return (*super()._buffers(slots), info, *staging)

    def _barriers(self, slots: int) -> BarrierGraph:
        gather, math = Arrival("gather", Arrive.WARP), Arrival("math", Arrive.WARP)
        lane, tma = Arrival("gather", Arrive.LANE), Arrival("gather", Arrive.TMA)
        rows = (gather,) if self.is_fp8 else (Arrival("gather", Arrive.THREAD), gather)
        edges = (
            Edge("q", "Q", (tma,), (math,), tx_bytes=self.q_bytes),
            Edge("span", "key span", (lane,), (math,)),
            Edge("kv", "columns of a key tile", rows, (math,), slots),
        )
        return BarrierGraph(self.warps, edges, self.lanes_per_warp)
