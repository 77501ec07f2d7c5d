"""Fixtures and the collection rules that every test file shares."""

from __future__ import annotations

import gc
import json
import secrets
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lowp_stages import stages_of

# What compiles or simulates kernels takes longest: workers begin with it, and end together.
FIRST = ("tests/kernels/", "tests/simulator/")
# Folders whose files compile the same kernels: one worker takes all of them.
UNITS = ("tests/kernels/attention",)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests, with the reason, on machines without the GPU they need; mark those of
    quantised attention with what they prove of it."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(FIRST))
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    needs = {"gpu": None, "sm90": (9, 0), "sm100": (10, 0)}
    for item in items:
        for stage in stages_of(item.nodeid):
            item.add_marker(pytest.mark.stage(stage))
        for marker, required in needs.items():
            if item.get_closest_marker(marker) is None:
                continue
            if capability is None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, none is available"))
            elif required is not None and capability != required:
                item.add_marker(
                    pytest.mark.skip(
                        reason=f"needs compute capability {required}, got {capability}"
                    )
                )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what is imported and collected by now, a million objects, out of garbage collections:
    tracing a kernel makes so many objects that they are frequent."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The scheduler of `--dist loadfile`, with units in the order of the tests: by default files
    with the fewest tests come last, which are those with the longest."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return Scheduling(config, log)


def unit_of(nodeid: str) -> str:
    """What one worker takes together: a file, or a folder of files that share kernels."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in UNITS if file.startswith(f"{folder}/")), file)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The test's seed, printed when it fails: always the same one, so that no run fails by chance.

    `--fresh-seeds`, as `scripts/test --full` has it, draws one instead: other inputs every time.
    `--seed N` repeats the one that a failure printed: `pytest --seed N path::test[case]`.
    """
    given, fresh = (request.config.getoption(name) for name in ("--seed", "--fresh-seeds"))
    value = seed_of(request.node.nodeid, given, fresh)
    torch.manual_seed(value)
    print(f"seed {value} (repeat with --seed {value}; DSV4_SOURCE_LINES=1 names lines of kernels)")
    return value


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="use this seed in every test")
    parser.addoption("--fresh-seeds", action="store_true", help="draw a seed for each test")
    parser.addoption(
        "--stage-results", type=Path, default=None, help="write outcomes by stage mark to this file"
    )


def seed_of(name: str, given: int | None, fresh: bool) -> int:
    """The given seed; else a drawn one if seeds are to be fresh; else one that follows the name."""
    if given is not None:
        return given
    return secrets.randbits(31) if fresh else zlib.crc32(name.encode()) >> 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """Carry a test's stage marks in its report, which crosses from workers to the main process."""
    report = yield
    stages = [name for mark in item.iter_markers("stage") for name in mark.args]
    report.user_properties.append(("stages", stages))
    report.user_properties.append(("machine", machine_of(item)))
    return report


def machine_of(item: pytest.Item) -> str:
    """What a test proves something about: the CPU code, the simulated kernels, or a GPU by name.

    A test for any GPU counts for the one that is there; without one, for the H200, on which such
    tests are run.
    """
    if item.get_closest_marker("sm100"):
        return "B200"
    if item.get_closest_marker("gpu") or item.get_closest_marker("sm90"):
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        return "B200" if capability == (10, 0) else "H200"
    parts = item.path.relative_to(item.config.rootpath).parts
    is_simulated = parts[1] in ("kernels", "simulator") or "simulated" in item.path.stem
    return "simulator" if is_simulated else "cpu"


class StageResults:
    """Collects outcomes and writes them as JSON: {stage: {machine: {test: outcome}}}."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: dict[str, dict[str, dict[str, str]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Setup reports matter only when they skip or fail: the call phase then never comes.
        if report.when == "teardown" or (report.when == "setup" and report.passed):
            return
        found = dict(report.user_properties)
        for stage in found.get("stages", []):
            machines = self.outcomes.setdefault(stage, {})
            machines.setdefault(found["machine"], {})[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.outcomes, indent=1, sort_keys=True))


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--stage-results")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(StageResults(path))
