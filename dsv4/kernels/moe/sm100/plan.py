"""Plans of the experts' products on Blackwell: tilings, and every budget of a CTA.

Plain Python: `print(ProductPlan.down(ExpertsConfig(4096, 2048, scale_form="tiled"), Tiling(8, 8)))`
shows one. Nothing here changes a bit of a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from dsv4.arch import SM_100A
from dsv4.kernels.kit.plan import (
    TMEM_COLUMNS,
    Arrival,
    Arrive,
    BarrierGraph,
    Buffer,
    Edge,
    Registers,
    TmemPlan,
    Warps,
)
from dsv4.kernels.kit.ring_plan import RingPlan
from dsv4.kernels.moe.config import ExpertsConfig
from dsv4.kernels.moe.layout import ATOM_BYTES, K_BLOCK, TILE_ROWS

MIN_STAGES = 3
SUM_STAGES = 2  # tiles of sums: one is stored while the next one is made
BLOCK_STAGES = 4  # sums of single k blocks
LOADS_AHEAD = 4  # k blocks whose scales are on their way
CHUNK = 8  # columns that the epilogue has in registers
MOST_COLUMNS = 64  # of a tile: two scales of a lane, and sums of two tiles fit in TMEM
ATOM_WORDS = ATOM_BYTES // 4
SCALE_COLUMNS = TILE_ROWS // 32  # of TMEM, of an atom
PACKED_BYTES = K_BLOCK // 2  # of a row's e2m1 codes of a k block, two in a byte
PACKED_DEPTH = 64  # elements of K of a product of such, whose scales are a word
EPILOGUE_WARPS = 4


class NamedBarriers(IntEnum):
    """Hardware barriers of a CTA; 0 is that of `__syncthreads`."""

    TMEM_ALLOCATED = 1  # the warps that use TMEM
    TMEM_UNUSED = 2  # the warps that read sums
    AMAX_THERE = 3  # those, of the largest values of a chunk
    UP_THERE = 4  # those, of sums of up that are sent


@dataclass(frozen=True)
class Tiling:
    """Division of the products by a launch. No bit of a result depends on it.

    Attributes:
        tokens: most of a tile of a routed expert: columns of its products. A tile with fewer has
            as many columns as there are, in eights.
        shared_tokens: of a tile of the shared expert, which all tokens pass.
    """

    tokens: int
    shared_tokens: int

    @property
    def columns(self) -> int:
        """Of either."""
        return max(self.tokens, self.shared_tokens)


@dataclass(frozen=True)
class ProductPlan(RingPlan):
    """Every budget of a CTA.

    Attributes:
        in_features: K.
        row_tiles: of an expert's product: of 128 rows of gate and as many of up, or of down.
        is_gated: whether a tile has rows of two weights, gate and up.
        expert_dtype: of the routed experts, "fp4", "fp8" or "nvfp4".
        is_promoted: whether scales of FP8 weights are fp32, which the tensor core does not take:
            the sum of a k block is then multiplied with them in registers.
        lanes_per_warp: lanes that arrive for their warp; 32 for a checker that follows threads.
    """

    in_features: int
    row_tiles: int
    is_gated: bool
    expert_dtype: str
    is_promoted: bool
    tiling: Tiling
    lanes_per_warp: int = 1

    arch = SM_100A

    @classmethod
    def gate_and_up(
        cls, config: ExpertsConfig, tiling: Tiling, lanes_per_warp: int = 1
    ) -> ProductPlan:
        """Of w1 and w3 of all experts."""
        row_tiles, promoted = config.inner // TILE_ROWS, is_promoted(config)
        return cls(
            config.hidden, row_tiles, True, config.expert_dtype, promoted, tiling, lanes_per_warp
        )  # fmt: skip

    @classmethod
    def down(cls, config: ExpertsConfig, tiling: Tiling, lanes_per_warp: int = 1) -> ProductPlan:
        """Of w2 of all experts."""
        row_tiles, promoted = config.hidden // TILE_ROWS, is_promoted(config)
        return cls(
            config.inner, row_tiles, False, config.expert_dtype, promoted, tiling, lanes_per_warp
        )  # fmt: skip

    @property
    def k_blocks(self) -> int:
        """Steps of a tile."""
        return self.in_features // K_BLOCK

    @property
    def weights(self) -> int:
        """Of a tile of a routed expert."""
        return 2 if self.is_gated else 1

    @property
    def cluster(self) -> int:
        """CTAs of a cluster. Those of a pair have one of gate and up each of a tile of the shared
        expert, whose bytes are twice those of the others, and a tile each of the others."""
        return 2 if self.is_gated else 1

    @property
    def width(self) -> int:
        """Tiles of routed experts that a CTA takes where another one takes a tile of the shared
        expert: about as many bytes."""
        return 2 if self.expert_dtype in ("fp4", "nvfp4") and not self.is_gated else 1

    @property
    def columns(self) -> int:
        """Most of a tile."""
        return self.tiling.columns

    # ---- a stage ----

    @property
    def is_packed(self) -> bool:
        """Whether products of routed experts are of two e2m1 codes a byte on either side."""
        return self.expert_dtype == "nvfp4"

    @property
    def block_bytes(self) -> int:
        """Of 128 rows of a routed expert's weight in shared memory, where e2m1 codes beside e4m3
        take a byte, too."""
        return TILE_ROWS * (PACKED_BYTES if self.is_packed else K_BLOCK)

    @property
    def slots(self) -> int:
        """Blocks that a stage has room for: of a routed expert, or one of the shared expert."""
        return max(self.weights, TILE_ROWS * K_BLOCK // self.block_bytes)

    @property
    def weight_bytes(self) -> int:
        """Of a stage."""
        return self.slots * self.block_bytes

    @property
    def atoms(self) -> int:
        """Of scales of 128 rows."""
        return K_BLOCK // PACKED_DEPTH if self.is_packed else 1

    @property
    def atom_words(self) -> int:
        """Of the scales of 128 rows."""
        return self.atoms * ATOM_WORDS

    @property
    def x_bytes(self) -> int:
        return self.columns * K_BLOCK

    def loaded_bytes(self, dtype: str, weights: int) -> int:
        """By TMA, of weights of a type and their scales."""
        if dtype == "fp8":
            return weights * TILE_ROWS * K_BLOCK
        return weights * (TILE_ROWS * PACKED_BYTES + self.atoms * ATOM_BYTES)

    # ---- budgets ----

    @property
    def warps(self) -> Warps:
        """Warp w reaches TMEM lanes 32 (w % 4) to 32 (w % 4) + 31: the epilogue is a warpgroup."""
        return Warps.of(epilogue=EPILOGUE_WARPS, load=1, mma=1, scales=1)

    @property
    def tmem_users(self) -> int:
        """Threads that wait for the address of TMEM."""
        return self.warps["epilogue"].threads + self.warps["mma"].threads

    @property
    def registers(self) -> Registers:
        """As launched."""
        return Registers.of(self.warps)

    @property
    def sum_columns(self) -> int:
        """TMEM columns of a stage of sums."""
        return self.weights * self.columns

    @property
    def sum_stages(self) -> int:
        return BLOCK_STAGES if self.is_promoted else SUM_STAGES

    @property
    def tmem(self) -> TmemPlan:
        """A lane is a row of a weight, a column a token; scales lie four times, once in each
        quarter of the lanes."""
        return TmemPlan((
            ("sums", self.sum_stages * self.sum_columns),
            ("weight_scales", self.weights * self.atoms * SCALE_COLUMNS),
            ("x_scales", self.atoms * SCALE_COLUMNS),
        ))  # fmt: skip

    def _buffers(self, stages: int) -> tuple[Buffer, ...]:
        gated = (
            # [column, row]: sums of up of a tile of the shared expert, sent and received
            Buffer("up", "Float32", self.tiling.shared_tokens * TILE_ROWS, 16),
            # [turn, warp, column]
            Buffer("amax", "Int32", 2 * EPILOGUE_WARPS * CHUNK, 16),
        )
        return (
            Buffer("weight", "Uint8", stages * self.weight_bytes, 1024),
            Buffer("x", "Float8E4M3FN", stages * self.x_bytes, 1024),
            Buffer("weight_scales", "Int32", stages * self.weights * self.atom_words, 128),
            Buffer("x_scales", "Int32", stages * self.atom_words, 128),
            *(gated if self.is_gated else ()),
            Buffer("tmem_address", "Int32", 1),
            *self._barriers(stages).split_buffers,
        )

    def _barriers(self, stages: int) -> BarrierGraph:
        mma, epilogue = Arrival("mma", Arrive.MMA), Arrival("epilogue", Arrive.WARP)
        fill = (Arrival("load", Arrive.TMA), Arrival("scales", Arrive.WARP))
        edges = [
            Edge("ring", "k block of weights and tokens, with scales", fill, (mma,), stages),
            Edge("sums", "sums in TMEM", (mma,), (epilogue,), self.sum_stages),
        ]
        if self.is_gated:
            # From the CTA that has up to the one that has gate, which expects the bytes.
            edges.append(
                Edge("up", "sums of up", (Arrival("epilogue", Arrive.TMA),), (epilogue,))
            )  # fmt: skip
        return BarrierGraph(self.warps, tuple(edges), self.lanes_per_warp)

    def __post_init__(self) -> None:
        tiling = self.tiling
        for tokens in (tiling.tokens, tiling.shared_tokens):
            assert 0 < tokens <= MOST_COLUMNS and tokens % CHUNK == 0, tiling
        assert not self.is_promoted or self.columns == CHUNK, f"{tiling}: promoted columns"
        assert self.stages >= MIN_STAGES, f"{tiling}: {self.stages} stages fit"
        columns = TMEM_COLUMNS // self.ctas_per_sm
        assert self.tmem.allocated_columns <= columns, f"TMEM: {self.tmem} of {columns}"

    def __str__(self) -> str:
        kind = "gate and up" if self.is_gated else "down"
        return "\n".join((
            f"K {self.in_features}, tiles of {TILE_ROWS} rows of {kind}: "
            f"{self.tiling.tokens} tokens of {self.expert_dtype} experts, "
            f"{self.tiling.shared_tokens} of the shared one",
            f"warps      {self.warps}; registers {self.registers}",
            f"TMEM       {self.tmem}",
            f"SMEM       {self.smem}",
            str(self.barriers),
        ))  # fmt: skip


def is_promoted(config: ExpertsConfig) -> bool:
    """As in `ProductPlan`."""
    is_float32 = config.shared_scale_dtype == "float32"
    assert config.expert_dtype != "nvfp4" or not is_float32, "NVFP4 beside fp32 scales"
    assert config.expert_dtype != "fp8" or is_float32 == (config.scale_dtype == "float32"), (
        f"scales in {config.scale_dtype} beside {config.shared_scale_dtype}"
    )
    return is_float32


def tilings(config: ExpertsConfig) -> tuple[Tiling, ...]:
    """Tilings of the kernels, by the tokens of a tile: a wide one costs few tokens only its room in
    the ring."""
    narrow = Tiling(CHUNK, CHUNK)
    if is_promoted(config):
        return (narrow,)
    return narrow, Tiling(MOST_COLUMNS, MOST_COLUMNS)


def choose(config: ExpertsConfig, tokens: int, experts: int) -> int:
    """Index in `tilings(config)` of the tiling for so many tokens, however many experts share
    them."""
    return 0 if tokens <= CHUNK else len(tilings(config)) - 1
