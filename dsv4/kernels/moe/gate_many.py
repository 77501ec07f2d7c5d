"""Gate of a router for many tokens: tiles of 128 experts x 64 tokens, for sm_90a and sm_100a.

    load warp   weights and tokens, a part of K (128) a stage, by TMA; two CTAs with tokens of their
                own load half of the weights each, for both
    consumers   eight warps, 32 experts x 32 tokens each

The bits are those of `gate`: there a warp has one part of each slice, here all parts of it, one
after the other. A quad's 32 neighbouring elements of a row lie together in shared memory, those of
eight rows behind each other: what the lanes of a warp read at a time are 512 neighbouring bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute
from cutlass.experimental.cuda.tensor_map import TensorMapL2Promotion, create_tensor_map_tiled
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit import mbarrier, pdl
from dsv4.kernels.kit.storage import storage_struct
from dsv4.kernels.kit.swizzle import VECTOR_BYTES
from dsv4.kernels.kit.tma import prefetch_descriptors, tma_load, tma_multicast
from dsv4.kernels.moe.gate import (
    LANE_BYTES,
    M_TILE,
    M_TILES,
    WORDS,
    Gate,
    GateTensors,
    mma_bf16,
    store_codes,
)
from dsv4.kernels.moe.gate_plan import (
    BF16,
    CHUNK,
    CHUNKS,
    EXPERT_WARPS,
    WARP_EXPERTS,
    WARP_TOKENS,
    GatePlan,
)
from dsv4.kernels.moe.packed_rows import pack_tokens, scale_of_tokens
from dsv4.kernels.moe.routing import ARRIVAL_WORDS, SLICE_PARTS, TOKEN_TILE, RoutingConfig

N_TILES = WARP_TOKENS // TOKEN_TILE
ROW_BYTES = CHUNK * BF16  # of a chunk
GROUP_BYTES = 8 * ROW_BYTES  # of eight rows, which a warp reads at a time
FRAGMENT = 4  # sums of a lane in a product


class Place(NamedTuple):
    """A warp's part of a tile."""

    expert_tile: Int32
    expert_warp: Int32
    expert: Int32  # the first
    token: Int32  # the first
    weight: cute.Pointer  # this lane's first vector of a stage
    x: cute.Pointer
    lane: Int32


