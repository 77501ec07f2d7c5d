"""Attention over codes for Blackwell (sm_100a): INT8 or FP8 scores, FP8 or fp16 weights and values;
or all in FP4.

    load      queries; tiles of keys and values -> rings (TMA)
    softmax   two warpgroups, 128 queries each: codes of queries; weights of scores, a row a thread;
              sums scaled; outputs
    mma       scores of codes, sums of weighted values, in Tensor Memory

While one warpgroup computes weights, the products of the other run.
`print(AttentionPlanSm100(128))` shows the budgets and the barrier graph; docs/design/lowp.md what
the numbers mean.
"""

from __future__ import annotations

import cutlass
from cutlass import cute
from cutlass.experimental.cuda.tensor_map import TensorMap

from dsv4.kernels.kit import mbarrier, pdl
from dsv4.kernels.kit.args import compile_kernel
from dsv4.kernels.lowp.args import ATTENTION_ARGS, values
from dsv4.kernels.lowp.attention import Attention
from dsv4.kernels.lowp.config import QuantizedAttentionConfig
from dsv4.kernels.lowp.sm100.context import AttentionContext, allocate, tmem_start
from dsv4.kernels.lowp.sm100.fp4_mma_warp import Fp4MmaWarp
from dsv4.kernels.lowp.sm100.fp4_plan import Fp4Plan
from dsv4.kernels.lowp.sm100.fp4_softmax_warps import Fp4SoftmaxWarps
from dsv4.kernels.lowp.sm100.mma_warp import MmaWarp
from dsv4.kernels.lowp.sm100.plan import AttentionPlanSm100
from dsv4.kernels.lowp.sm100.softmax_warps import SoftmaxWarps
from dsv4.kernels.lowp.work import Operands


class AttentionSm100(Attention):
    """Kernel of one configuration."""

    def __init__(self, config: QuantizedAttentionConfig):
        is_fp4 = config.qk == "nvfp4"
        plan = Fp4Plan if is_fp4 else AttentionPlanSm100
        super().__init__(config, plan.of(config, self.lanes_per_warp))
        self.mma = (Fp4MmaWarp if is_fp4 else MmaWarp)(self.plan)
        self.softmax = (Fp4SoftmaxWarps if is_fp4 else SoftmaxWarps)(config, self.plan)

    @cute.kernel
    def kernel(
        self,
        maps: tuple[cutlass.GridConstant[TensorMap], ...],  # queries, keys, values, smoothed keys
        operands: Operands,
    ):
        """Initialise, then send every warp to its role."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem, pipes, holder = allocate(plan)
        if warp == 0:
            with cute.arch.elect_one():
                mbarrier.init(plan.barriers, vars(pipes))
            cute.arch.mbarrier_init_fence()
            cute.arch.alloc_tmem(plan.tmem.allocated_columns, holder)
        cute.arch.sync_threads()
        ctx = AttentionContext(operands, self.tiles, smem, pipes, tmem_start(holder))
        pdl.launch_dependents()
        # One `if` a role: the compiler fails on chains of them.
        if warp >= plan.warps["mma"].first:
            cute.arch.setmaxregister_decrease(plan.registers["mma"])
            if warp == plan.warps["mma"].first:
                pdl.wait_for_previous_launch()
                self.mma.multiply(ctx)
            if warp == plan.warps["load"].first:
                pdl.wait_for_previous_launch()
                self.loader.load(ctx, *maps)
        if warp < plan.warps["mma"].first:
            cute.arch.setmaxregister_increase(plan.registers["softmax"])
            pdl.wait_for_previous_launch()
            self.softmax.compute(ctx, warp)


def build(config: QuantizedAttentionConfig, options: str = ""):
    """Compile the kernel of `config` for sm_100a; needs no GPU."""
    return compile_kernel(AttentionSm100(config), ATTENTION_ARGS, values(config), options)
