"""The interface of the race checker and of the time recorder, and the calls to it."""

import ast
import inspect
from pathlib import Path

import pytest

import dsv4.simulator
from dsv4.simulator.machine.observer import Observer
from dsv4.simulator.races.monitor import Monitor
from dsv4.simulator.timing.recorder import Recorder

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
