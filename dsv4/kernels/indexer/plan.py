"""Plan of the scores' kernel: warps, shared memory, barriers.

Plain Python: `print(ScoresPlan())` works without a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsv4.kernels.indexer.config import (
    BINS,
    KERNEL_DIM,
    KERNEL_HEADS,
    LOW_KEYS,
    TILE_KEYS,
)
from dsv4.kernels.kit.index_entry import IndexEntry
from dsv4.kernels.kit.plan import (
    WARP_THREADS,
    WARPGROUP_WARPS,
    Arrival,
    Arrive,
    BarrierGraph,
    Buffer,
    Edge,
    TmemPlan,
    Warps,
)
from dsv4.kernels.kit.ring_plan import RingPlan

GROUPS = 2  # consumer warpgroups: a tile of keys each
# Load warps, every other tile each: issuing the copies of a tile takes longer than scoring it.
LOADERS = 2
STEPS = 4  # products of 32 channels
# Swizzled pages of FP4 keys begin at multiples of so many bytes: the period of the swizzle.
PAGE_ALIGNMENT = 512
START_WORDS = 2  # where a CTA's work begins: token, tile
# CTAs that choose for a token, from scores in memory, and in one launch with the scores.
CLUSTERS = (1, 2, 8)
ONE_LAUNCH_CLUSTERS = (4, 8, 16)
# Entries that a CTA of a cluster has at most where it keeps their scores to itself.
HELD_KEYS = 8192
# Tokens and entries up to which there is one launch, and its clusters; the first that fit.
ONE_LAUNCHES = ((2, 16_384, 16), (7, 6144, 8), (7, 16_384, 16), (16, 32_768, 8), (32, 8192, 4))
# Words of a CTA that a cluster exchanges: counts of the keys of a bin, of keys above it.
BOARD_WORDS = LOW_KEYS + 1
BOARD_STRIDE = BOARD_WORDS + -BOARD_WORDS % 4  # whole vectors
# Keys that a launch asks L2 for before the launch before is over: half of what L2 holds.
PREFETCHED_BYTES = 24 << 20
# Keys of a launch from which on two CTAs of an SM share them out.
MANY_KEYS = 1 << 18


@dataclass(frozen=True)
class KeyTile:
    """A tile of keys in the ring.

    Attributes:
        key_format: "fp8" or "fp4".
        page: keys of a page.
    """

    key_format: str
    page: int

    @property
    def box(self) -> int:
        """Keys of a copy."""
        return min(self.page, TILE_KEYS)

    @property
    def parts(self) -> int:
        """Pages of a tile."""
        return TILE_KEYS // self.box

    @property
    def loaded_bytes(self) -> int:
        """Bytes of a tile's copies."""
        return TILE_KEYS * IndexEntry(KERNEL_DIM, self.key_format).bytes

    @property
    def part_bytes(self) -> int:
        """Bytes between the pages of a tile of FP4 keys."""
        loaded = self.loaded_bytes // self.parts
        return loaded + -loaded % PAGE_ALIGNMENT

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage, of codes and scales of FP4 keys; of codes of FP8 keys."""
        if self.key_format == "fp4":
            return self.parts * self.part_bytes
        return TILE_KEYS * KERNEL_DIM


@dataclass(frozen=True)
class ScoresPlan(RingPlan):
    """CTA of the scores' kernel; half of an SM, so that the launches before and after fit beside.

    Attributes:
        lanes_per_warp: lanes that arrive for a warp.
        key_format, page: of the keys.
        has_tmem: whether sums are in Tensor Memory: of sm_100a.
    """

    lanes_per_warp: int = 1
    key_format: str = "fp8"
    page: int = 32
    has_tmem: bool = False

    @property
    def tile(self) -> KeyTile:
        return KeyTile(self.key_format, self.page)

    @property
    def ctas_per_sm(self) -> int:
        return 2

    @property
    def stage_groups(self) -> int:
        return math.lcm(GROUPS, LOADERS)

    @property
    def warps(self) -> Warps:
        return Warps.of(consumers=GROUPS * WARPGROUP_WARPS, load=LOADERS)

    @property
    def consumers(self) -> int:
        """Threads of the consumers."""
        return GROUPS * WARPGROUP_WARPS * WARP_THREADS

    def _buffers(self, stages: int) -> tuple[Buffer, ...]:
        is_fp4 = self.key_format == "fp4"
        keys = "Uint8" if is_fp4 else "Float8E4M3FN"
        scales = () if is_fp4 else (Buffer("scales", "Float32", stages * TILE_KEYS, 16),)
        tmem = (Buffer("tmem_address", "Int32", 1),) if self.has_tmem else ()
        return (
            Buffer("keys", keys, stages * self.tile.stage_bytes, 1024),
            Buffer("queries", "Float8E4M3FN", KERNEL_HEADS * KERNEL_DIM, 1024),
            *scales,
            Buffer("factors", "Float32", KERNEL_HEADS, 16),
            Buffer("counts", "Int32", BINS, 16),
            Buffer("sums", "Int32", self.warps.threads // WARP_THREADS),
            Buffer("start", "Int32", START_WORDS),
            *tmem,
            *self._barriers(stages).split_buffers,
        )

    def _barriers(self, stages: int) -> BarrierGraph:
        tiles = Edge(
            "ring", "tile of keys and their scales",
            (Arrival("load", Arrive.TMA),),
            (Arrival("consumers", Arrive.WARP, warps=WARPGROUP_WARPS),),
            stages, self.tile.loaded_bytes,
        )  # fmt: skip
        products = Edge(
            "products", "sums of a warpgroup's tile",
            (Arrival("consumers", Arrive.MMA),),
            (Arrival("consumers", Arrive.WARP, warps=WARPGROUP_WARPS),),
            GROUPS, is_signal=True,
        )  # fmt: skip
        edges = (tiles, products) if self.has_tmem else (tiles,)
        return BarrierGraph(self.warps, edges, self.lanes_per_warp)

    @property
    def tmem(self) -> TmemPlan:
        """Columns of each warpgroup: sums of 64 keys by all heads; FP4 keys as an operand."""
        operands = (("keys", GROUPS * KERNEL_DIM // 4),) if self.key_format == "fp4" else ()
        return TmemPlan((("sums", GROUPS * KERNEL_HEADS), *operands))

    def __str__(self) -> str:
        tmem = f"TMEM       {self.tmem}\n" if self.has_tmem else ""
        return f"warps      {self.warps}\nSMEM       {self.smem}\n{tmem}{self.barriers}"


@dataclass(frozen=True)
class ClusterPlan(ScoresPlan):
    """CTA of a cluster that scores a token's entries and chooses among them.

    Attributes:
        cluster: CTAs of a token.
        topk: entries chosen for a token.
    """

    cluster: int = 8
    topk: int = 512

    @property
    def sent_bytes(self) -> tuple[int, int]:
        """Bytes of queries and factors, and of counts, that a CTA is sent."""
        words = KERNEL_HEADS * (KERNEL_DIM // 4 + 1), BOARD_STRIDE * self.cluster
        return 4 * words[0], 4 * words[1]

    def _buffers(self, stages: int) -> tuple[Buffer, ...]:
        scores = (x for x in super()._buffers(stages) if x.name != "start")
        return (
            *scores,
            Buffer("order_keys", "Int32", HELD_KEYS // 2, 16),
            Buffer("totals", "Int32", BINS, 16),
            Buffer("board", "Int32", BOARD_STRIDE * self.cluster, 16),
            Buffer("own", "Int32", BOARD_STRIDE, 16),
            Buffer("found", "Int32", 2),
            Buffer("chosen", "Int32", self.topk),
            Buffer("pages", "Int32", -(-HELD_KEYS // self.page) + 1),
            # Of the queries, and of the board: what the cluster's CTAs send.
            Buffer("sent", "Int64", 2),
        )


def clusters_of(rank: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """CTAs that may choose for a token: in one launch with scores, and from scores in memory."""
    return (ONE_LAUNCH_CLUSTERS, CLUSTERS) if rank == "bf16" else ((), CLUSTERS[:1])


def choose_launch(tokens: int, entries: int, num_sms: int, rank: str = "bf16") -> tuple[int, int]:
    """CTAs of the scores' launch, 0 where there is one launch, and CTAs that choose for a token, by
    the most entries of one; scores in fp32 have two launches and a CTA a token.

    One launch has few CTAs of long lists, and no rest of an SM for the launches beside it where
    tokens are many. Measured on an H200: docs/design/indexer.md.
    """
    for most_tokens, most_entries, cluster in ONE_LAUNCHES:
        if rank == "bf16" and tokens <= most_tokens and entries <= most_entries:
            return 0, cluster
    ctas = num_sms * (2 if tokens * entries >= MANY_KEYS else 1)
    if entries <= 8192 or rank == "fp32":
        return ctas, 1
    return ctas, 2 if tokens > 32 and entries <= 65_536 else 8
