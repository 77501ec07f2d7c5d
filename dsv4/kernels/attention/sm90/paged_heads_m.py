"""Heads-in-M attention kernel of Hopper over a paged cache: the gather is part of the launch.

The kernel of `heads_m` with another source of keys: a warpgroup gathers the rows that a token's
index lists, or its request's page tables, name:

    gather warpgroup   key spans, Q (TMA), rows of pages -> shared memory
    score warpgroup    S = Q K^T, softmax, P -> shared memory, one key tile ahead of
    output warpgroups  O += P V, each over half of the columns

`print(PagedHeadsMPlan(512))` shows the budgets and the barrier graph.
"""

from dataclasses import replace
from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass.experimental.cuda.tensor_map import TensorMap

from dsv4.kernels.attention.paged_context import PagedArguments
from dsv4.kernels.attention.paged_keys import PagedKeys
from dsv4.kernels.attention.paged_plan import may_round_rows
from dsv4.kernels.attention.sm90.heads_m import FmhaHeadsM
from dsv4.kernels.attention.sm90.heads_m_codes import CodesEpilogue
from dsv4.kernels.attention.sm90.heads_m_codes_combine import CodesCombine
from dsv4.kernels.attention.sm90.heads_m_combine import HeadsMCombine
from dsv4.kernels.attention.sm90.heads_m_context import HeadsMContext, allocate
from dsv4.kernels.attention.sm90.heads_m_epilogue import Epilogue
from dsv4.kernels.attention.sm90.heads_m_gather import GatherWarpgroup
from dsv4.kernels.attention.sm90.heads_m_tiling import HeadsMTiling
from dsv4.kernels.attention.sm90.paged_output import PagedOutputWarpgroups
from dsv4.kernels.attention.sm90.paged_score import PagedScoreWarpgroup
from dsv4.kernels.attention.sm90.plan import PagedHeadsMPlan
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.mbarrier import FencedRing
from dsv4.kernels.kit.scheduler import DynamicTailScheduler, Throttle


class Operands(NamedTuple):
    """Operands of a launch, beside the TMA descriptors."""

    keys: PagedKeys
    q_factor: cute.Tensor  # [T, n_h] fp32, or [0, n_h]: 1; or squares: see `PagedArguments`
    rope: cute.Tensor  # [positions, 64] fp32, or [0, 64]: none
    sink_logits: cute.Tensor
    o: cute.Tensor
    lse: cute.Tensor
    max_logits: cute.Tensor
    workspace: cute.Tensor
    tiling: HeadsMTiling
    tail_scheduler: DynamicTailScheduler
    rounded: tuple[cute.Tensor, ...]  # codes and their scales, where the output becomes those


class PagedHeadsM(FmhaHeadsM):
    """Attention of any number of heads over the pages of two pools (sm_90a)."""

    scorer_type, outputs_type = PagedScoreWarpgroup, PagedOutputWarpgroups

    @property
    def has_pieces(self) -> bool:
        return self.config.batch_invariant

    def _make_plan(self) -> PagedHeadsMPlan:
        is_fp8 = self.config.kv_format == "fp8"
        return PagedHeadsMPlan(self.config.head_dim, self.lanes_per_warp, is_fp8)

    def _make_loader(self) -> GatherWarpgroup:
        is_gate = self.config.sink_mode == "swa_gate"
        return GatherWarpgroup(self.plan, self.has_even_tiles, is_gate)

    def _make_epilogue(self) -> Epilogue:
        epilogue = CodesEpilogue if may_round_rows(self.config, "sm_90a") else Epilogue
        return epilogue(self.config.num_query_heads, self.plan)

    def _make_combine(self) -> HeadsMCombine:
        if may_round_rows(self.config, "sm_90a") and not self.has_pieces:
            return CodesCombine(self.config, self.plan)
        return super()._make_combine()

    # ---- host ----

    def _key_maps(self, arguments: PagedArguments) -> tuple[()]:
        return ()

    def _operands(self, arguments: PagedArguments, tiling: HeadsMTiling) -> Operands:
        tail_scheduler = self._tail_scheduler(arguments, tiling)
        rounded = ()
        if self.config.rounds_output:
            rounded = arguments.codes, arguments.code_scales
        return Operands(
            arguments.keys(),
            arguments.q_factor,
            arguments.rope,
            arguments.sink_logits,
            arguments.o,
            arguments.lse,
            arguments.max_logits,
            arguments.workspace,
            tiling,
            tail_scheduler,
            rounded,
        )

    # ---- device ----

    @cute.kernel
    def kernel(
        self,
        maps: tuple[
            cutlass.GridConstant[TensorMap],  # q
            cutlass.GridConstant[TensorMap],  # o
        ],
        operands: Operands,
        is_plain: cutlass.Constexpr,  # neither splits nor column slices
    ):
        """The work tiles of a CTA."""
        self.run(maps, operands, is_plain)

    def _throttle(self, is_plain: bool) -> Throttle:
        return Throttle.NONE

    def _allocate(self) -> tuple:
        smem, pipes = allocate(self.plan)
        if not self.plan.is_fp8:
            pipes = replace(pipes, kv=FencedRing(**vars(pipes.kv)))
        return smem, pipes

    def _is_load(self, group) -> cutlass.Boolean:
        return group >= self.plan.warps["gather"].first // 4

    @cute.jit
    def _load(self, ctx: HeadsMContext, warp, maps: tuple):
        registers = self.plan.registers
        if cutlass.const_expr(registers["gather"] < registers.at_launch):
            cute.arch.setmaxregister_decrease(registers["gather"])
        pdl.launch_dependents()
        self.loader.gather(ctx, maps[0], ctx.operands.keys)
