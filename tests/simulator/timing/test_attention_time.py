"""The model's time of the attention kernels: against an H200's measurements, and in itself."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from dsv4.cli import sim_table
from dsv4.cli.sim_attention import Workload, compile_attention, make_timing_call
from dsv4.simulator.api import Simulation
from dsv4.simulator.timing import B200, LaunchPrediction, predict, timeline
from dsv4.simulator.timing.recorder import record
from dsv4.simulator.timing.trace import BulkLoad, LaunchTrace, Multiply
from dsv4.testing.attention import Case
from tests.simulator.timing.bounds import check_errors, check_means

pytestmark = pytest.mark.stage("simulator")

# Figures of one H200, as BENCHMARKS.md reports them.
MEASURED = Path(__file__).parent / "h200_attention.json"
# Shapes that the default suite looks at: few heads, whose kernel is compiled in seconds.
QUICK = (("Flash/8", 64),)
BLACKWELL = Workload("sm_100a", Case.decode(1, heads=64, top_k=512), num_splits=1)


@cache
def blackwell() -> Simulation:
    return Simulation.of_compiled(compile_attention(BLACKWELL).function)


@cache
def blackwell_launch() -> LaunchPrediction:
    call = make_timing_call(BLACKWELL, seed=0)
    return predict(blackwell(), *call.args, **call.options).launches[0]


@cache
def blackwell_trace() -> LaunchTrace:
    call = make_timing_call(BLACKWELL, seed=0)
    return record(blackwell(), call.args, call.options, lambda count: [0])[0]


def check(subjects: list[sim_table.Subject]) -> None:
    """Every shape within the bound; the message lists all errors."""
    check_errors({str(row.subject.workload): row.error for row in sim_table.rows(subjects)})


def test_h200_quick():
    subjects = sim_table.measured_subjects("sm_90a", MEASURED)
    quick = [s for s in subjects if (s.name, s.workload.case.tokens) in QUICK]
    assert len(quick) == len(QUICK)
    check(quick)


@pytest.mark.slow
def test_h200_every_measured_shape():
    subjects = sim_table.measured_subjects("sm_90a", MEASURED)
    errors = {str(row.subject.workload): row.error for row in sim_table.rows(subjects)}
    check_errors(errors)
    check_means(errors)


def test_trace_counts_what_the_kernel_does():
    cluster = blackwell_trace().clusters[0]
    events = [e for warp in cluster.warps for _, events in warp.blocks for e in events]
    tiles, row = 640 // 64, 2 * 512
    products = [e for e in events if isinstance(e, Multiply)]
    # 64 x 64 scores take 32 steps of K = 16, two chunks of 256 columns 4 steps each.
    assert len([e for e in products if e.n == 64]) == 32 * tiles
    assert len([e for e in products if e.n == 256]) == 8 * tiles
    loaded = sum(e.size for e in events if isinstance(e, BulkLoad))
    assert loaded == (64 + 640) * row  # Q and every key once


def test_the_model_accounts_for_the_tensor_pipe():
    """4096 cycles per 128 keys at M = 64, whatever else happens."""
    launch = blackwell_launch()
    assert launch.busy["tensor pipe"] == pytest.approx(4096 * 5)
    assert launch.cycles > launch.busy[launch.critical_unit]


def test_more_tokens_than_multiprocessors_take_another_wave():
    call = make_timing_call(Workload("sm_100a", Case.decode(149, 64, 512), num_splits=1), seed=0)
    launch = predict(blackwell(), *call.args, **call.options).launches[0]
    assert launch.waves == 2
    assert launch.cycles > 1.3 * blackwell_launch().cycles


def test_perfetto_timeline(tmp_path):
    launch, path = blackwell_launch(), tmp_path / "timeline.json"
    timeline.write_perfetto(path, launch, B200)
    trace = json.loads(path.read_text())
    assert trace["otherData"]["model"] == "B200"
    events = trace["traceEvents"]
    check_trace_events(events)
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes and all("model" in name for name in processes)
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(launch.spans)
    tensor = [e for e in slices if e["name"].startswith("1 CTA 64x")]
    busy = sum(e["dur"] for e in tensor)
    assert busy == pytest.approx(B200.microseconds(launch.busy["tensor pipe"]))
    assert max(e["ts"] + e["dur"] for e in tensor) <= B200.microseconds(launch.cycles)


def check_trace_events(events: list[dict]) -> None:
    """What the viewer needs of the trace event format: named rows, and slices of a row that do not
    overlap, which it would drop."""
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    ends: dict[tuple, float] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        row = event["pid"], event["tid"]
        assert row in named and all(isinstance(number, int) for number in row)
        assert event["cat"] == "model" and event["name"]
        assert event["ts"] >= ends.get(row, 0) - 1e-6 and event["dur"] >= 0, event
        ends[row] = event["ts"] + event["dur"]
    assert {e["ph"] for e in events} == {"M", "X"}


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "timeline.png"
    timeline.write_plot(path, blackwell_launch(), B200)
    written = path.read_bytes()
    assert written.startswith(b"\x89PNG\r\n\x1a\n") and written.endswith(b"IEND\xaeB`\x82")
    width, height = (int.from_bytes(written[at : at + 4], "big") for at in (16, 20))
    assert width > 1000 and height > 300


def test_other_json_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"results": [{"time": 1}]}')
    with pytest.raises(ValueError, match="--measured"):
        sim_table.measured_subjects("sm_90a", path)
