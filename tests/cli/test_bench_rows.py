"""Records of `dsv4 bench`: whole ones, and those of runs that did not end."""

from __future__ import annotations

import json

import pytest

from dsv4.bench import attention
from dsv4.bench.machine import Machine
from dsv4.cli import bench
from dsv4.cli.bench_rows import recorded
from dsv4.cli.main import main
from dsv4.testing.attention import Case

MACHINE = Machine("a GPU", copy=4e12, read=4.4e12, rate=1e15)


def test_a_run_that_ends_writes_its_rows(tmp_path) -> None:
    path = tmp_path / "record.json"
    with recorded(path, "moe", MACHINE) as rows:
        rows.append({"microseconds": 1.5})
    assert json.loads(path.read_text())["results"] == [{"microseconds": 1.5}]
    assert [found.name for found in tmp_path.iterdir()] == ["record.json"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_does_not_end_leaves_its_rows_beside_the_record(error, tmp_path, capsys) -> None:
    path = tmp_path / "record.json"
    path.write_text("what was there")
    with pytest.raises(error), recorded(path, "moe", MACHINE) as rows:
        rows.append({"microseconds": 1.5})
        raise error
    assert path.read_text() == "what was there"
    part = tmp_path / "record.json.part"
    assert json.loads(part.read_text())["results"] == [{"microseconds": 1.5}]
    assert str(part) in capsys.readouterr().out


def test_nothing_measured_and_no_file_asked_for_write_nothing(tmp_path) -> None:
    with pytest.raises(KeyboardInterrupt), recorded(tmp_path / "record.json", "moe", MACHINE):
        raise KeyboardInterrupt
    with recorded(None, "moe", MACHINE) as rows:
        rows.append({"microseconds": 1.5})
    assert not list(tmp_path.iterdir())


def test_an_attention_run_that_is_interrupted_leaves_its_rows(
    tmp_path, monkeypatch, capsys
) -> None:
    def measured(cases, machine, **options):
        yield attention.Result(Case.decode(1, 8, 64), 1, 1.5, 1.0, 1e-3)
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(bench, "check_gpu", lambda: None)
    monkeypatch.setattr(Machine, "measure", lambda: MACHINE)
    monkeypatch.setattr(attention, "measure", measured)
    path = tmp_path / "record.json"
    assert main(["bench", "attention", "--no-peers", "--json", str(path)]) == 2
    assert "the GPU is gone" in capsys.readouterr().err
    part = json.loads((tmp_path / "record.json.part").read_text())
    assert part["family"] == "attention" and not path.exists()
    assert [row["microseconds"] for row in part["results"]] == [1.5]


def test_what_a_record_says_beside_its_rows_may_come_last(tmp_path) -> None:
    extra: dict = {}
    with recorded(tmp_path / "record.json", "moe", MACHINE, extra):
        extra["host"] = 2.5
    assert json.loads((tmp_path / "record.json").read_text())["host"] == 2.5
