"""Planning objects: what they derive, what they refuse, how they print."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dsv4.kernels.kit.plan import (
    Arrival,
    Arrive,
    BarrierGraph,
    Buffer,
    Edge,
    Registers,
    SmemPlan,
    TmemPlan,
    Warps,
)

pytestmark = pytest.mark.stage("E")

# A Hopper-like CTA: four warpgroups, one of them for what needs few registers.
WARPS = Warps.of(score=4, output=8, load=1, keys=1, prefetch=1, spare=1)
LOADERS = {"load": 24, "keys": 24, "prefetch": 24, "spare": 24}


def edge(name: str, producers, consumers, **options) -> Edge:
    def side(arrivals):
        return arrivals if isinstance(arrivals, tuple) else (arrivals,)

    return Edge(name, name.upper(), side(producers), side(consumers), **options)


def graph(lanes_per_warp: int = 1) -> BarrierGraph:
    by_warp = {role.name: Arrival(role.name, Arrive.WARP) for role in WARPS.roles}
    freed = Arrival("output", Arrive.WARP, warps=4, factor="slices")
    return BarrierGraph(
        WARPS,
        (
            edge("kv", Arrival("load", Arrive.TMA), freed, stages=6, tx_bytes=32768),
            edge(
                "work",
                Arrival("keys", Arrive.LANE),
                (by_warp["load"], by_warp["score"], by_warp["output"]),
            ),
            edge("p", Arrival("score", Arrive.THREAD), Arrival("output", Arrive.MMA, ctas=2)),
            edge("turn", by_warp["score"], by_warp["output"], stages=2, is_signal=True),
        ),
        lanes_per_warp,
    )


def test_warps_follow_each_other() -> None:
    assert list(WARPS["output"].warps) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert (WARPS["keys"].first, WARPS["keys"].first_thread, WARPS.threads) == (13, 416, 512)
    assert WARPS["score"].is_warpgroup and not WARPS["output"].is_warpgroup
    assert not Warps.of(load=1, softmax=4)["softmax"].is_warpgroup, "starts at warp 1"
    with pytest.raises(KeyError, match="no role mma; there are score, output, load"):
        WARPS["mma"]


def test_registers() -> None:
    assert Registers.of(WARPS, score=152, output=168, **LOADERS)["output"] == 168
    assert Registers.of(Warps.of(a=6)).at_launch == 255
    assert Registers.of(Warps.of(a=10)).at_launch == 168
    with pytest.raises(AssertionError, match="520 for a lane of each warpgroup, 512 exist"):
        Registers.of(WARPS, score=160, output=168, **LOADERS)
    with pytest.raises(
        AssertionError, match=r"warps 12-15 are a warpgroup, got \[24, 24, 32, 24\]"
    ):
        Registers.of(WARPS, score=152, output=160, **LOADERS | {"prefetch": 32})
    with pytest.raises(AssertionError, match="score must have a multiple of 8 from 24 to 256"):
        Registers.of(WARPS, score=150, output=160, **LOADERS)
    with pytest.raises(AssertionError, match=r"registers: for \['score'\] of"):
        Registers.of(WARPS, score=152)


def test_smem_places_buffers_as_they_are_aligned() -> None:
    head = (Buffer("barriers", "Int64", 3), Buffer("address", "Int32", 1))
    plan = SmemPlan((*head, Buffer("q", "BFloat16", 100, 1024), Buffer("row", "Float32", 1)))
    offsets = [plan.offset(buffer.name) for buffer in plan.buffers]
    assert offsets == [0, 24, 1024, 1224]
    assert plan.total_bytes == 2048, "a multiple of the largest alignment"
    assert plan.free_bytes == 227 * 1024 - 2048
    assert plan["q"].bytes == 200
    with pytest.raises(AssertionError, match="plan needs 2048 bytes, a CTA has 1536"):
        SmemPlan(plan.buffers, capacity=1536)
    with pytest.raises(AssertionError, match="buffer names must differ"):
        SmemPlan((*head, head[0]))
    with pytest.raises(KeyError, match="no buffer p; there are barriers, address"):
        plan["p"]


def test_tmem_is_allocated_in_powers_of_two() -> None:
    plan = TmemPlan((("o", 256), ("s", 64)))
    assert (plan.column("o"), plan.column("s")) == (0, 256)
    assert (plan.used_columns, plan.allocated_columns) == (320, 512)
    assert TmemPlan((("s", 16),)).allocated_columns == 32
    with pytest.raises(AssertionError, match="576 columns used, 512 exist"):
        TmemPlan((("o", 512), ("s", 64)))


@pytest.mark.parametrize("lanes", [1, 32])
def test_arrivals_are_derived(lanes: int) -> None:
    barriers = graph(lanes)
    assert barriers.full_arrivals("kv") == 1
    assert barriers.empty_arrivals("kv", slices=2) == 8 * lanes
    assert barriers.empty_arrivals("work") == 13 * lanes
    assert (barriers.full_arrivals("p"), barriers.empty_arrivals("p")) == (128, 2)
    counts = list(barriers.initial_counts("kv", slices=1))
    assert counts[:3] == [(0, 1), (6, 4 * lanes), (1, 1)] and len(counts) == 12
    assert list(barriers.initial_counts("turn")) == [(0, 4 * lanes), (1, 4 * lanes)]
    assert [buffer.count for buffer in barriers.buffers] == [12, 2, 2, 2]


def test_graphs_that_cannot_be_are_refused() -> None:
    load, score = Arrival("load", Arrive.TMA), Arrival("score", Arrive.WARP)
    with pytest.raises(KeyError, match="no role mma"):
        BarrierGraph(WARPS, (edge("s", Arrival("mma", Arrive.MMA), score),))
    with pytest.raises(AssertionError, match="edge names must differ"):
        BarrierGraph(WARPS, (edge("q", load, score), edge("q", load, score)))
    with pytest.raises(AssertionError, match="nothing adds bytes to p"):
        BarrierGraph(WARPS, (edge("p", score, load, tx_bytes=64),))
    with pytest.raises(AssertionError, match="5 warps of score arrive, it has 4"):
        BarrierGraph(WARPS, (edge("q", load, Arrival("score", Arrive.WARP, warps=5)),))
    with pytest.raises(AssertionError, match="turn is a signal"):
        graph().empty_arrivals("turn")
    with pytest.raises(KeyError, match="slices"):
        graph().empty_arrivals("kv")


def test_prints_without_the_compiler() -> None:
    """On a machine that has neither a GPU nor CuTeDSL."""
    code = (
        "import sys; sys.modules['cutlass'] = None; sys.modules['torch'] = None\n"
        "from tests.kernels.kit.test_plan import graph; print(graph())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kv = next(line for line in done.stdout.splitlines() if line.startswith("kv"))
    assert "load (TMA) -> output (warps)" in kv and "4 x slices" in kv and "32768" in kv
