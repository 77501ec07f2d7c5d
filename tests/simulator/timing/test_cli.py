"""`dsv4 sim` as a user meets it."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest

from dsv4 import simulator
from dsv4.cli import sim, sim_attention
from dsv4.cli.main import build_parser, main
from dsv4.cli.sim_kernels import KERNELS
from dsv4.cli.sim_status import CHECK_FAILED, NOT_COVERED
from dsv4.ops.runtime.registry import OPS
from dsv4.simulator.timing import MACHINES, LaunchPrediction, timeline
from dsv4.simulator.timing.engine import Span

pytestmark = pytest.mark.stage("simulator")


SMALL = (
    *("--heads", "8", "--head-dim", "64", "--top-k", "70", "--window", "20"),
    *("--tokens", "2", "--num-splits", "1"),
)
# In the simulator or in the compiler; the 1-CTA kernel shows what the others do.
SLOW = (
    "attention, 1-CTA",
    "attention, 2-CTA",
    "attention, heads in M",
    "attention, swap-AB",
    "paged attention",
    "paged FP8 attention",
    "mixture of experts",
    "FP8 linear",
    "merged linear",
    "grouped linear",
    "plain linear",
    "best rows of a linear",
    "rows of latents",
    "indices of a step",
    "sampler",
    "mHC seam",
    "quantised attention",
    "indexer",
    "compressor",
)
# Of kernels that are the same on both architectures, one is enough.
SLOW_THERE = (("insertion into pages", "sm_90a"),)
_compile = functools.cache(sim_attention.compile_attention)


@pytest.fixture(autouse=True)
def compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One compilation serves every test."""
    monkeypatch.setattr(sim_attention, "compile_attention", _compile)


