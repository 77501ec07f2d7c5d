"""Plans of attention: what tiles weigh, the order of work; and on Hopper warps, registers, shared
memory, barriers.

Plain Python: `print(AttentionPlan(128))` works without a GPU.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from dsv4.kernels.kit.plan import (
    DTYPE_BYTES,
    WARPGROUP_WARPS,
    Arrival,
    Arrive,
    BarrierGraph,
    Buffer,
    Edge,
    Registers,
    Warps,
)
from dsv4.kernels.kit.ring_plan import RingPlan
from dsv4.kernels.lowp.config import LOG2E, QuantizedAttentionConfig
from dsv4.kernels.lowp.groups import FP4_BLOCK

GROUPS = {64: 3, 128: 3, 256: 2}  # consumer warpgroups on Hopper, by the channels of codes
GROUP_QUERIES = 64  # of a warpgroup: rows of a product, and of the official kernel's tile
WORK_QUERIES = {"sm_90a": 192, "sm_100a": 256}  # of a work tile with up to 128 channels
TILE_KEYS = 128  # of all geometries but "sm89"
SPAN = 64  # channels of queries that a box of TMA holds
SPAN_BYTES = 128  # of a row of codes that a box of TMA holds at most
MOST_STAGES = 5  # of 128 keys
FORMATS = {"int8": "Int8", "fp8": "Float8E4M3FN", "fp16": "Float16", "nvfp4": "Uint8"}
CODE_BITS = {"int8": 8, "fp8": 8, "fp16": 16, "nvfp4": 4}
SMALLEST_WORK = 128  # queries of a work tile of any kernel, at least
MAXIMA_ROWS = 128  # queries of a block whose largest magnitude comes before the attention
WORK_WORDS = 12  # that hold a `Work`: whole vectors
# Statistics of a tile of keys and values: rows of channels.
K_SUM, K_MAX, K_MIN, K_LARGEST, V_SUM, V_MAX, V_MIN, V_FACTOR, STATISTICS = range(9)
# Codes of keys and values that stay in L2 while all queries of their heads pass.
L2_BYTES = 24 << 20


Arrivals = tuple[Arrival, ...]


class Order(NamedTuple):
    """Order of a warpgroup's products: weighted values of a tile, then the scores of the next one.

    Attributes:
        is_serial: whether scores wait until the weighted values are added up, whose registers they
            take.
        turn: what warpgroups do one after the other: "products", to be issued, or "weights", where
            the special function unit is what they would all wait for at a time.
        block: column groups whose weights are computed at a time; 0: the assembler's choice.
    """

    is_serial: bool
    turn: str
    block: int = 0


# By the channels of codes. With 128 the sums, a tile's and its scores are 192 of the 160 registers
# that a thread of three warpgroups has.
SERIAL = Order(True, "products")
ORDERS = {64: Order(True, "weights", 2), 128: SERIAL, 256: SERIAL}
# Where attention is causal, or tiles have 64 keys.
OTHER_ORDERS = {**ORDERS, 64: Order(False, "weights")}


@dataclass(frozen=True)
class TilePlan(RingPlan):
    """Sizes of tiles of queries, keys and values, whoever multiplies them.

    Attributes:
        dim: channels of codes, 64, 128 or 256.
        lanes_per_warp: lanes that arrive for a warp.
        qk: format of queries and keys, "int8", "fp8" or "nvfp4".
        key_scales: scales of a tile of keys that come with it: of keys that have one each, or one
            for 16 channels.
        pv: format of weights and values, "fp8", "fp16" or "nvfp4".
        tile_keys: keys of a tile, 64 or 128.
        warp_maxima: maxima that a warp shows those that share its scales.
        is_causal: whether queries see the keys up to their own.
    """

    dim: int
    lanes_per_warp: int = 1
    qk: str = "int8"
    key_scales: int = 0
    pv: str = "fp8"
    tile_keys: int = TILE_KEYS
    warp_maxima: int = 1
    is_causal: bool = False

    group_queries: ClassVar[int]  # of each warpgroup that shares a work tile

    @classmethod
    def of(cls, config: QuantizedAttentionConfig, lanes_per_warp: int = 1) -> Self:
        """The plan of a configuration."""
        keys = config.tiles.block_k
        return cls(
            config.padded_dim,
            lanes_per_warp,
            config.qk,
            {"per_row": keys, "per_16": config.key_scales}.get(config.qk_quant_gran, 0),
            config.pv,
            keys,
            config.query_groups.count if config.has_pairs_of_warps else 1,
            config.causal != "none",
        )

    @property
    @abstractmethod
    def groups(self) -> int:
        """Warpgroups that share a work tile."""

    @property
    def tile_queries(self) -> int:
        """Queries of a work tile."""
        return self.groups * self.group_queries

    @property
    def row_bytes(self) -> int:
        """Of the codes of a query or key."""
        return self.dim * CODE_BITS[self.qk] // 8

    @property
    def span_of_codes(self) -> int:
        """Bytes of a row of codes that a swizzle permutes; rows of more are several spans."""
        return min(self.row_bytes, SPAN_BYTES)

    @property
    def tile_bytes(self) -> int:
        """Of a tile of keys."""
        return self.tile_keys * self.row_bytes

    @property
    def key_scale_bytes(self) -> int:
        """Of the scales that come with a tile of keys."""
        return self.key_scales * (1 if self.qk == "nvfp4" else 4)

    @property
    def has_row_scales(self) -> bool:
        """Whether keys have a scale each, which their scores are multiplied by."""
        return self.key_scales > 0 and self.qk == "fp8"

    @property
    def value_bytes(self) -> int:
        """Of a tile of values."""
        return self.tile_keys * self.dim * CODE_BITS[self.pv] // 8

    @property
    def value_scale_bytes(self) -> int:
        """Of the scales that come with a tile of values: of 16 keys of a channel."""
        return self.tile_keys * self.dim // FP4_BLOCK if self.pv == "nvfp4" else 0

    @property
    def shares_rows(self) -> bool:
        """Whether a work tile's rows of queries make room for codes of weights once they are coded,
        and come no earlier than at its end."""
        return False

    @property
    def scaled_channels(self) -> int:
        """Channels of values whose scales come with the queries; those of 256 would take the place
        of a stage of a tile's keys with a scale each."""
        return self.dim if self.pv == "fp8" and self.dim <= 128 else 0

    @property
    def keys_bytes(self) -> int:
        """Of a tile of keys with what comes with it."""
        return self.tile_bytes + self.key_scale_bytes + self.smooth_bytes

    @property
    def smooth_bytes(self) -> int:
        """Of a tile of keys as they are, for the scores of the queries' means."""
        return 0

    @property
    def values_bytes(self) -> int:
        """Of a tile of values with what comes with it."""
        return self.value_bytes + self.value_scale_bytes

    @property
    def span_bytes(self) -> int:
        """Of a tile of queries' rows, 64 channels of them."""
        return self.tile_queries * SPAN * 2

    @property
    def query_bytes(self) -> int:
        """Of all rows of a work tile, and the scales of its values."""
        return self.dim // SPAN * self.span_bytes + 4 * self.scaled_channels

    def _operands(self, stages: int, weights: tuple[Buffer, ...] = ()) -> tuple[Buffer, ...]:
        """Shared memory of what is loaded or coded.

        Args:
            weights: buffers of codes of weights.
        """
        qk, scales = FORMATS[self.qk], ()
        if self.key_scales and self.qk == "fp8":
            scales = (Buffer("key_scales", "Float32", stages * self.key_scales, 16),)
        elif self.key_scales:
            scales = (
                Buffer("key_scales", "Uint8", stages * self.key_scale_bytes, 128),
                Buffer("value_block_scales", "Uint8", stages * self.value_scale_bytes, 128),
            )
        pv = FORMATS[self.pv]
        return (
            Buffer("queries", qk, self.tile_queries * self.row_bytes, 1024),
            Buffer("keys", qk, stages * self.tile_bytes, 1024),
            Buffer("values", pv, stages * self.value_bytes // DTYPE_BYTES[pv], 1024),
            *weights,
            Buffer("rows", "BFloat16", self.tile_queries * self.dim, 1024),  # or fp16
            Buffer("maxima", "Float32", self.groups * WARPGROUP_WARPS * self.warp_maxima),
            *scales,
            # By the parity of a CTA's work tiles: those of one are read to its end, when the next
            # one's are there already.
            Buffer("works", "Int32", 2 * WORK_WORDS, 16),
            Buffer("value_scales", "Float32", max(2 * self.scaled_channels, 4), 16),
        )

    def _loads(
        self, stages: int, queries: Arrivals, keys: Arrivals, values: Arrivals
    ) -> tuple[Edge, ...]:
        """What the load warp hands over, and who releases it."""
        load = (Arrival("load", Arrive.TMA),)
        return (
            Edge("queries", "rows of a work tile", load, queries, 1, self.query_bytes),
            Edge("keys", "tile of codes of keys", load, keys, stages, self.keys_bytes),
            Edge("values", "tile of codes of values", load, values, stages, self.values_bytes),
        )


@dataclass(frozen=True)
class AttentionPlan(TilePlan):
    """Every budget of a CTA on Hopper."""

    group_queries = GROUP_QUERIES

    @property
    def groups(self) -> int:
        return GROUPS[self.dim]

    @property
    def most_stages(self) -> int | None:
        return MOST_STAGES * TILE_KEYS // self.tile_keys

    @property
    def warps(self) -> Warps:
        return Warps.of(consumers=self.groups * WARPGROUP_WARPS, load=WARPGROUP_WARPS)

    @property
    def registers(self) -> Registers:
        if self.groups == 2:
            return Registers.of(self.warps, consumers=240, load=24)
        return Registers.of(self.warps, consumers=160, load=32)

    @property
    def order(self) -> Order:
        """Order of products."""
        is_other = self.is_causal or self.tile_keys < TILE_KEYS
        orders = OTHER_ORDERS if is_other else ORDERS
        # Values of two bytes, and so codes of weights, take as many registers.
        return orders[self.dim] if self.pv == "fp8" else SERIAL

    def _buffers(self, stages: int) -> tuple[Buffer, ...]:
        return (*self._operands(stages), *self._barriers(stages).split_buffers)

    def _barriers(self, stages: int) -> BarrierGraph:
        consumers = (Arrival("consumers", Arrive.WARP),)
        edges = self._loads(stages, consumers, consumers, consumers)
        return BarrierGraph(self.warps, edges, self.lanes_per_warp)

    def __str__(self) -> str:
        return (
            f"warps      {self.warps}\nregisters  {self.registers}\nSMEM       {self.smem}\n"
            f"{self.barriers}"
        )


def work_queries(config: QuantizedAttentionConfig, arch: str) -> int:
    """Queries of a work tile."""
    if arch == "sm_90a":
        return GROUPS[config.padded_dim] * GROUP_QUERIES
    return WORK_QUERIES[arch]


def choose_launch(
    config: QuantizedAttentionConfig,
    heads: int,
    key_heads: int,
    queries: int,
    keys: int,
    num_sms: int,
    tile_queries: int = WORK_QUERIES["sm_90a"],
) -> tuple[int, int, int]:
    """Scalars of a launch: bits of the factor on scores, heads of a section, CTAs.

    The heads of a section pass one tile of queries after the other together, the longest first; so
    many that their codes stay in L2.

    Args:
        heads, key_heads: of all batches together.
        tile_queries: of a work tile.
    """
    factor = struct.unpack("<i", struct.pack("<f", config.sm_scale * LOG2E))[0]
    section, ctas = 1, num_sms
    if config.causal != "none":
        of_head = 2 * keys * config.padded_dim * key_heads // max(heads, 1)
        section = max(1, min(heads, L2_BYTES // max(of_head, 1)))
        if section < heads:
            # Where the CTAs are a multiple, each has its share of long and short tiles.
            section = max(n for n in range(1, section + 1) if num_sms % n == 0)
    if not config.is_varlen:
        ctas = max(1, min(num_sms, heads * -(-queries // tile_queries)))
    return factor, section, ctas
