"""Tiles of FP8 keys: codes as an operand in shared memory, a scale a key beside them."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, Int64, cute
from cutlass.experimental.cuda.tensor_map import TensorMapL2Promotion, create_tensor_map_tiled

from dsv4.kernels.indexer.config import KERNEL_DIM, TILE_KEYS, IndexTopkConfig
from dsv4.kernels.indexer.context import Operands
from dsv4.kernels.indexer.plan import KeyTile
from dsv4.kernels.kit.index_entry import SCALE_BYTES
from dsv4.kernels.kit.swizzle import SPAN_BYTES, TENSOR_MAP_SWIZZLES, VECTOR_BYTES, operand_atoms
from dsv4.kernels.kit.tma import bulk_load, tma_load
from dsv4.kernels.kit.vectors import address_of, pointer_to

UNIT_KEYS = TILE_KEYS // 4  # of a warp
VECTOR_WORDS = VECTOR_BYTES // 4


class Fp8Ring(NamedTuple):
    """Views of the ring."""

    keys: cute.Tensor  # swizzled [64, 128, stage]
    start: cute.Pointer  # of the keys
    scales: cute.Tensor  # [64, stage]


class Fp8Tiles:
    """Ring and copies of tiles of a configuration's keys.

    Args:
        tile: of the plan.
    """

    def __init__(self, config: IndexTopkConfig, tile: KeyTile):
        self.config = config
        self.box = tile.box

    def key_map(self, keys: cute.Tensor):
        """TMA descriptor of the codes of the keys as (channel, key of a page, page)."""
        return create_tensor_map_tiled(
            keys.iterator.toint(),
            Float8E4M3FN,
            [KERNEL_DIM, self.config.page, cutlass.max(Int32(keys.shape[0]), 1)],
            [KERNEL_DIM // VECTOR_BYTES, Int64(keys.stride[0]) // VECTOR_BYTES],
            [KERNEL_DIM, self.box, 1],
            swizzle=TENSOR_MAP_SWIZZLES[SPAN_BYTES],
            l2_promotion=TensorMapL2Promotion.none,
        )

    def views(self, storage, stages: int) -> Fp8Ring:
        """Views of the ring's shared memory."""
        k_major, _ = operand_atoms(Float8E4M3FN, SPAN_BYTES)
        a = cute.tile_to_shape(k_major, (TILE_KEYS, KERNEL_DIM, stages), order=(0, 1, 2))
        return Fp8Ring(
            storage.keys.get_tensor(a.outer, swizzle=a.inner),
            storage.keys.data_ptr(),
            storage.scales.get_tensor(cute.make_layout((TILE_KEYS, stages))),
        )

    @staticmethod
    def source_word(vector, i: int):
        """Word of a query's codes, four channels each, that lies at word `i` of a vector of 16 of
        the other operand."""
        return vector * VECTOR_WORDS + i

    @cute.jit
    def load_part(
        self, operands: Operands, ring: Fp8Ring, full: cute.Pointer, key_map, stage, page, first,
        part,
    ):  # fmt: skip
        """Codes and scales of the keys of a tile that lie in one page.

        Args:
            first: entry that the tile begins with.
        """
        row = Int32(0)
        if cutlass.const_expr(self.config.page > TILE_KEYS):
            row = first % self.config.page
        target = stage * TILE_KEYS + part * self.box
        tma_load(key_map, ring.start + target * KERNEL_DIM, [0, row, page], full)
        at = Int64(page) * operands.keys.stride[0] + self.config.page * KERNEL_DIM
        source = address_of(operands.keys, at + row * SCALE_BYTES)
        bulk_load(
            pointer_to(source, cutlass.Uint8, 16),
            ring.scales.iterator + target,
            self.box * SCALE_BYTES,
            full,
        )

    def scales(self, ring: Fp8Ring, stage, unit, lane) -> list[Float32]:
        """Scales of a thread's two keys."""
        row = unit * UNIT_KEYS + lane // 4
        return [ring.scales[row + 8 * r, stage] for r in range(2)]
