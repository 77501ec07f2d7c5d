"""Whole sm_90a kernels give the H200's output in the simulator, up to the order of sums.

`scripts/tools/simulator_kernel_goldens.py` records the hardware's side;
kernels.json names the machine.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

from dsv4.simulator import simulate
from dsv4.testing.harness import Call
from tests.simulator.hardware.kernel_cases import KernelCase, kernel_cases
from tests.simulator.hardware.kernel_goldens import differences, load

pytestmark = pytest.mark.stage("simulator")

CASES = kernel_cases()
GOLDENS = load()
# By default every GEMM and the attention shape that is compiled in seconds; other shapes and
# schedules with the slow tests.
_QUICK = [
    *(name for name in CASES if "gemm" in name),
    "attention 64 x 16, 2 splits, causal, ragged, softmax",
]


def _marked(names: list[str], slow: set[str]) -> list:
    return [pytest.param(n, marks=pytest.mark.slow) if n in slow else n for n in names]


def _run(case: KernelCase, **options) -> Call:
    call = case.make()
    simulate(case.compile(), *call.args, **call.options, races=False, **options)
    return call


def _check(case: KernelCase, call: Call) -> None:
    found = differences(case, GOLDENS[case.name], call.outputs)
    assert not found, "\n".join([f"{case.name}:", *found])


@pytest.mark.parametrize("name", _marked(list(CASES), set(CASES) - set(_QUICK)))
def test_kernel_gives_the_hardwares_output(name):
    _check(CASES[name], _run(CASES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["lazy", "random"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_do_not_depend_on_the_schedule(name, schedule, seed):
    _check(CASES[name], _run(CASES[name], schedule=schedule, seed=seed))


_PIPELINED = [n for n in CASES if n.startswith("pipelined") and n.endswith("integers")]


@pytest.mark.parametrize("schedule", ["eager", pytest.param("random", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", _marked(_PIPELINED, set(_PIPELINED[:-1])))
def test_pipelined_gemms_are_free_of_races(name, schedule, seed):
    case = CASES[name]
    call = case.make()
    report = simulate(case.compile(), *call.args, schedule=schedule, seed=seed, races=True)
    _check(case, call)
    report.raise_if_racy()
    assert report.launches[0].coverage.complete, report.launches[0].coverage.missed


def test_goldens_are_of_these_inputs():
    assert list(GOLDENS) == list(CASES)
    stale = [n for n, case in CASES.items() if case.identity() != GOLDENS[n].identity]
    assert not stale, f"other inputs: {stale}; run scripts/tools/simulator_kernel_goldens.py"


def test_integer_products_are_exact_on_the_hardware():
    """The golden bits are those of the true product, so neither side hides an error."""
    for name, case in CASES.items():
        if name.endswith("integers"):
            a, b, c = case.make().args
            torch.matmul(a.float(), b.float().T, out=c)
            assert not differences(case, GOLDENS[name], {"c": c}), name


@pytest.mark.parametrize(
    "name", ["gemm kk, fractions", "attention 64 x 16, 2 splits, causal, ragged, softmax"]
)
def test_wrong_outputs_are_found(name):
    """One kept element off by 1%, a row from another head: each is a difference."""
    case = CASES[name]
    results = _run(case).outputs
    first = next(iter(case.outputs))
    good = results[first].clone()
    every = case.outputs[first].every
    kept = good.flatten()[::every].abs().argmax().item() * every
    results[first].view(-1)[kept] *= 1.01
    assert differences(case, GOLDENS[name], results)
    results[first].copy_(good.roll(1, dims=-2))
    assert differences(case, GOLDENS[name], results)
    results[first].copy_(good)
    assert not differences(case, GOLDENS[name], results)
