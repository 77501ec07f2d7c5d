"""TMA of row-major tensors: descriptors with a fallback for empty ones, load, store, prefetch."""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.experimental import primitives
from cutlass.experimental.cuda.tensor_map import TensorMapL2Promotion, create_tensor_map_tiled

from dsv4.kernels.kit.swizzle import SPAN_BYTES, TENSOR_MAP_SWIZZLES

MAX_COORDINATE = (1 << 31) - 1
# Policy of L2, as `createpolicy` encodes it: what is read once leaves before what is read again.
EVICT_FIRST = 0x12F0000000000000
EVICT_NORMAL = 0x1000000000000000  # the usual one, where a choice is made at run time
EVEN_CTA = 0xFEFFFFFF  # mask of shared addresses: bit 24 is the lowest of the CTA's rank


@cute.jit
def make_row_descriptor(
    tensor: cute.Tensor, fallback: cute.Pointer, chunk: cutlass.Constexpr, box: cutlass.Constexpr
):
    """TMA descriptor of a [batch, row, d] tensor seen as (d % chunk, row, d // chunk, batch).

    Splitting d lets one instruction fetch a tile wider than the swizzle span. Row and batch are
    separate dimensions so that a ragged tile is filled with zeros instead of the next batch's rows.
    L2 promotion is off: 256 B costs 10 % of the read bandwidth.

    An empty tensor has no address that a descriptor may hold: it is described as one row at
    `fallback`. A speculative load may read that row, whose values are never used; more rows would
    reach past what is there.

    Args:
        chunk: columns of a swizzle span.
        box: rows and columns of a load or store.
    """
    batch, rows, dim = tensor.shape
    address = tensor.iterator.toint()
    batch_stride, row_stride = cutlass.Int64(tensor.stride[0]), cutlass.Int64(tensor.stride[1])
    batch, rows = cutlass.Int32(batch), cutlass.Int32(rows)
    if cutlass.min(batch, rows) == 0:
        address = fallback.toint()
        batch, rows = cutlass.Int32(1), cutlass.Int32(1)
        batch_stride = cutlass.Int64(dim)
        row_stride = cutlass.Int64(dim)
    units = 128 // tensor.element_type.width
    return create_tensor_map_tiled(
        address,
        tensor.element_type,
        [chunk, rows, dim // chunk, batch],
        [row_stride // units, chunk // units, batch_stride // units],
        [chunk, box[0], box[1] // chunk, 1],
        swizzle=TENSOR_MAP_SWIZZLES[chunk * tensor.element_type.width // 8],
        l2_promotion=TensorMapL2Promotion.none,
    )


@cute.jit
def make_head_tile_descriptor(
    q: cute.Tensor, tile_rows: cutlass.Int32, chunk: cutlass.Constexpr, box_rows: cutlass.Constexpr
):
    """TMA descriptor of q [token, head, d] seen as (d % chunk, head % tile_rows, d // chunk,
    head // tile_rows, token): heads of other tiles are out of bounds, and read as zeros."""
    tokens, heads, dim = q.shape
    token_stride, row_stride = cutlass.Int64(q.stride[0]), cutlass.Int64(q.stride[1])
    rows = cutlass.min(tile_rows, heads)
    units = 128 // q.element_type.width
    return create_tensor_map_tiled(
        q.iterator.toint(),
        q.element_type,
        [chunk, rows, dim // chunk, (heads + rows - 1) // rows, tokens],
        [row_stride // units, chunk // units, rows * row_stride // units, token_stride // units],
        [chunk, box_rows, 1, 1, 1],
        swizzle=TENSOR_MAP_SWIZZLES[chunk * q.element_type.width // 8],
        l2_promotion=TensorMapL2Promotion.none,
    )


@cute.jit
def make_gather_descriptor(
    pool: cute.Tensor, steps: tuple[cutlass.Int64, cutlass.Int64], fallback: cute.Pointer
):
    """TMA descriptor that gathers rows of a pool [page, row, d] by their coordinates, page *
    steps[0] + row * steps[1]; four rows and one swizzle span of columns at a time.

    TMA gathers from two dimensions only, so that pages and rows share one. Rows of the descriptor
    are `gather_steps` apart, less than a row is long where pages lie apart by other than whole
    rows: they overlap, and no coordinate names one that is none.

    Args:
        fallback: address that an empty pool's descriptor may hold.
    """
    pages, page_rows, dim = pool.shape
    units = 128 // pool.element_type.width
    address, count = pool.iterator.toint(), cutlass.Int64(1)
    step = cutlass.Int64(pool.stride[1]) // units
    if cutlass.min(cutlass.Int32(pages), cutlass.Int32(page_rows)) == 0:
        address = fallback.toint()
        step = cutlass.Int64(dim // units)
    else:
        step = step // steps[1]
        count += (pages - 1) * steps[0] + (page_rows - 1) * steps[1]
    return create_tensor_map_tiled(
        address,
        pool.element_type,
        [dim, cutlass.Int32(cutlass.min(count, cutlass.Int64(MAX_COORDINATE)))],
        [step],
        [SPAN_BYTES * 8 // pool.element_type.width, 1],
        swizzle=TENSOR_MAP_SWIZZLES[SPAN_BYTES],
        l2_promotion=TensorMapL2Promotion.none,
    )


@cute.jit
def gather_steps(pool: cute.Tensor) -> tuple[cutlass.Int64, cutlass.Int64]:
    """Rows of a gather descriptor from one page of a pool to the next, and from row to row."""
    pages, page_rows, dim = pool.shape
    units = 128 // pool.element_type.width
    page, row = cutlass.Int64(pool.stride[0]) // units, cutlass.Int64(pool.stride[1]) // units
    # The stride of a single page or row says nothing.
    if page_rows <= 1:
        row = cutlass.Int64(dim // units)
    if pages <= 1:
        page = row
    a, b = page, row
    while b > 0:
        a, b = b, a % b
    return page // a, row // a


@dataclass(frozen=True)
class DescriptorAddress:
    """A descriptor by its address."""

    address: cutlass.Int64

    def get_ptr(self):
        """Pointer that TMA instructions take."""
        return cute.make_ptr(cutlass.Int8, self.address, cute.AddressSpace.generic).to_llvm_ptr()


def chosen_descriptor(descriptors, index):
    """One of several descriptors, parameters of the kernel; with one, the index is not looked
    at."""
    if len(descriptors) == 1:
        return descriptors[0]
    address = descriptors[0].get_ptr().toint()
    for i in range(1, len(descriptors)):
        address = cutlass.select_(index == i, descriptors[i].get_ptr().toint(), address)
    return DescriptorAddress(cutlass.Int64(address))


def tma_load(
    descriptor, smem: cute.Pointer, coordinates, barrier: cute.Pointer, policy: int | None = None
):
    """One elected thread fetches a box into `smem`; its bytes are counted on `barrier`.

    Args:
        policy: of L2 for them, as `EVICT_FIRST`; None: the usual one.
    """
    primitives.cp_async_bulk_tensor_shared_cta_global(
        smem.to_llvm_ptr(),
        descriptor.get_ptr(),
        coordinates,
        barrier.to_llvm_ptr(),
        l2_cache_hint=policy,
    )


def tma_gather4(address, smem, column, rows, barrier, is_pair: bool) -> None:
    """The calling thread fetches a swizzle span of columns of four rows, zeros of rows outside the
    tensor; its bytes are counted on `barrier`.

    Args:
        address: of the descriptor.
        smem: address in shared memory, in this CTA.
        rows: four coordinates.
        is_pair: whether `barrier` is that of the even CTA of a pair.
    """
    group = ".cta_group::2" if is_pair else ""
    if is_pair:
        barrier = barrier & EVEN_CTA
    coordinates = ", ".join(f"{{$r{i}}}" for i in range(3, 8))
    cute.arch.inline_ptx(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes"
        f"{group} [{{$r0}}], [{{$r1}}, {{{coordinates}}}], [{{$r2}}];",
        read_only_args=[smem, address, barrier, column, *rows],
    )


def bulk_load(
    source: cute.Pointer, smem: cute.Pointer, size, barrier: cute.Pointer, policy: int | None = None
):
    """One elected thread fetches `size` bytes as they lie, a multiple of 16, into `smem`; they are
    counted on `barrier`.

    Args:
        policy: of L2 for them, as `EVICT_FIRST`; None: the usual one.
    """
    primitives.cp_async_bulk_shared_cluster_global(
        smem.to_llvm_ptr(), source.to_llvm_ptr(), barrier.to_llvm_ptr(), size, l2_cache_hint=policy
    )


def bulk_send(
    source: cute.Pointer, target: cute.Pointer, size, barrier: cute.Pointer, rank
) -> None:
    """The calling thread copies `size` bytes of shared memory, a multiple of 16, to another CTA of
    its cluster; they are counted on a barrier there.

    Args:
        source: pointer.
        target, barrier: pointers, as if to this CTA.
    """
    cute.arch.inline_ptx(
        "{\n.reg .b32 there, full;\n"
        "mapa.shared::cluster.u32 there, {$r1}, {$r4};\n"
        "mapa.shared::cluster.u32 full, {$r3}, {$r4};\n"
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        "[there], [{$r0}], {$r2}, [full];\n}",
        read_only_args=[
            source.toint(), target.toint(), cutlass.Int32(size), barrier.toint(),
            cutlass.Int32(rank),
        ],
    )  # fmt: skip


def bulk_prefetch(source: cute.Pointer, size) -> None:
    """The calling thread asks for `size` bytes, a multiple of 16, to be brought into L2."""
    primitives.cp_async_bulk_prefetch(source.to_llvm_ptr(), size)


def tma_multicast(descriptor, smem: cute.Pointer, coordinates, barrier: cute.Pointer, ctas: int):
    """One elected thread fetches a box to the same place in some CTAs of its cluster; its bytes are
    counted on the same barrier of each.

    Args:
        ctas: bit mask of their ranks.
    """
    primitives.cp_async_bulk_tensor_shared_cluster_global(
        smem.to_llvm_ptr(),
        descriptor.get_ptr(),
        coordinates,
        barrier.to_llvm_ptr(),
        [],
        multicast_mask=cutlass.Int16(ctas),
    )


def tma_store(descriptor, smem: cute.Pointer, coordinates):
    """One elected thread writes a box from `smem`; it commits, and waits, by itself."""
    primitives.cp_async_bulk_tensor_global_shared_cta(
        descriptor.get_ptr(), smem.to_llvm_ptr(), coordinates
    )


def tma_prefetch(descriptor, coordinates):
    """One elected thread asks for a box to be brought into L2; out of bounds there is nothing."""
    primitives.cp_async_bulk_tensor_prefetch(descriptor.get_ptr(), coordinates, [])


def prefetch_descriptors(descriptors) -> None:
    """Fetch descriptors before their first use."""
    for descriptor in descriptors:
        primitives.prefetch_tensormap(descriptor.get_ptr())
