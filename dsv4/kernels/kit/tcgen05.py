"""Building blocks for tcgen05: products, fences, TMEM and its copies, pipelines of a barrier
graph."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blackwell_helpers as sm100

from dsv4.kernels.kit.plan import Arrive, BarrierGraph

TMEM_LANES = 128
LANE_STEP = 1 << 16  # TMEM address of the next lane

_PIPELINES = {
    (Arrive.TMA, Arrive.MMA): pipeline.PipelineTmaUmma,
    (Arrive.MMA, Arrive.THREAD): pipeline.PipelineUmmaAsync,
    (Arrive.THREAD, Arrive.MMA): pipeline.PipelineAsyncUmma,
}


def make_mma(
    cta_group: tcgen05.CtaGroup,
    shape: tuple[int, int],  # M, N
    b_major: OperandMajorMode,
    a_source: tcgen05.OperandSource = tcgen05.OperandSource.SMEM,
) -> cute.TiledMma:
    """bf16 product with fp32 accumulators; A is K-major.

    Make it anew wherever it is used: setting ACCUMULATE changes the object, which must not be seen
    outside the loop that does it.
    """
    types = (BFloat16, BFloat16, OperandMajorMode.K, b_major, Float32)
    return sm100.make_trivial_tiled_mma(*types, cta_group, shape, a_source)


@cute.jit
def fence_before_thread_sync():
    """Orders this thread's TMEM accesses before the arrival that follows."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


@cute.jit
def fence_after_thread_sync():
    """Orders the TMEM accesses that follow after the wait before it."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


def make_tmem_copy(op, repetitions: int, columns: int, address: cute.Pointer, thread: Int32):
    """Copy of all lanes of `columns` TMEM columns at an address, and the (lane, column) tensor.

    Args:
        op: a load or store shape of `tcgen05`, repeated so many times.
        thread: index in the warpgroup.
    """
    layout = cute.make_layout((TMEM_LANES, columns), stride=(LANE_STEP, 1))
    tensor = cute.make_tensor(address, layout)
    atom = cute.make_copy_atom(op(tcgen05.Repetition(repetitions)), Float32)
    return tcgen05.make_tmem_copy(atom, tensor).get_slice(thread), tensor


@dataclass(frozen=True)
class Tmem:
    """Tensor Memory of a CTA.

    Attributes:
        holder: in shared memory, of the address.
        barrier_id: of the hardware barrier behind which it is known.
    """

    holder: cute.Pointer
    barrier_id: int

    def allocate(self, columns: int) -> None:
        """One warp asks for columns."""
        cute.arch.alloc_tmem(columns, self.holder)

    def start(self, users: int) -> cute.Pointer:
        """Address of the first column, once it is known; all users call this."""
        pipeline.NamedBarrier(self.barrier_id, users).arrive_and_wait()
        return cute.arch.retrieve_tmem_ptr(Float32, 16, self.holder)

    def free(self, columns: int, start: cute.Pointer) -> None:
        """The warp that asked for them returns the columns."""
        cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.dealloc_tmem(start, columns)


@cute.jit
def load_lane(address: cute.Pointer, columns: cutlass.Constexpr, thread):
    """Ask for the thread's lane of some columns: there after the fence of TMEM loads."""
    copy, tensor = make_tmem_copy(tcgen05.Ld32x32bOp, columns, columns, address, thread)
    coordinates = cute.make_identity_tensor((TMEM_LANES, columns))
    fragment = cute.make_rmem_tensor(copy.partition_D(coordinates).shape, Float32)
    cute.copy(copy, copy.partition_S(tensor), fragment)
    return cute.make_tensor(fragment.iterator, cute.make_layout(columns))


