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
from dsv4.kernels.attention.sm100.fmha_1cta import FmhaSingle
from dsv4.kernels.attention.sm100.plan_1cta import KEYS
from dsv4.kernels.attention.sm100.work_tile import (
    COLUMNS,
    CONSUMER,
    PRODUCER,
    TMEM_UNUSED,
    hand_over_tmem,
    keys_of,
    take_over_tmem,
)


class StageKernel(FmhaSingle):
    """Gives the softmax warps what they share: TMEM views, and a way to write 64 columns."""

    @cute.jit
    def softmax_warps(self, operands, work, pipes, smem, tmem):
        keys = keys_of(self.config, operands, work)
        tmem.allocate(self.tmem.allocated_columns)
        tmem.wait_for_alloc()
        address = tmem.retrieve_ptr(Float32)
        t_s, t_o = self._tmem_views(address)
        copies = fragments.make_copies(t_s[(None, None), 0, 0, 0])
        self.stage(operands, work, keys, pipes, smem, copies, t_s, t_o)
        hand_over_tmem()
        pipeline.NamedBarrier(TMEM_UNUSED, self.warps.softmax_threads).arrive_and_wait()
        take_over_tmem()
        tmem.relinquish_alloc_permit()
        tmem.free(address)

    @cute.jit
    def write(self, operands, work, copies, fragment, columns, first_column):
        """Write (64, 64) columns at `first_column` of rows that are `columns` wide."""
        heads = self._rows_of_thread(work)
        rows = fragments.by_rows(fragment)
        for row in cutlass.range_constexpr(2):
            if heads[row] < self.config.num_query_heads:
                index = work.token * self.config.num_query_heads + heads[row]
                for i in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                    column = first_column + i // 2 * 8 + copies.thread % 4 * 2 + i % 2
                    operands.workspace[index * columns + column] = rows[row, i]


class ScoresKernel(StageKernel):
    """Stage A: S = Q K^T into TMEM and out, one column per key of every tile."""

    @cute.jit
    def mma_warp(self, operands, work, pipes, smem, tmem):
        kv = pipes.kv
        keys = keys_of(self.config, operands, work)
        tmem.wait_for_alloc()
        t_s, _ = self._tmem_views(tmem.retrieve_ptr(Float32))
        kv_full = pipeline.make_pipeline_state(CONSUMER, self.edges.kv.stages)
        kv_done = pipeline.make_pipeline_state(CONSUMER, self.edges.kv.stages)
        s_state = pipeline.make_pipeline_state(PRODUCER, self.edges.s.stages)
        pipes.q.consumer_wait(pipeline.make_pipeline_state(CONSUMER, 1))
        for _ in cutlass.range(keys.last - keys.first, unroll=1):
            kv_full, s_state = self._qk(pipes, smem, t_s, kv_full, s_state)
            for _ in cutlass.range_constexpr(self.tiling.chunks):
                kv.consumer_release(kv_done)
                kv_done.advance()

    @cute.jit
    def stage(self, operands, work, keys, pipes, smem, copies, t_s, t_o):
        s_state = pipeline.make_pipeline_state(CONSUMER, self.edges.s.stages)
        for tile in cutlass.range(keys.last, unroll=1):
            fragment = self._load_scores(pipes, copies, t_s, s_state)
            s_state.advance()
            self.write(operands, work, copies, fragment, keys.last * KEYS, tile * KEYS)


class IdentityKernel(StageKernel):
    """Stage B: O = bf16(Q K^T) V, the softmax left out."""

    @cute.jit
    def stage(self, operands, work, keys, pipes, smem, copies, t_s, t_o):
        p_pipe, o_pipe = pipes.p, pipes.o
        s_state = pipeline.make_pipeline_state(CONSUMER, self.edges.s.stages)
        p_state = pipeline.make_pipeline_state(PRODUCER, self.edges.p.stages)
        o_state = pipeline.make_pipeline_state(CONSUMER, 1)
        for tile in cutlass.range(keys.last, unroll=1):
            fragment = self._load_scores(pipes, copies, t_s, s_state)
            s_state.advance()
            p_pipe.producer_acquire(p_state)
            fragments.store_rows(copies, fragment, smem.p_rows[None, None, p_state.index])
            if tile > 0:
                o_pipe.consumer_wait(o_state)
                o_state.advance()
            hand_over_tmem()
            p_pipe.producer_commit(p_state)
            p_state.advance()
        o_pipe.consumer_wait(o_state)
        take_over_tmem()
        o_columns = self._output_columns(t_o)
        for i in cutlass.range(cute.size(o_columns, mode=[2]), unroll=1):
            fragment = fragments.load_columns(copies, o_columns[None, None, i])
            head_dim = self.tiling.head_dim
            self.write(operands, work, copies, fragment, head_dim, i * COLUMNS)


def build_with(arrangement: type, config: FmhaConfig, options: str):
    """Compile an arrangement in the place of the product's own."""
    kernel = FmhaKernel.from_config(config)
    kernel.arrangement = arrangement(config)
    return kernel.compile(options)


build_scores = partial(build_with, ScoresKernel)  # stage A
build_identity = partial(build_with, IdentityKernel)  # stage B
