"""What the warps of a CTA may see differently, and where they may not go different ways."""

import pytest
import torch

from dsv4.simulator import KernelFault
from dsv4.simulator.instructions import mbarrier
from tests.simulator.helpers.ptx import INIT_BARRIER, run_body

pytestmark = pytest.mark.stage("simulator")

# A copy lands while four warps wait at a barrier; then each tests once whether it has landed.
_TESTS = (
    INIT_BARRIER
    + """@%p2 mbarrier.arrive.expect_tx.shared.b64 %d5, [%r30], 256;
@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d1], 256, [%r30];
{between}
mbarrier.{test}.parity.shared.b64 %p6, [%r30], 0;
W: mbarrier.try_wait.parity.shared.b64 %p7, [%r30], 0;
@!%p7 bra W;
{after}
selp.u32 %r8, 1, 0, %p6;
st.global.b32 [%d2], %r8;
"""
)


def _landed(seed: int, test: str = "test_wait", between: str = "", after: str = "") -> list[bool]:
    """What each of four warps saw."""
    out = torch.full((128,), -1, dtype=torch.int32)
    body = _TESTS.format(test=test, between=between, after=after)
    report = run_body(body, threads=128, out=out, schedule="random", seed=seed)
    assert not report.races
    seen = out.reshape(4, 32)
    assert (seen == seen[:, :1]).all()
    return seen[:, 0].bool().tolist()


@pytest.mark.parametrize("test", ["test_wait", "try_wait"])
def test_warps_see_a_phase_complete_at_different_times(test, monkeypatch):
    seen = {tuple(_landed(seed, test)) for seed in range(12)}
    assert any(len(set(warps)) == 2 for warps in seen)
    assert {warps[3] for warps in seen} == {True, False}
    monkeypatch.setattr(mbarrier, "_MISSED", 1)
    assert not any(any(_landed(seed, test)) for seed in range(12))


def test_a_completion_that_the_warp_knows_of_is_never_missed(monkeypatch):
    monkeypatch.setattr(mbarrier, "_MISSED", 1)
    wait = "V: mbarrier.try_wait.parity.shared.b64 %p8, [%r30], 0;\n@!%p8 bra V;"
    told = f"@!%p1 bra TOLD;\n{wait}\nTOLD:\nbar.sync 0;"
    for seed in range(20):
        assert all(_landed(seed, between=wait))
        assert all(_landed(seed, between=told))


_FENCE = "wgmma.fence.sync.aligned;"
_PRODUCT = (
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r40, %r41, %r42, %r43}, %d8, %d8, "
    "%p9, 1, 1, 0, 0;\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
)
_BRANCHES = """
setp.lt.u32 %p9, %r5, {warps};
mov.b64 %d8, 0;
@%p9 bra ONE;
{one}
bra.uni JOIN;
ONE:
{other}
JOIN:
"""


def test_warps_of_a_warpgroup_take_the_same_wgmma():
    product = f"{_FENCE}\n{_PRODUCT}"
    for warps in (0, 4):
        run_body(
            _BRANCHES.format(warps=warps, one=product, other=product), threads=128, races=False
        )
    for one, other in ((product, product), (f"{_FENCE}\n{product}", _FENCE)):
        body = _BRANCHES.format(warps=2, one=one, other=other)
        with pytest.raises(KernelFault, match="different wgmma instructions") as caught:
            run_body(body, threads=128, races=False)
        places = str(caught.value)
        assert places.count("wgmma.fence.sync.aligned") >= 2
        assert "warp 0: " in places and "warp 2: " in places