@cute.jit
def load_rows(address: cute.Pointer, columns: cutlass.Constexpr, thread) -> cute.Tensor:
    """Ask for some columns of an accumulator of 64 rows, 16 of each warp: the fragment that wgmma
    leaves of 64 rows (`wgmma.by_row`), there after the fence of TMEM loads."""
    rows = ((TMEM_LANES // 8, 4), columns)
    layout = cute.make_layout(rows, stride=((LANE_STEP, 32 * LANE_STEP), 1))
    tensor = cute.make_tensor(address, layout)
    atom = cute.make_copy_atom(tcgen05.Ld16x256bOp(tcgen05.Repetition(columns // 8)), Float32)
    copy = tcgen05.make_tmem_copy(atom, tensor).get_slice(thread)
    coordinates = cute.make_identity_tensor((TMEM_LANES // 2, columns))
    fragment = cute.make_rmem_tensor(copy.partition_D(coordinates).shape, Float32)
    cute.copy(copy, copy.partition_S(tensor), fragment)
    return fragment


def create_pipeline(graph: BarrierGraph, name: str, storage, cta_layout: cute.Layout):
    """Pipeline of an edge, with the graph's arrival counts; its mbarriers are initialised here.

    The caller still makes them visible to the other threads (`pipeline_init_arrive`, `_wait`).

    Args:
        storage: struct with the edge's buffer, as `BarrierGraph.buffers` names it.
        cta_layout: (V, M, N, K) shape of the cluster whose CTAs the edge's commits reach.
    """
    edge = graph[name]
    thread = pipeline.Agent.Thread
    ends = (edge.producers[0].by, edge.consumers[0].by)
    options = {"tx_count": edge.tx_bytes} if ends[0] is Arrive.TMA else {}
    return _PIPELINES[ends].create(
        barrier_storage=getattr(storage, edge.buffer.name).data_ptr(),
        num_stages=edge.stages,
        producer_group=pipeline.CooperativeGroup(thread, graph.full_arrivals(name)),
        consumer_group=pipeline.CooperativeGroup(thread, graph.empty_arrivals(name)),
        cta_layout_vmnk=cta_layout,
        defer_sync=True,
        **options,
    )


# ---- products by descriptors ---------------------------------------------------------------------

_DESCRIPTOR_VERSION = 1 << 46
# By the bytes of a swizzled row; the field is the highest of a signed word.
_SWIZZLES = {128: 1 << 62, 64: -(1 << 63), 32: -(1 << 62)}
_GROUP_ROWS = 8  # that lie together in an operand
_E8M0_SCALES = 1 << 23
_SCALE_VECTORS = {"mxf8f6f4": "scale_vec::1X", "mxf4nvf4": "scale_vec::4X"}
_PACKED_E2M1 = 1 << 7 | 1 << 10  # both factors, two elements a byte
E4M3, E2M1 = 0, 5  # element formats; e2m1 lies in shared memory in groups of 16, padded to 16 bytes
# By format: kind of the products, and in their descriptor the sums and both factors.
_FORMATS = {
    "fp8": ("f8f6f4", 1 << 4),
    "bf16": ("f16", 1 << 4 | 1 << 7 | 1 << 10),
    "int8": ("i8", 2 << 4 | 1 << 7 | 1 << 10),
    "fp16": ("f16", 1 << 4),
    "fp16 values": ("f16", 1 << 4 | 1 << 16),  # B is MN-major
}


def operand_descriptor(
    address: Int32, span_bytes: int = 0, group_step: int = 1, step_bytes: int = 16
) -> Int64:
    """Descriptor of an operand in shared memory, in groups of eight rows: of its own (K-major), or
    of K (MN-major).

    Args:
        address: in shared memory; of a swizzled operand also inside a row.
        span_bytes: of a swizzled row, 32, 64 or 128; 0: rows of 16 bytes, as `copy_scales` reads
            them.
        group_step: groups of rows from one of the operand to its next.
        step_bytes: from a span of an MN-major operand to the next; of a K-major one nothing looks
            at it.
    """
    row_bytes = span_bytes or 16
    fixed = _DESCRIPTOR_VERSION | (group_step * _GROUP_ROWS * row_bytes >> 4) << 32
    if span_bytes:
        fixed |= _SWIZZLES[span_bytes] | step_bytes >> 4 << 16
    return Int64(address >> 4) | Int64(fixed)


class Descriptor(NamedTuple):
    """Descriptor of an operand by its words: only the lower one, with the address, is not known
    when the kernel is compiled."""

    low: Int32
    high: int

    def __add__(self, size: int) -> "Descriptor":
        """The descriptor so many bytes further on."""
        return Descriptor(self.low + (size >> 4), self.high)


def pair_operand(address: Int32, span_bytes: int, run_step: int | None = None) -> Descriptor:
    """Operand of `multiply_pair` in swizzled rows of so many bytes, in groups of eight.

    Args:
        run_step: None: K-major. Else the same bytes MN-major, rows are columns of K; bytes from one
            span of all rows to the next.
    """
    leading = 1 if run_step is None else run_step >> 4
    fixed = _DESCRIPTOR_VERSION | (_GROUP_ROWS * span_bytes >> 4) << 32 | _SWIZZLES[span_bytes]
    high = (fixed >> 32) & 0xFFFFFFFF
    return Descriptor((address >> 4) | leading << 16, high)


def multiply_pair(
    sums: cute.Pointer, a: Descriptor | cute.Pointer, b: Descriptor, columns: int, accumulate,
    kind: str = "fp8", is_mn_major: bool = False,
) -> None:  # fmt: skip
    """`multiply` by a pair of CTAs, M = 128: each has 64 rows, and brings half of the columns.

    Args:
        a: in TMEM, or a K-major operand.
        columns: of both CTAs.
        is_mn_major: whether B is.
    """
    kind, formats = _FORMATS[kind]
    form = formats | is_mn_major << 16 | columns >> 3 << 17 | 128 >> 4 << 24
    is_in_tmem = isinstance(a, cute.Pointer)
    place = "[{$r1}]" if is_in_tmem else "a"
    high = 0 if is_in_tmem else a.high
    adds = "mov.pred p, 1;" if accumulate is True else "setp.ne.s32 p, {$r3}, 0;"
    cute.arch.inline_ptx(
        "{\n.reg .pred p;\n.reg .b32 form;\n.reg .b64 a, b;\n" + adds + "\n"
        + ("" if is_in_tmem else f"mov.b64 a, {{{{$r1}}, {high}}};\n")
        + f"mov.b64 b, {{{{$r2}}, {b.high}}};\nmov.b32 form, {form};\n"
        f"tcgen05.mma.cta_group::2.kind::{kind} [{{$r0}}], {place}, b, form, p;\n}}",
        read_only_args=[
            sums.toint(), a.toint() if is_in_tmem else a.low, b.low,
            *([] if accumulate is True else [Int32(accumulate)]),
        ],
    )  # fmt: skip


def multiply(
    sums: cute.Pointer, a: Int64 | cute.Pointer, b: Int64, shape: tuple[int, int], accumulate,
    qk: str = "fp8",
) -> None:  # fmt: skip
    """sums += A B^T over 32 bytes of K, or = without `accumulate`; one thread issues it, elected
    where it does.

    Args:
        sums: in TMEM, fp32, of int8 int32.
        a, b: of `operand_descriptor`, K-major; b of "fp16 values" MN-major; a may be in TMEM.
        shape: rows of A and of B.
        qk: format of both factors, e4m3 ("fp8"), "bf16", "int8", "fp16" or "fp16 values".
    """
    kind, formats = _FORMATS[qk]
    rows, columns = shape
    descriptor = formats | columns >> 3 << 17 | rows >> 4 << 24
    place = "{$r1}"
    if isinstance(a, cute.Pointer):
        place, a = "[{$r1}]", a.toint()
    cute.arch.inline_ptx(
        "{\n.reg .pred p;\nsetp.ne.s32 p, {$r4}, 0;\n"
        f"tcgen05.mma.cta_group::1.kind::{kind} [{{$r0}}], {place}, {{$r2}}, {{$r3}}, p;\n}}",
        read_only_args=[sums.toint(), a, b, Int32(descriptor), Int32(accumulate)],
    )


# ---- products with block scales ------------------------------------------------------------------


def scaled_product(
    rows: int, columns, a_format: int = E4M3, a_scale_byte: int = 0, b_scale_byte: int = 0
):
    """Instruction descriptor of products of so many rows of A and of B, which is e4m3, with E8M0
    scales.

    Args:
        columns: rows of B, may be known at run time only.
        a_scale_byte, b_scale_byte: of the words of scales, those that are multiplied with.
    """
    fixed = _E8M0_SCALES | a_format << 7 | rows >> 7 << 27
    fixed |= a_scale_byte << 29 | b_scale_byte << 4
    return columns >> 3 << 17 | fixed


def packed_product(rows: int, columns):
    """Instruction descriptor of products of so many rows of A and of B, both packed e2m1 with an
    e4m3 scale for each 16 elements; `columns` may be known at run time only."""
    return _PACKED_E2M1 | columns >> 3 << 17 | rows >> 7 << 27


def multiply_scaled(
    sums: cute.Pointer, a: Int64, b: Int64, descriptor: int, a_scales, b_scales, accumulate,
    kind: str = "mxf8f6f4",
):  # fmt: skip
    """sums += (A * its scales) (B * its scales)^T over 32 bytes of K, or = without `accumulate`;
    one thread issues it, elected where it does: ptxas 13.0 fails on loops of one thread alone.

    Args:
        sums, a_scales, b_scales: in TMEM.
        a, b: of `operand_descriptor`.
        descriptor: of the instruction, of `scaled_product`; of kind "mxf4nvf4" `packed_product`.
    """
    cute.arch.inline_ptx(
        "{\n.reg .pred p;\nsetp.ne.s32 p, {$r6}, 0;\n"
        f"tcgen05.mma.cta_group::1.kind::{kind}.block_scale.{_SCALE_VECTORS[kind]} "
        "[{$r0}], {$r1}, {$r2}, {$r3}, [{$r4}], [{$r5}], p;\n}",
        read_only_args=[
            sums.toint(), a, b, Int32(descriptor), a_scales.toint(), b_scales.toint(),
            Int32(accumulate),
        ],
    )  # fmt: skip


@cute.jit
def copy_scales(target: cute.Pointer, source: Int64):
    """512 bytes of shared memory to four TMEM columns, row r of 32 to lanes r, 32 + r, 64 + r and
    96 + r: in order with the products that the same thread issues.

    Args:
        source: of `operand_descriptor`.
    """
    cute.arch.inline_ptx(
        "tcgen05.cp.cta_group::1.32x128b.warpx4 [{$r0}], {$r1};",
        read_only_args=[target.toint(), source],
    )


@cute.jit
def commit(barrier: cute.Pointer):
    """Arrive at an mbarrier once all products and copies that this thread has issued are over."""
    cute.arch.inline_ptx(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{$r0}];",
        read_only_args=[barrier.toint()],
    )
