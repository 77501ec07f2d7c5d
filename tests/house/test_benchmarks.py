"""The tables of BENCHMARKS.md are those of the records in benchmarks/*.json."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from dsv4.bench.machine import Machine
from dsv4.bench.pages import PAGED_TARGETS, TARGETS, rendered
from dsv4.bench.report import record, write_record
from tests.house.scripts import load_script

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
PEERS = ("FlashMLA", "FlashMLA fp8")


def test_page_is_up_to_date() -> None:
    """Else: `scripts/benchmarks --write`."""
    page = (ROOT / "BENCHMARKS.md").read_text()
    assert page == rendered(page, FOLDER)


def test_script_notices_a_figure_that_is_no_record(tmp_path: Path, monkeypatch, capsys) -> None:
    """A copy of the page with one changed figure fails the check and is mended by --write."""
    page = (ROOT / "BENCHMARKS.md").read_text()
    # The first figure of the first table: in bold, as all of ours.
    changed = re.sub(r"\*\*[\d.]+\*\*", "**357.4**", page, count=1)
    assert changed != page
    copy = tmp_path / "BENCHMARKS.md"
    copy.write_text(changed)
    script = load_script("benchmarks")
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--page", str(copy)])
    assert script.main() == 1
    assert "not up to date" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--write"])
    assert script.main() == 0
    assert copy.read_text() == page


def test_every_record_is_shown() -> None:
    page = (ROOT / "BENCHMARKS.md").read_text()
    records = {path.name for path in FOLDER.glob("*.json")} - {TARGETS, PAGED_TARGETS}
    assert records and all(name in page for name in records), records


def test_figures_of_the_readme_are_those_of_the_records() -> None:
    records = {
        name: json.loads((FOLDER / f"{name}_h200{run}.json").read_text())["results"]
        for name, run in (
            ("attention", "_6"), ("paged_attention", ""), ("step_flash", ""), ("prefill_flash", ""),
        )
    }  # fmt: skip
    gathered = next(
        row
        for row in records["attention"]
        if (row["shape"]["name"], row["shape"]["tokens"]) == ("Pro", 64)
    )
    paged = next(
        row
        for row in records["paged_attention"]
        if (row["shape"]["name"], row["shape"]["tokens"], row["shape"]["kv_format"])
        == ("Pro", 64, "bf16")
    )
    ahead = [row["peer"] / row["microseconds"] for row in records["paged_attention"]]
    steps = {row["shape"]["batch"]: row["microseconds"] / 1e3 for row in records["step_flash"]}
    (prompt,) = records["prefill_flash"]
    figures = (
        f"**{gathered['microseconds']:.1f} us** for the attention of one",
        f"where FlashMLA takes {min(gathered['peers'][n] for n in PEERS):.1f}",
        f"{paged['microseconds']:.1f} us there, FlashMLA {paged['peer']:.1f} over the same",
        f"and ahead at all {len(ahead)} shapes",
        f"{min(ahead):.2f} to {max(ahead):.1f} times as fast as FlashMLA over the same pages",
        f"takes {steps[1]:.1f} ms for one request and {steps[64]:.1f} ms for 64",
        f"a prompt of 8,192 tokens {prompt['microseconds'] / 1e3:.0f} ms",
    )
    page = " ".join((ROOT / "README.md").read_text().split())
    assert min(ahead) > 1
    assert not [figure for figure in figures if figure not in page]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*_h*.json")), ids=lambda path: path.stem)
def test_a_record_says_how_it_came_about(path: Path) -> None:
    found = json.loads(path.read_text())
    assert found["command"].startswith("dsv4 bench ") and found["date"] and found["commit"]
    assert found["machine"]["name"] and found["machine"]["copy"] > 1e12
    # Rows of quantised attention have two times, of the kernel and with the quantisers.
    assert all((row.get("microseconds") or row["kernel"]) > 0 for row in found["results"])


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("<!-- benchmarks: speed attention_h100.json -->\n<!-- /benchmarks -->", "table 'speed'"),
        ("<!-- benchmarks: attention nowhere.json -->\n<!-- /benchmarks -->", "nowhere.json"),
        (
            "<!-- benchmarks: attention attention_h100.json -->\n",
            "of which 0 are closed",
        ),
    ],
)
def test_markers_that_name_nothing_are_errors(marker: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rendered(marker, FOLDER)


def test_table_of_another_family(tmp_path: Path) -> None:
    row = {
        "shape": {"tokens": 8192, "dim": 4096},
        "microseconds": 25.0,
        "floor": 22.94,
        "torch": 500.0,
        "gigabytes_per_second": 4038.0,
    }
    machine = Machine("a GPU", copy=3.9e12, read=4e12, rate=8e14)
    write_record(tmp_path / "rows.json", record("rms_norm_fp8", machine, [row]))
    page = "<!-- benchmarks: rms_norm_fp8 rows.json -->\n<!-- /benchmarks -->\n"
    made = rendered(page, tmp_path)
    assert "| 8192 | 4096 | **25.00** | 4038 | 22.94 | 92% | 500.0 |" in made
    assert "a GPU" in made and rendered(made, tmp_path) == made


def test_record_of_this_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Command, commit and software are those of the process that measures."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/dsv4", "bench", "some"])
    machine = Machine("GPU", copy=3.9e12, read=4e12, rate=8e14)
    path = tmp_path / "record.json"
    write_record(path, record("some", machine, [{"microseconds": 1.5}], host={"launch": 7.0}))
    found = json.loads(path.read_text())
    assert found["command"] == "dsv4 bench some" and found["software"]["torch"]
    assert found["commit"] is None or len(found["commit"].removesuffix("-dirty")) == 40
    assert found["machine"]["rate"] == 8e14 and found["host"] == {"launch": 7.0}
    assert found["results"] == [{"microseconds": 1.5}]
