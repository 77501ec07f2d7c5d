"""What the commands of `dsv4 sim` share: options, findings of launches, pages, exit status."""

from __future__ import annotations

import argparse
import importlib.util
import json
from types import SimpleNamespace

import pytest

from dsv4.cli import sim_check
from dsv4.cli.main import main
from dsv4.cli.sim_check import CheckedLaunches
from dsv4.cli.sim_status import CHECK_FAILED, NOT_COVERED
from dsv4.simulator import Deadlock, Finding, Report

pytestmark = pytest.mark.stage("simulator")

COMMANDS = ("rms_norm_fp8", "fp8_linear", "merged_linear", "mhc_seam", "moe", "kv_insert")
RACE = Finding("read-write race", "somewhere", ("PTX line 1",))


@pytest.fixture
def launches(tmp_path) -> CheckedLaunches:
    files = {name: tmp_path / name for name in ("json", "sarif")}
    return CheckedLaunches(argparse.Namespace(**files, html=None, races=True, seed=0), "sm_90a")


def simulating(launches: CheckedLaunches, found: Report | Exception) -> None:
    """Let every launch come to `found`."""

    def simulate(*_):
        if isinstance(found, Exception):
            raise found
        return SimpleNamespace(report=found)

    launches.target.simulate = simulate


def run(launches: CheckedLaunches, check=lambda outcome: None) -> int:
    with launches.checks():
        check(launches.run(None, lambda: None, "eager"))
    return launches.finish()


def test_a_clean_launch_is_no_finding(launches, capsys):
    simulating(launches, Report())
    assert run(launches) == 0
    assert "0 findings" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (Report(races=[RACE]), "read-write race"),
        (Report(warnings=[Finding("missing tcgen05.fence", "between two")]), None),
        (Deadlock("no warp can make progress"), "deadlock"),
    ],
    ids=["race", "fence", "deadlock"],
)
def test_a_finding_ends_the_command(launches, capsys, tmp_path, found, kind):
    simulating(launches, found)
    compared = []
    assert run(launches, compared.append) == CHECK_FAILED
    assert not compared  # a racy result says nothing
    said = json.loads((tmp_path / "json").read_text())["findings"]
    assert [finding["kind"] for finding in said] == [kind or "missing tcgen05.fence"]
    assert said[0]["kind"] in capsys.readouterr().out


def test_a_wrong_result_is_a_finding(launches, capsys):
    simulating(launches, Report())

    def differs(outcome):
        raise AssertionError("out: off by 3")

    assert run(launches, differs) == CHECK_FAILED
    assert "wrong result: out: off by 3" in capsys.readouterr().out


def test_synchronisation_that_is_left_is_a_status(launches):
    simulating(launches, Report())
    launches.report.missed["kernel"] = ["bar.sync 0"]
    assert run(launches) == NOT_COVERED


@pytest.mark.parametrize("command", COMMANDS)
def test_a_size_below_one_is_named(command, capsys):
    assert main(["sim", command, "--tokens", "0"]) == 2
    error = capsys.readouterr().err
    assert "--tokens: got 0" in error and error.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_without_the_compiler(command, capsys, monkeypatch):
    monkeypatch.setattr(sim_check.importlib.util, "find_spec", lambda name: None)
    assert main(["sim", command]) == 2
    assert "pip install" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs CuTeDSL")
def test_the_page_shows_source_and_timeline(tmp_path, capsys):
    page = tmp_path / "page.html"
    command = ["sim", "rms_norm_fp8", "--tokens", "2", "--dim", "128", "--html", str(page)]
    assert main(command) in (0, NOT_COVERED), capsys.readouterr().out
    text = page.read_text()
    assert "rms_norm_fp8.py" in text and text.count("<rect ") > 10
