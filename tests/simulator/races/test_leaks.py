"""What a kernel leaves behind when it exits."""

import pytest

from dsv4.simulator import KernelFault
from tests.simulator.helpers.ptx import INIT_BARRIER, run_body

pytestmark = pytest.mark.stage("simulator")

_WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p6, [%r30], 0, 1000;\n@!%p6 bra W;"
_LOAD = (
    "@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d1], {0}, "
    "[%r30];\n"
)


def _leaks(body: str, **options) -> list[tuple[str, ...]]:
    return [f.places for f in run_body(body, **options).races if f.kind == "leak"]


def test_bytes_that_nothing_copies():
    expect = "@%p2 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r30], {0};\n"
    arrive = "@%p2 mbarrier.arrive.expect_tx.shared.b64 %d5, [%r30], {0};\n"
    assert _leaks(INIT_BARRIER + arrive.format(256) + _LOAD.format(256) + _WAIT) == []
    more = arrive.format(256) + _LOAD.format(256) + _WAIT + "\nbar.sync 0;\n" + expect.format(64)
    ((made, expected),) = _leaks(INIT_BARRIER + more)
    assert "mbarrier.init" in made and "mbarrier.expect_tx" in expected


def test_bulk_stores_not_waited_for():
    store = (
        "st.shared.b32 [%r4], %r1;\nfence.proxy.async.shared::cta;\nbar.sync 0;\n"
        "@%p2 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r2], 256;\n"
        "@%p2 cp.async.bulk.commit_group;\n"
    )
    assert _leaks(store + "@%p2 cp.async.bulk.wait_group.read 0;") == []
    ((place,),) = _leaks(store)
    assert "cp.async.bulk.global" in place


@pytest.mark.parametrize("schedule", ["lazy", "random"])
def test_wgmma_not_waited_for(schedule):
    product = """
    mov.b64 %d8, 0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r40, %r41, %r42, %r43}, %d8, %d8, %p2, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    """  # noqa: E501
    wait = "wgmma.wait_group.sync.aligned 0;"
    options = {"threads": 128, "schedule": schedule}
    assert _leaks(product + wait, **options) == []
    leaks = _leaks(product, **options)
    assert leaks and all("wgmma.mma_async" in place for (place,) in leaks)


def test_tensor_memory_not_deallocated():
    body = """
    @!%p1 bra DONE;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 64;
    {0}
    DONE:
    """
    free = "ld.shared.b32 %r9, [%r2];\ntcgen05.dealloc.cta_group::1.sync.aligned.b32 %r9, 64;"
    run_body(body.format(free), target="sm_100a", races=False)
    message = r"exits with TMEM columns 0\.\.64 allocated\n  at .*tcgen05\.alloc"
    with pytest.raises(KernelFault, match=message):
        run_body(body.format(""), target="sm_100a", races=False)
