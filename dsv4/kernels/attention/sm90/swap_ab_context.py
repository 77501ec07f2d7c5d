"""Context of the swap-AB kernel: what its roles share while it is traced; frozen, as
`heads_m_context` says why."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.attention.key_span import KeySpan, TokenPieces
from dsv4.kernels.attention.sm90.plan import CHUNK, KEYS, SwapAbPlan
from dsv4.kernels.kit import mbarrier
from dsv4.kernels.kit.scheduler import StaticTileScheduler
from dsv4.kernels.kit.storage import storage_struct
from dsv4.kernels.kit.swizzle import SPAN_BYTES, operand_atoms

DTYPE = cutlass.BFloat16
WARPS = 4
PAIR = 2  # neighbouring heads of a thread


class SwapAbTiling(NamedTuple):
    """Map from work tiles to head tiles, splits and tokens."""

    num_splits: cutlass.Int32
    work_tiles: cutlass.Int32
    tile_heads: int
    head_tiles: int  # of a token
    by_splits: cute.FastDivmodDivisorV2 | TokenPieces
    by_tokens: cute.FastDivmodDivisorV2 | None = None  # of pieces
    is_clustered: cutlass.Boolean | None = None  # whether splits meet in a cluster; None: never

    @property
    def has_pieces(self) -> bool:
        return isinstance(self.by_splits, TokenPieces)

    def of_token(self, span: KeySpan):
        """As `HeadsMTiling.of_token`."""
        number = self.by_splits.number(span.token_tiles(KEYS))
        return self._replace(num_splits=cute.arch.make_warp_uniform(number))

    def first(self, cta):
        """First work tile of a CTA: its number, or where splits meet in a cluster that of its split
        of the cluster's head tile."""
        if self.is_clustered is None:
            return cta
        cluster, split = divmod(cta, self.by_splits)
        token, tile = cluster // self.head_tiles, cluster % self.head_tiles
        index = (token * self.num_splits + split) * self.head_tiles + tile
        return cutlass.select_(self.is_clustered, cutlass.Int32(index), cutlass.Int32(cta))

    def coordinates(self, index):
        """First head, split and token of a work tile; head tiles with the same keys are
        neighbours. First pieces, which every token has, come first: all CTAs have their share of
        them."""
        if self.has_pieces:
            split, token = divmod(index // self.head_tiles, self.by_tokens)
        else:
            token, split = divmod(index // self.head_tiles, self.by_splits)
        head = index % self.head_tiles * self.tile_heads
        return cutlass.Int32(head), cutlass.Int32(split), cutlass.Int32(token)


class Operands(NamedTuple):
    """Operands of a launch, beside the TMA descriptors."""

    compressed_rows: cutlass.Int32
    window_shape: tuple  # batch, W
    swa_lens: cute.Tensor
    sink_logits: cute.Tensor
    request_ids: cute.Tensor
    o: cute.Tensor
    compressed_lens: cute.Tensor
    lse: cute.Tensor
    workspace: cute.Tensor
    num_splits: cutlass.Int32
    work_tiles: cutlass.Int32
    by_splits: cute.FastDivmodDivisorV2
    by_request_tokens: cute.FastDivmodDivisorV2


@dataclass(frozen=True)
class Smem:
    """Views of shared memory; `k` and `v` are one buffer."""

    q: cute.Tensor  # swizzled [head, column of a slot, slot of a key tile]
    k: cute.Tensor  # swizzled [key, column of a slot, slot]
    v: cute.Tensor  # swizzled [column of a chunk, key, chunk of a slot x slot]
    p: cute.Tensor  # swizzled [head, key, 2]
    p_start: cute.Pointer
    q_start: cute.Pointer
    kv_start: cute.Pointer
    tile_max: cute.Tensor  # [pair, heads / 2, warp]
    row_sums: cute.Tensor  # the same
    sinks: cute.Tensor  # [head] of the token
    span: cute.Tensor  # words of a KeySpan
    slices: cute.Tensor  # [1]
    tile_info: cute.Tensor | None = None  # [slot x 4] of gathered tiles
    staging: cute.Pointer | None = None  # of threads that gather FP8 entries


@dataclass(frozen=True)
class Pipelines:
    """The edges of `SwapAbPlan.barriers`."""

    q: mbarrier.Buffer
    span: mbarrier.Buffer
    kv: mbarrier.Ring


@dataclass(frozen=True)
class SwapAbContext:
    """A CTA's part of a launch."""

    operands: Operands
    tiling: SwapAbTiling
    scheduler: StaticTileScheduler
    smem: Smem
    pipes: Pipelines

    def of_token(self, span: KeySpan):
        """As `HeadsMContext.of_token`."""
        if not self.tiling.has_pieces:
            return self
        return replace(self, tiling=self.tiling.of_token(span))


def allocate(plan: SwapAbPlan) -> tuple:
    """Shared memory of a CTA: its views, and the mbarriers in it."""
    storage = SmemAllocator().allocate(storage_struct(plan.smem))
    heads, slots, per_tile = plan.tile_heads, plan.slots, plan.slots_per_tile
    k_major, mn_major = operand_atoms(DTYPE, SPAN_BYTES)
    q = cute.tile_to_shape(k_major, (heads, plan.slot_dim, per_tile), order=(0, 1, 2))
    k = cute.tile_to_shape(k_major, (KEYS, plan.slot_dim, slots), order=(0, 1, 2))
    # The same bytes as K, seen as the transposed tiles that the PV products read.
    v = cute.tile_to_shape(mn_major, (CHUNK, KEYS, slots * plan.slot_chunks), order=(1, 0, 2))
    p = cute.tile_to_shape(k_major, (heads, KEYS, 2), order=(0, 1, 2))
    scratch = cute.make_layout((PAIR, heads // PAIR, WARPS), stride=(1, PAIR * WARPS, PAIR))
    smem = Smem(
        q=storage.q.get_tensor(q.outer, swizzle=q.inner),
        k=storage.kv.get_tensor(k.outer, swizzle=k.inner),
        v=storage.kv.get_tensor(v.outer, swizzle=v.inner),
        p=storage.p.get_tensor(p.outer, swizzle=p.inner),
        p_start=storage.p.data_ptr(),
        q_start=storage.q.data_ptr(),
        kv_start=storage.kv.data_ptr(),
        tile_max=storage.tile_max.get_tensor(scratch),
        row_sums=storage.row_sums.get_tensor(scratch),
        sinks=storage.sinks.get_tensor(cute.make_layout(heads * plan.head_tiles)),
        span=storage.span.get_tensor(cute.make_layout(plan.smem["span"].count)),
        slices=storage.slices.get_tensor(cute.make_layout(1)),
    )
    if plan.tile_info_words:
        tile_info = storage.tile_info.get_tensor(cute.make_layout(plan.tile_info_words))
        smem = replace(smem, tile_info=tile_info)
    if plan.staging is not None:
        smem = replace(smem, staging=storage.staging.data_ptr())
    names = ("q", "span", "kv")
    pipes = {name: mbarrier.pipeline(plan.barriers, storage, name) for name in names}
    return smem, Pipelines(**pipes)
