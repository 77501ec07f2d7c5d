"""Budgets of the Blackwell kernel: they hold, they are refused when they do not, they print."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dsv4.kernels.attention.sm100 import plan_1cta
from dsv4.kernels.attention.sm100.plan_1cta import FmhaPlan, SmemPlan, Tiling, TmemMap, WarpSchedule
from dsv4.kernels.attention.sm100.plan_2cta import PairPlan, PairSmemPlan, PairTmem, PairWarps

pytestmark = pytest.mark.stage("E")


@pytest.mark.parametrize("head_dim", plan_1cta.SUPPORTED_HEAD_DIMS)
def test_budgets(head_dim: int) -> None:
    plan = FmhaPlan(head_dim)
    assert plan.smem.total_bytes <= 227 * 1024
    assert plan.tmem.used_columns <= plan.tmem.allocated_columns <= 512
    assert plan.pipelines.kv.stages >= 2 * plan.tiling.chunks, "two whole tiles in flight"
    assert plan.warps.threads * plan.warps.register_limit <= 64 * 1024


def test_head_dim_512() -> None:
    """The numbers of the released models."""
    plan = FmhaPlan(512)
    assert plan.smem.total_bytes == 1024 + 64 * 512 * 2 + 4 * 64 * 256 * 2 + 2 * 64 * 64 * 2
    assert (plan.tmem.o_column, plan.tmem.s_column, plan.tmem.used_columns) == (0, 256, 320)


def test_pair() -> None:
    """A CTA pair: all of TMEM, six half tiles under way in each CTA."""
    plan = PairPlan()
    assert (plan.tmem.o_column, plan.tmem.q_column, plan.tmem.s_column) == (0, 256, 384)
    assert plan.tmem.used_columns == plan.tmem.allocated_columns == 512
    assert plan.smem.total_bytes == 2048 + 6 * 64 * 256 * 2 + 2 * 64 * 64 * 2 + 128 * 32 * 4
    assert plan.warps.threads == 320 and plan.warps.register_limit == 168
    assert plan.pipelines.kv.tx_bytes == 64 * 512 * 2, "both halves of a tile"
    assert plan.pipelines.p.arrivals == 2 * 128, "the softmax threads of both CTAs"


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head_dim must be one of .*, got 96"):
        FmhaPlan(96)
    with pytest.raises(AssertionError, match="KV chunks fit, two tiles need 4"):
        SmemPlan(Tiling(512), p_stages=12)
    with pytest.raises(AssertionError, match="S has 3 stages, lanes hold 2"):
        TmemMap(Tiling(64), s_stages=3)
    with pytest.raises(AssertionError, match="warp ids must be dense"):
        WarpSchedule(mma=5)
    with pytest.raises(AssertionError, match="plan needs 264192 bytes, a CTA has 232448"):
        PairSmemPlan(kv_stages=7)
    with pytest.raises(AssertionError, match="576 columns used, 512 exist"):
        PairTmem(s_stages=3)
    with pytest.raises(AssertionError, match="TMEM needs 4 query warps in order, got lanes"):
        PairWarps(query=(5, 6, 7, 8), mma=4)


def test_prints_without_the_compiler() -> None:
    """One line per budget, on a machine that has neither a GPU nor CuTeDSL."""
    code = (
        "import sys; sys.modules['cutlass'] = None; sys.modules['torch'] = None\n"
        "from dsv4.kernels.attention.sm100.plan_1cta import FmhaPlan; print(FmhaPlan(512))\n"
        "from dsv4.kernels.attention.sm100.plan_2cta import PairPlan; print(PairPlan())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "320 of 512 allocated columns" in done.stdout
    assert "214016 of 232448 bytes" in done.stdout
    assert "512 of 512 allocated columns" in done.stdout
    assert "231424 of 232448 bytes" in done.stdout
