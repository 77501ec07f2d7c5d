"""Chains of calls of several compiled functions."""

from functools import cache

import cutlass
import pytest
import torch
from cutlass import cute

from dsv4.simulator import ChainCall, simulate_chain
from tests.simulator.helpers.support import compile_kernel

pytestmark = pytest.mark.stage("simulator")

RACE = "race with the launch before"


@cute.kernel
def _add_kernel(
    source: cute.Tensor, target: cute.Tensor, number: cutlass.Constexpr, early: cutlass.Constexpr
):
    """target = source + number, in 4 CTAs."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = 32 * block + thread
    cute.arch.griddepcontrol_launch_dependents()
    if cutlass.const_expr(early == "store"):
        target[i] = 0
    if cutlass.const_expr(early != "all"):
        cute.arch.griddepcontrol_wait()
    target[i] = source[127 - i] + number


@cache
def _adding(number: int, early: str = ""):
    @cute.jit
    def call(source: cute.Tensor, target: cute.Tensor, stream):
        _add_kernel(source, target, number, early).launch(
            grid=(4, 1, 1), block=(32, 1, 1), stream=stream, use_pdl=True
        )

    return compile_kernel(call, "sm_90a", _zeros(), _zeros())


@cute.kernel
def _poll_kernel(flags: cute.Tensor, target: cute.Tensor, waits: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    if cutlass.const_expr(waits):
        cute.arch.griddepcontrol_wait()
    target[thread] = cute.arch.load(flags.iterator, cutlass.Int32, sem="acquire", scope="gpu")
    cute.arch.griddepcontrol_wait()


@cache
def _polling(waits: bool):
    @cute.jit
    def call(flags: cute.Tensor, target: cute.Tensor, stream):
        _poll_kernel(flags, target, waits).launch(
            grid=(1, 1, 1), block=(32, 1, 1), stream=stream, use_pdl=True
        )

    return compile_kernel(call, "sm_90a", _zeros(), _zeros())


def _zeros() -> torch.Tensor:
    return torch.zeros(128, dtype=torch.int32)


def _run(*functions, tensors=None, **options):
    """Hand a tensor from one call to the next."""
    tensors = tensors or [_zeros() for _ in range(len(functions) + 1)]
    calls = [ChainCall(f, pair) for f, *pair in zip(functions, tensors, tensors[1:])]
    report = simulate_chain(calls, **options)
    return [tensor.tolist() for tensor in tensors], report


@pytest.mark.parametrize("overlap", ["none", "all", "random"])
@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_calls_of_two_functions_give_one_result(overlap, schedule, seed):
    options = {"overlap": overlap, "schedule": schedule, "seed": seed}
    (*_, last), report = _run(_adding(1), _adding(2), _adding(1), races=False, **options)
    assert last == [4] * 128
    assert len(report.launches) == 3
    assert overlap == "random" or report.early_starts == {"none": 0, "all": 2}[overlap]


def test_the_checker_knows_what_the_call_before_did():
    _, report = _run(_adding(1), _adding(2), _adding(1))
    assert not report.races
    _, report = _run(_adding(1), _adding(2, "all"))
    assert {finding.kind for finding in report.races} == {RACE}
    assert "read of target of call 0" in report.races[0].message


def test_a_call_that_does_not_wait_hides_the_one_before_it():
    first, other = _zeros(), _zeros()
    pairs = (first, other), (_zeros(), _zeros()), (other, first)
    functions = _adding(1), _adding(2, "all"), _adding(1)
    calls = [ChainCall(function, pair) for function, pair in zip(functions, pairs)]
    report = simulate_chain(calls)
    assert all("the launch between them has not waited" in x.message for x in report.races)
    assert report.races
    calls[1] = ChainCall(_adding(2), pairs[1])
    assert not simulate_chain(calls).races


def test_a_store_before_the_wait_is_a_race_in_recycled_memory():
    tensors = [_zeros() for _ in range(3)]
    functions = _adding(1), _adding(1, "store")
    _, report = _run(*functions, tensors=tensors)
    assert not report.races  # no launch of the chain has touched what it stores to
    _, report = _run(*functions, tensors=tensors, recycled=tensors[1:])
    assert {finding.kind for finding in report.races} == {RACE}
    assert all(finding.message.startswith("write of target") for finding in report.races)
    _, report = _run(_adding(1), _adding(1), tensors=tensors, recycled=tensors)
    assert not report.races


@pytest.mark.parametrize("waits", [True, False])
def test_a_poll_before_the_wait_may_find_a_flag_of_the_launch_before(waits):
    _, report = _run(_adding(1), _polling(waits))
    assert {finding.kind for finding in report.races} == (set() if waits else {RACE})
    assert waits or report.races[0].message.startswith("strong read of")


def test_options_are_checked():
    for options, message in (
        ({"schedule": "late"}, "schedule must be one of"),
        ({"overlap": "some"}, "overlap must be one of"),
        ({"overlap": "all"}, "overlap needs races=False"),
    ):
        with pytest.raises(ValueError, match=message):
            _run(_adding(1), **options)
