"""Building blocks for tcgen05: products, fences, TMEM copies, pipelines of a barrier graph."""

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, pipeline
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
