"""The families of instructions: one module each, of emitters and what their code calls by name."""

import pkgutil

import pytest

from dsv4.simulator import instructions
from dsv4.simulator.compile import codegen
from dsv4.simulator.compile.program import CALLED, FAMILIES, functions_of

pytestmark = pytest.mark.stage("simulator")


def test_every_module_is_a_family_with_emitters():
    names = {
        f"{instructions.__name__}.{module.name}"
        for module in pkgutil.iter_modules(instructions.__path__)
        if not module.ispkg
    }
    assert {family.__name__ for family in FAMILIES} == names
    assert {emitter.__module__ for emitter in codegen.EMITTERS.values()} == names


def test_no_two_modules_give_generated_code_one_name():
    """The later one would hide the other without a word."""
    held: dict[str, object] = {}
    for module in CALLED:
        for name, value in functions_of(module).items():
            assert held.setdefault(name, value) is value, (module.__name__, name)
