"""The interface of the race checker and of the time recorder, and the calls to it."""

import ast
import inspect
from pathlib import Path
from unittest import mock

import pytest

import dsv4.simulator
from dsv4.simulator.machine.observer import Observer
from dsv4.simulator.races.monitor import Monitor
from dsv4.simulator.timing.recorder import Recorder
from tests.simulator.instructions.test_guards import TABLE, outcome

pytestmark = pytest.mark.stage("simulator")

HOOKS = sorted(Observer.__abstractmethods__)
OF_PROCESSES = {
    "adopt",
    "findings",
    "memory",
    "warnings",
}  # how findings of several processes become one list


def parameters(owner: type, hook: str) -> list[str]:
    return list(inspect.signature(getattr(owner, hook)).parameters)


@pytest.mark.parametrize("owner", [Monitor, Recorder])
def test_an_implementation_takes_what_each_hook_gives(owner):
    assert not owner.__abstractmethods__
    ignored = {"_", "__"}
    for hook in HOOKS:
        taken = parameters(owner, hook)
        assert set(taken) == ignored or taken == parameters(Observer, hook), hook


def test_a_forgotten_hook_is_an_error():
    kept = {name: getattr(Recorder, name) for name in HOOKS if name != "multiply"}
    forgetful = type("Forgetful", (Observer,), kept)
    with pytest.raises(TypeError, match="multiply"):
        forgetful()


def test_the_machine_calls_hooks_alone():
    called = set()
    folder = Path(dsv4.simulator.__file__).parent
    for part in ("machine", "instructions", "compile"):
        for file in (folder / part).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Attribute) and (
                    ast.unparse(node.value).split(".")[-1] == "monitor"
                ):
                    called.add(node.attr)
    assert called - OF_PROCESSES == set(HOOKS)


# Hints, bytes that an mbarrier expects, and tests of phases that are not complete yet.
TELLS_NOTHING = (
    "applypriority", "cp.async.bulk.prefetch", "discard", "mbarrier.complete_tx",
    "mbarrier.expect_tx", "mbarrier.test_wait", "mbarrier.try_wait", "prefetch",
)  # fmt: skip


def test_every_access_is_told():
    """An instruction with an address, of those that the simulator knows, calls a hook."""
    told: set[str] = set()

    def telling(name: str):
        real = getattr(Monitor, name)

        def hook(self, w, *args, **kwargs):
            if hasattr(w, "at"):
                told.add(w.program.entry.instructions[w.at].text)
            return real(self, w, *args, **kwargs)

        return hook

    hooks = {name: telling(name) for name in HOOKS if name not in ("report", "warn")}
    with mock.patch.multiple(Monitor, **hooks):
        ran = [line for line in TABLE if "[" in line and not outcome(line, "")[0]]
    silent = [line for line in ran if line.rstrip(";") not in told]
    assert len(ran) > 80
    assert [line for line in silent if not line.startswith(TELLS_NOTHING)] == []