def run(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()  # what fixtures have printed
    status = main(["sim", "attention", *arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_json_report_with_races_and_timeline(capsys, seed, tmp_path):
    timeline, sarif = tmp_path / "timeline.json", tmp_path / "findings.sarif"
    extra = ["--json", "--seed", str(seed), "--timeline", str(timeline), "--sarif", str(sarif)]
    status, out, _ = run(capsys, *SMALL, *extra)
    found = json.loads(out)
    # Correct and free of races, but one decode step does not reach all synchronisation.
    assert status == NOT_COVERED and found["correct"], (seed, found)
    assert found["races"] == []
    assert [line.endswith("in Fmha1Cta") for line in found["synchronisation_never_reached"]] == [
        True
    ]
    kernel = found["kernels"][0]
    assert kernel["kernel"] == "Fmha1Cta" and kernel["grid"] == [2, 1, 1]
    assert 0 < kernel["registers"] <= 255 and kernel["spill_bytes"] == 0
    assert kernel["shared_memory"] > 0 and kernel["tmem_columns"] >= 32
    assert found["model"] == "B200" and found["model_microseconds"] > 1
    assert json.loads(timeline.read_text())["traceEvents"]
    results = json.loads(sarif.read_text())["runs"][0]["results"]
    assert {result["level"] for result in results} == {"warning"}


def test_alone_it_lists_every_kernel(capsys):
    """Those of both architectures that the registry knows, each with a command that parses."""
    assert main(["sim"]) == 0
    printed = capsys.readouterr().out
    assert {kernel.arch for kernel in KERNELS} == set(MACHINES)
    for kernel in KERNELS:
        assert kernel.name in printed and kernel.command in printed
        arguments = build_parser().parse_args(kernel.command.split()[1:])
        # A family with kernels for one architecture has no choice of it.
        assert getattr(arguments, "arch", kernel.arch) == kernel.arch


def test_every_operator_with_a_kernel_is_in_the_list():
    listed = {(name, kernel.arch) for kernel in KERNELS for name in OPS if name in kernel.serves}
    assert listed == {(op, arch) for op in OPS for arch in OPS[op].kernels if arch in MACHINES}


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(kernel, id=f"{kernel.name}-{kernel.arch}", marks=marks)
        for kernel in KERNELS
        for is_slow in [kernel.name.startswith(SLOW) or (kernel.name, kernel.arch) in SLOW_THERE]
        for marks in [pytest.mark.slow if is_slow else ()]
    ],
)
def test_listed_commands_reach_every_synchronisation(capsys, seed, kernel):
    status = main([*kernel.command.split()[1:], "--seed", str(seed)])
    printed = capsys.readouterr()
    assert status == 0, printed.out + printed.err


def test_table_never_claims_an_unmade_race_check(capsys):
    status, out, _ = run(capsys, *SMALL, "--no-races", "--schedule", "lazy")
    assert status == 0
    line = next(line for line in out.splitlines() if "races" in line)
    assert "not checked" in line
    assert "B200 model" in out and "prediction" in out
    assert "dark where a unit works or a warp waits" in out
    assert any("tensor pipe" in line and "█" in line for line in out.splitlines()), out


def test_lines_of_the_timeline():
    """Units first; a step is as dark as the part of it that spans cover."""
    spans = [
        Span("SM 0 CTA 0 warp 4", "wait for kv", 0.0, 16.0, 0),
        Span("SM 0 TMA", "copy", 0.0, 32.0, 0),
        Span("SM 0 TMA", "copy", 16.0, 48.0, 0),
        Span("SM 0 tensor pipe", "mma", 63.75, 64.0, 0),
    ]
    launch = LaunchPrediction("kernel", 1, 1, 64.0, 1.0, {}, {}, spans)
    _, *lines = timeline.text_lines(launch, MACHINES["sm_100a"])
    assert lines == [
        "SM 0 TMA          |" + "█" * 48 + " " * 16 + "|",
        "SM 0 tensor pipe  |" + " " * 63 + "░|",
        "SM 0 CTA 0 warp 4 |" + "█" * 16 + " " * 48 + "|",
    ]
    assert timeline.text_lines(replace(launch, spans=[]), MACHINES["sm_100a"]) == []


def test_a_wrong_result_fails(capsys, monkeypatch):
    real = sim_attention.Verdict.of

    def of_other_keys(call, inputs):
        """The oracle sees other keys than the kernel did."""
        return real(call, inputs.replaced(compressed_kv=inputs.compressed_kv.roll(1, -1)))

    monkeypatch.setattr(sim_attention.Verdict, "of", of_other_keys)
    status, out, _ = run(capsys, *SMALL, "--no-races")
    assert status == CHECK_FAILED
    assert "WRONG" in out


def test_a_fault_of_the_kernel_fails(capsys, monkeypatch):
    def deadlock(*_, **__):
        raise simulator.Deadlock("no warp can make progress:\n  warp 0 waits for barrier 1")

    monkeypatch.setattr(simulator, "simulate", deadlock)
    status, _, err = run(capsys, *SMALL)
    assert status == CHECK_FAILED
    assert "Deadlock" in err and "barrier 1" in err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--heads", "0"], "--heads: got 0"),
        (["--tokens", "-1"], "--tokens: got -1"),
        (["--top-k", "0", "--window", "0"], "nothing to attend to"),
        (["--num-splits", "0"], "--num-splits: got 0"),
        (["--head-dim", "100"], "--head-dim: got 100"),
        (["--measured", "x.json"], "--model-table"),
        (["--model-table", "--json"], "--model-table"),
        (["--model-table", "--measured", "/nowhere.json"], "/nowhere.json"),
    ],
)
def test_errors_are_one_line(capsys, arguments, words):
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert words in err and len(err.strip().splitlines()) == 1


def test_without_the_compiler(capsys, monkeypatch):
    monkeypatch.setattr(sim.importlib.util, "find_spec", lambda name: None)
    status, _, err = run(capsys)
    assert status == 2 and "pip install" in err