class GateMany:
    """Kernel: logits as one partial sum, and codes of x."""

    def __init__(self, config: RoutingConfig):
        self.config = config
        self.plan = GatePlan.of(config)

    @cute.jit
    def launch(self, tensors: GateTensors, stream):
        """A CTA for each 128 experts and 64 tokens."""
        plan = self.plan
        _, tokens, experts = tensors.partials.shape
        clusters = cute.ceil_div(tokens, plan.tokens * plan.sharing)
        maps = row_map(tensors.weight, plan.part_experts), row_map(tensors.x, plan.tokens)
        self.kernel(maps, tensors).launch(
            grid=[clusters * plan.sharing, cute.ceil_div(experts, plan.experts), 1],
            block=[plan.warps.threads, 1, 1],
            cluster=[plan.sharing, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            # Given, because the compiler would ask a driver for the capacity.
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, maps: cutlass.GridConstant[tuple], tensors: GateTensors):
        """Initialise, then send every warp to its role."""
        plan = self.plan
        storage = SmemAllocator().allocate(storage_struct(plan.smem))
        ring = mbarrier.pipeline(plan.barriers, storage, "ring")
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        token_tile, expert_tile, _ = cute.arch.block_idx()
        if warp == 0:
            with cute.arch.elect_one():
                mbarrier.init(plan.barriers, {"ring": ring})
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # The other CTA's barriers exist from here on.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        pdl.launch_dependents()
        pdl.wait_for_previous_launch()
        weight, x = storage.weight.data_ptr(), storage.x.data_ptr()
        if warp >= plan.warps["load"].first:
            cute.arch.setmaxregister_decrease(plan.registers["load"])
            if warp == plan.warps["load"].first and cute.arch.lane_idx() == 0:
                if token_tile + expert_tile == 0:
                    for word in cutlass.range_constexpr(ARRIVAL_WORDS):
                        tensors.arrivals[word] = Int32(0)
                first = expert_tile * plan.experts + rank * plan.part_experts
                self.load(ring, maps, (weight, x), first, token_tile * plan.tokens, rank)
        else:
            cute.arch.setmaxregister_increase(plan.registers["consumers"])
            expert_warp, token_warp = warp % EXPERT_WARPS, warp // EXPERT_WARPS
            row = expert_warp * WARP_EXPERTS
            part = row // plan.part_experts
            offset = part * (plan.part_experts * CHUNKS) + row % plan.part_experts
            lane = cute.arch.lane_idx()
            place = Place(
                expert_tile, expert_warp, expert_tile * plan.experts + row,
                token_tile * plan.tokens + token_warp * WARP_TOKENS,
                weight + vectors(offset * ROW_BYTES + lane * LANE_BYTES),
                x + vectors(token_warp * (WARP_TOKENS * ROW_BYTES) + lane * LANE_BYTES),
                lane,
            )  # fmt: skip
            self.multiply(tensors, ring, place)
        # No CTA may end while another one's weights or arrivals are on their way to it.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def load(self, ring: mbarrier.Ring, maps: tuple, targets: tuple, expert, token, rank):
        """Load every stage, by one lane."""
        plan = self.plan
        prefetch_descriptors(maps)
        cursor = ring.producer()
        for step in cutlass.range(plan.slices * SLICE_PARTS, unroll=1):
            ring.acquire(cursor)
            full, stage = ring.at(cursor.stage).full, cursor.stage
            ring.expect(stage, plan.barriers["ring"].tx_bytes)
            chunk = step * CHUNKS
            weight = targets[0] + stage * plan.weight_bytes
            if cutlass.const_expr(plan.sharing == 1):
                tma_load(maps[0], weight, [0, expert, chunk], full)
            else:
                weight += rank * (plan.weight_bytes // plan.sharing)
                everyone = (1 << plan.sharing) - 1
                tma_multicast(maps[0], weight, [0, expert, chunk], full, everyone)
            tma_load(maps[1], targets[1] + stage * plan.x_bytes, [0, token, chunk], full)
            cursor = ring.next(cursor)

    @cute.jit
    def multiply(self, tensors: GateTensors, ring: mbarrier.Ring, place: Place):
        """Sum parts to slices, and slices to logits, each in order."""
        plan = self.plan
        shape = (FRAGMENT, M_TILES, N_TILES)
        totals = cute.make_rmem_tensor(shape, Float32)
        totals.fill(0.0)
        sums = cute.make_rmem_tensor(shape, Float32)
        cursor, whole = ring.consumer(), Float32(0.0)
        if cutlass.const_expr(self.config.packs):
            whole = scale_of_tokens(tensors.packed.global_scales)
            if place.expert_tile * EXPERT_WARPS + place.expert_warp + place.token == 0:  # noqa: SIM102
                if place.lane == 0:
                    tensors.packed.whole[0] = whole
        for piece in cutlass.range(plan.slices, unroll=1):
            for part in cutlass.range_constexpr(SLICE_PARTS):
                ring.wait(cursor)
                found = self.products(place, cursor.stage)
                if cutlass.const_expr(self.config.quantizes):
                    self.quantize(tensors, place, piece * SLICE_PARTS + part, cursor.stage, whole)
                ring.release_to(cursor, place.lane, plan.sharing)
                cursor = ring.next(cursor)
                for i in cutlass.range_constexpr(cute.size(sums)):
                    sums[i] = found[i] if part == 0 else sums[i] + found[i]
            for i in cutlass.range_constexpr(cute.size(sums)):
                totals[i] += sums[i]
        store_logits(tensors.partials, totals, place)

    @cute.jit
    def products(self, place: Place, stage) -> cute.Tensor:
        """A part's sums of the warp's experts and tokens."""
        plan = self.plan
        sums = cute.make_rmem_tensor((FRAGMENT, M_TILES, N_TILES), Float32)
        sums.fill(0.0)
        for c in cutlass.range_constexpr(CHUNKS):
            a = cute.make_rmem_tensor((WORDS, 2 * M_TILES), Uint32)
            b = cute.make_rmem_tensor((WORDS, N_TILES), Uint32)
            for rows in cutlass.range_constexpr(2 * M_TILES):
                offset = c * (plan.part_experts * ROW_BYTES) + rows * GROUP_BYTES
                read(place.weight, stage * plan.weight_bytes + offset, a[None, rows])
            for n in cutlass.range_constexpr(N_TILES):
                offset = c * (plan.tokens * ROW_BYTES) + n * GROUP_BYTES
                read(place.x, stage * plan.x_bytes + offset, b[None, n])
            for step in cutlass.range_constexpr(0, WORDS, 2):
                for m in cutlass.range_constexpr(M_TILES):
                    left = [a[step + high, 2 * m + half] for high in (0, 1) for half in (0, 1)]
                    for n in cutlass.range_constexpr(N_TILES):
                        before = tuple(sums[i, m, n] for i in range(FRAGMENT))
                        after = mma_bf16(left, [b[step, n], b[step + 1, n]], before)
                        for i in cutlass.range_constexpr(FRAGMENT):
                            sums[i, m, n] = after[i]
        return sums

    @cute.jit
    def quantize(self, tensors: GateTensors, place: Place, k_block, stage, whole):
        """Codes and scales of the warp's tokens, of the k blocks that are its expert warp's among
        those of all expert tiles."""
        plan = self.plan
        warps = Int32(cute.arch.grid_dim()[1]) * EXPERT_WARPS
        if k_block % warps == place.expert_tile * EXPERT_WARPS + place.expert_warp:
            for n in cutlass.range_constexpr(N_TILES):
                words = cute.make_rmem_tensor((WORDS, CHUNKS), Uint32)
                for c in cutlass.range_constexpr(CHUNKS):
                    offset = c * (plan.tokens * ROW_BYTES) + n * GROUP_BYTES
                    read(place.x, stage * plan.x_bytes + offset, words[None, c])
                token = place.token + n * TOKEN_TILE + place.lane // 4
                store_codes(tensors, words, token, k_block, place.lane % 4)
                if cutlass.const_expr(self.config.packs):
                    pack_tokens(tensors.packed, words, token, k_block, place.lane % 4, whole)


def row_map(rows: cute.Tensor, box: int):
    """TMA descriptor of rows [row, K] bf16 as (k of a chunk, row, chunk), a part of K of `box` rows
    at a time; rows past the end are read as zeros."""
    units = VECTOR_BYTES // BF16
    return create_tensor_map_tiled(
        rows.iterator.toint(),
        BFloat16,
        [CHUNK, Int32(rows.shape[0]), rows.shape[1] // CHUNK],
        [Int64(rows.stride[0]) // units, CHUNK // units],
        [CHUNK, box, CHUNKS],
        l2_promotion=TensorMapL2Promotion.none,
    )


def vectors(offset) -> Int32:
    """Bytes of whole vectors."""
    return cute.assume(offset, divby=LANE_BYTES)


@cute.jit
def read(start: cute.Pointer, offset, target: cute.Tensor) -> None:
    """target[word] = 16 bytes of shared memory."""
    source = cute.recast_ptr(start + vectors(offset), dtype=Uint32)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(WORDS)), target)


@cute.jit
def store_logits(partials: cute.Tensor, totals: cute.Tensor, place: Place) -> None:
    """partials[0, token, expert] of this lane's experts and tokens."""
    group, quad = place.lane // 4, place.lane % 4
    for n in cutlass.range_constexpr(N_TILES):
        for column in cutlass.range_constexpr(2):
            token = place.token + n * TOKEN_TILE + quad * 2 + column
            if token < partials.shape[1]:
                for m in cutlass.range_constexpr(M_TILES):
                    for half in cutlass.range_constexpr(2):
                        expert = place.expert + m * M_TILE + half * 8 + group
                        if expert < partials.shape[2]:
                            partials[0, token, expert] = totals[2 * half + column, m, n]


class Gates:
    """The gate of few tokens and that of many, of which a launch takes one."""

    def __init__(self, config: RoutingConfig):
        self.few, self.many = Gate(config), GateMany(config)

    @cute.jit
    def launch(self, tensors: GateTensors, stream, token_tiles: Int32):
        """`token_tiles` of `Gate.launch`; 0: the gate of many tokens."""
        if token_tiles == 0:
            self.many.launch(tensors, stream)
        else:
            self.few.launch(tensors, stream, token_tiles)
