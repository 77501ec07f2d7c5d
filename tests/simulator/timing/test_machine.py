"""The tensor pipe of the model against the published table, measured as a microbenchmark would."""

from __future__ import annotations

import pytest

from dsv4.simulator.frontend.ptx_text import single_launch
from dsv4.simulator.timing import B200, predict
from dsv4.simulator.timing.machine import TCGEN05_MMA
from tests.simulator.timing.mma_kernel import SHARED_BYTES, mma_kernel

pytestmark = pytest.mark.stage("simulator")

# tcgen05.mma on a B200: (CTAs, M, N) -> cycles per instruction and latency of a single one, with A
# in shared memory, then in TMEM. SemiAnalysisAI/microbench-blackwell 9a068d8.
PUBLISHED = {
    (1, 64, 64): (32.0, 152, 32.0, 136),
    (1, 64, 128): (64.0, 184, 64.0, 168),
    (1, 64, 256): (128.0, 248, 128.0, 232),
    (1, 128, 64): (48.0, 168, 32.0, 136),
    (1, 128, 96): (56.0, 184, 48.0, 152),
    (1, 128, 128): (64.0, 200, 64.0, 168),
    (1, 128, 256): (128.0, 264, 128.0, 232),
    (2, 128, 64): (25.0, 173, 18.0, 162),
    (2, 128, 128): (32.0, 197, 32.0, 178),
    (2, 128, 256): (64.0, 229, 64.0, 210),
    (2, 256, 64): (43.0, 202, 32.0, 170),
    (2, 256, 128): (64.0, 234, 64.0, 202),
    (2, 256, 256): (128.0, 298, 128.0, 266),
}
FEW, MANY = 16, 48  # enough that issuing them is not what takes the time


def microbenchmark(ctas: int, m: int, n: int, a_in_tmem: bool, count: int) -> float:
    """Cycles from the first MMA until the waiting warp goes on."""
    simulation = single_launch(
        mma_kernel(ctas, m, n, a_in_tmem, count),
        "mma",
        grid=(ctas, 1, 1),
        cluster=(ctas, 1, 1),
        block=(32, 1, 1),
        shared=SHARED_BYTES + 1024,
        params=(),
    )
    spans = predict(simulation).launches[0].spans
    tensor = [span for span in spans if span.track == "SM 0 tensor pipe"]
    waits = [span for span in spans if "warp 0" in span.track and "mbarrier" in span.name]
    assert len(tensor) == count
    return max(span.stop for span in waits) - tensor[0].start


@pytest.mark.parametrize("a_in_tmem", [False, True], ids=["SS", "TS"])
@pytest.mark.parametrize("shape", PUBLISHED, ids=lambda s: "x".join(map(str, s)))
def test_published_mma_table(shape, a_in_tmem):
    cycles, latency = PUBLISHED[shape][2 * a_in_tmem : 2 * a_in_tmem + 2]
    single = microbenchmark(*shape, a_in_tmem, 1)
    slope = microbenchmark(*shape, a_in_tmem, MANY) - microbenchmark(*shape, a_in_tmem, FEW)
    assert slope / (MANY - FEW) == pytest.approx(cycles, rel=0.02)
    assert single == pytest.approx(latency, rel=0.02)


def test_table_is_the_published_one():
    assert TCGEN05_MMA == PUBLISHED


def test_other_shapes_scale_but_never_beat_the_operand_reads():
    cycles, _ = B200.tcgen05_mma(1, 128, 16, False)
    assert cycles == (128 + 16) * 32 / 128
    assert B200.tcgen05_mma(1, 128, 192, True)[0] == pytest.approx(96)
