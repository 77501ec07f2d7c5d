"""Budgets of the Blackwell kernel: they hold, they are refused when they do not, they print."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dsv4.kernels.attention.sm100.plan_1cta import SUPPORTED_HEAD_DIMS, Plan1Cta
from dsv4.kernels.attention.sm100.plan_2cta import Plan2Cta

pytestmark = pytest.mark.stage("E")


@pytest.mark.parametrize("head_dim", SUPPORTED_HEAD_DIMS)
def test_budgets(head_dim: int) -> None:
    plan = Plan1Cta(head_dim)
    assert plan.smem.total_bytes <= 227 * 1024
    assert plan.tmem.used_columns <= plan.tmem.allocated_columns <= 512
    assert plan.barriers["kv"].stages >= 2 * plan.tiling.chunks, "two whole tiles in flight"
    assert plan.warps.threads * plan.registers.at_launch <= 64 * 1024


def test_head_dim_512() -> None:
    """The numbers of the released models."""
    plan = Plan1Cta(512)
    assert plan.smem.total_bytes == 1024 + 64 * 512 * 2 + 4 * 64 * 256 * 2 + 2 * 64 * 64 * 2
    tmem = plan.tmem
    assert (tmem.column("o"), tmem.column("s"), tmem.used_columns) == (0, 256, 320)


@pytest.mark.parametrize("ctas", [1, 2])
def test_arrivals(ctas: int) -> None:
    """A multicast chunk is filled anew once every CTA of the cluster has released it."""
    barriers = Plan1Cta(512, multicast_ctas=ctas).barriers
    counts = {
        edge.name: (barriers.full_arrivals(edge.name), barriers.empty_arrivals(edge.name))
        for edge in barriers.edges
    }
    assert counts == {"q": (1, 1), "kv": (1, ctas), "s": (1, 128), "p": (128, 1), "o": (1, 128)}


def test_2_ctas() -> None:
    """All of TMEM, six half tiles in flight in each CTA."""
    plan = Plan2Cta()
    assert [plan.tmem.column(name) for name in ("o", "q", "s")] == [0, 256, 384]
    assert plan.tmem.used_columns == plan.tmem.allocated_columns == 512
    assert plan.smem.total_bytes == 2048 + 6 * 64 * 256 * 2 + 2 * 64 * 64 * 2 + 128 * 32 * 4
    assert plan.warps.threads == 320 and plan.registers.at_launch == 168
    assert plan.barriers["kv"].tx_bytes == 64 * 512 * 2, "both halves of a tile"
    assert plan.barriers.full_arrivals("p") == 2 * 128, "the softmax threads of both CTAs"


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head_dim must be one of .*, got 96"):
        Plan1Cta(96)
    with pytest.raises(AssertionError, match="KV chunks fit, two tiles need 4"):
        Plan1Cta(512, p_stages=12)
    with pytest.raises(AssertionError, match="S has 3 stages, lanes hold 2"):
        Plan1Cta(64, s_stages=3)
    with pytest.raises(AssertionError, match="plan needs 264192 bytes, a CTA has 232448"):
        Plan2Cta(kv_stages=7)
    with pytest.raises(AssertionError, match="576 columns used, 512 exist"):
        Plan2Cta(s_stages=3)
    with pytest.raises(AssertionError, match="P has 3 stages, its release is also O's"):
        Plan2Cta(p_stages=3)


def test_prints_without_the_compiler() -> None:
    """One line per budget, on a machine that has neither a GPU nor CuTeDSL."""
    code = (
        "import sys; sys.modules['cutlass'] = None; sys.modules['torch'] = None\n"
        "from dsv4.kernels.attention.sm100.plan_1cta import Plan1Cta; print(Plan1Cta(512))\n"
        "from dsv4.kernels.attention.sm100.plan_2cta import Plan2Cta; print(Plan2Cta())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "320 of 512 allocated columns" in done.stdout
    assert "214016 of 232448 bytes" in done.stdout
    assert "512 of 512 allocated columns" in done.stdout
    assert "231424 of 232448 bytes" in done.stdout
