"""The first stages of the ladder: the product's roles with a simpler softmax role.

Both write what they compute into the workspace, [T, n_h, columns] fp32.
"""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, pipeline

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.sm100 import fragments_1cta as fragments
from dsv4.kernels.attention.sm100.fmha import FmhaKernel
from dsv4.kernels.attention.sm100.fmha_1cta import Fmha1Cta
from dsv4.kernels.attention.sm100.plan_1cta import KEYS, NamedBarriers
from dsv4.kernels.attention.sm100.work_tile import (
    COLUMNS,
    CONSUMER,
    PRODUCER,
    find_keys,
)
from dsv4.kernels.kit.tcgen05 import fence_after_thread_sync, fence_before_thread_sync


class StageKernel(Fmha1Cta):
    """Gives the softmax warps what they share: TMEM views, and a way to write 64 columns."""

    @cute.jit
    def softmax_warps(self, ctx):
        keys = find_keys(self.config, ctx.params, ctx.work)
        ctx.tmem.allocate(self.tmem.allocated_columns)
        ctx.tmem.wait_for_alloc()
        address = ctx.tmem.retrieve_ptr(Float32)
        t_s, t_o = self._tmem_views(address)
        copies = fragments.make_copies(t_s[(None, None), 0, 0, 0])
        self.stage(ctx, keys, copies, t_s, t_o)
        fence_before_thread_sync()
        threads = self.warps["softmax"].threads
        pipeline.NamedBarrier(NamedBarriers.TMEM_UNUSED, threads).arrive_and_wait()
        fence_after_thread_sync()
        ctx.tmem.relinquish_alloc_permit()
        ctx.tmem.free(address)

    @cute.jit
    def write(self, ctx, copies, fragment, columns, first_column):
        """Write (64, 64) columns at `first_column` of rows that are `columns` wide."""
        work, workspace = ctx.work, ctx.params.workspace
        heads = self._rows_of_thread(work)
        rows = fragments.by_rows(fragment)
        for row in cutlass.range_constexpr(2):
            if heads[row] < self.config.num_query_heads:
                index = work.token * self.config.num_query_heads + heads[row]
                for i in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                    column = first_column + i // 2 * 8 + copies.thread % 4 * 2 + i % 2
                    workspace[index * columns + column] = rows[row, i]


class ScoresKernel(StageKernel):
    """Stage A: S = Q K^T into TMEM and out, one column per key of every tile."""

    @cute.jit
    def mma_warp(self, ctx):
        kv = ctx.pipelines.kv
        keys = find_keys(self.config, ctx.params, ctx.work)
        ctx.tmem.wait_for_alloc()
        t_s, _ = self._tmem_views(ctx.tmem.retrieve_ptr(Float32))
        kv_full = pipeline.make_pipeline_state(CONSUMER, self.plan.kv_stages)
        kv_done = pipeline.make_pipeline_state(CONSUMER, self.plan.kv_stages)
        s_state = pipeline.make_pipeline_state(PRODUCER, self.plan.s_stages)
        ctx.pipelines.q.consumer_wait(pipeline.make_pipeline_state(CONSUMER, 1))
        for _ in cutlass.range(keys.last - keys.first, unroll=1):
            kv_full, s_state = self._qk(ctx, t_s, kv_full, s_state)
            for _ in cutlass.range_constexpr(self.tiling.chunks):
                kv.consumer_release(kv_done)
                kv_done.advance()

    @cute.jit
    def stage(self, ctx, keys, copies, t_s, t_o):
        s_state = pipeline.make_pipeline_state(CONSUMER, self.plan.s_stages)
        for tile in cutlass.range(keys.last, unroll=1):
            fragment = self._load_scores(ctx, copies, t_s, s_state)
            s_state.advance()
            self.write(ctx, copies, fragment, keys.last * KEYS, tile * KEYS)


class IdentityKernel(StageKernel):
    """Stage B: O = bf16(Q K^T) V, the softmax left out."""

    @cute.jit
    def stage(self, ctx, keys, copies, t_s, t_o):
        p_pipe, o_pipe = ctx.pipelines.p, ctx.pipelines.o
        s_state = pipeline.make_pipeline_state(CONSUMER, self.plan.s_stages)
        p_state = pipeline.make_pipeline_state(PRODUCER, self.plan.p_stages)
        o_state = pipeline.make_pipeline_state(CONSUMER, 1)
        for tile in cutlass.range(keys.last, unroll=1):
            fragment = self._load_scores(ctx, copies, t_s, s_state)
            s_state.advance()
            p_pipe.producer_acquire(p_state)
            fragments.store_rows(copies, fragment, ctx.smem.p_rows[None, None, p_state.index])
            if tile > 0:
                o_pipe.consumer_wait(o_state)
                o_state.advance()
            fence_before_thread_sync()
            p_pipe.producer_commit(p_state)
            p_state.advance()
        o_pipe.consumer_wait(o_state)
        fence_after_thread_sync()
        o_columns = self._output_columns(t_o)
        for i in cutlass.range(cute.size(o_columns, mode=[2]), unroll=1):
            fragment = fragments.load_columns(copies, o_columns[None, None, i])
            head_dim = self.tiling.head_dim
            self.write(ctx, copies, fragment, head_dim, i * COLUMNS)


def build_with(variant: type, config: FmhaConfig, options: str):
    """Compile a variant in the place of the product's own."""
    kernel = FmhaKernel.from_config(config)
    kernel.variant = variant(config)
    return kernel.compile(options)


build_scores = partial(build_with, ScoresKernel)  # stage A
build_identity = partial(build_with, IdentityKernel)  # stage B
