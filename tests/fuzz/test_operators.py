"""Random calls of every registered operator: each computes, or is refused by an argument's name.

All follows from the operators' declarations: a new one is fuzzed as soon as it is registered.
"""

from __future__ import annotations

import inspect
import random
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import dsv4.ops
from dsv4.kernels.gemm import epilogues
from dsv4.kernels.rows.latent_rows_config import COMPRESSOR, INDEXER, REQUESTS
from dsv4.ops import Compression, GatedWeights, HeadRotation, IndexRounding, Requests
from dsv4.ops.runtime import registry
from dsv4.ops.runtime.kernel_op import KernelOp
from tests.fuzz.operands import MAX_ELEMENTS, Operands, any_config, hostile_field, hostile_tensor
from tests.fuzz.values import assert_one_line

pytestmark = pytest.mark.stage("op")
OPS = {name: op for name, op in registry.OPS.items() if type(op).__module__.startswith("dsv4.")}
# Operators that write every element of the outputs that they have to be given.
WRITE_ALL = {"sparse_fmha_with_swa", "rms_norm_fp8", "fp8_linear", "merged_linear"} | {
    "grouped_linear"
}
# Operators whose public function takes other tensors than the operator itself.
BUNDLED = {"quantized_attention"}
FILLS = (0x00, 0xFF)
STATE = "state"  # what names of outputs end with that are read, too: past tokens of compressors


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    """Without torch's warnings about sparse and quantised tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_every_family_is_fuzzed() -> None:
    assert OPS.keys() >= WRITE_ALL
    for name in OPS:
        assert callable(getattr(dsv4.ops, name)), f"{name} has no public function"


@pytest.mark.parametrize("rounds", [30, pytest.param(1_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPS)
def test_tensors_that_fit_are_computed(name: str, rounds: int, seed: int) -> None:
    """Every byte of an output is written whatever it was, or left alone; inputs are left alone."""
    op, dice, outcomes = OPS[name], random.Random(seed), Counter()
    # Few operands fit, and calls without tokens write nothing: on until enough have computed.
    while outcomes["rounds"] < rounds or (
        (outcomes["computed"] < rounds // 12 or not outcomes["bytes written"])
        and outcomes["rounds"] < 20 * rounds
    ):
        outcomes["rounds"] += 1
        operands = _operands(dice, op)
        before = _bytes(operands.inputs)
        states = [
            tensor.clone() if arg.name.endswith(STATE) and tensor is not None else None
            for arg, tensor in zip(operands.output_args, operands.outputs)
        ]
        results = []
        for fill in FILLS:
            for tensor, state in zip(operands.outputs, states):
                if state is not None:
                    tensor.copy_(state)
                elif tensor is not None:
                    tensor.view(torch.uint8).fill_(fill)
            error = _refusal(op, op.overload, operands.arguments())
            results.append(_bytes(operands.outputs))
        assert _bytes(operands.inputs) == before
        if error:
            held = list(zip(operands.outputs, states, _bytes(states)))
            assert results == [
                [_filled(t, fill) if state is None else known for t, state, known in held]
                for fill in FILLS
            ]
            outcomes["refused"] += 1
            continue
        outcomes["computed"] += 1
        for arg, state, first, second in zip(operands.output_args, states, *results):
            if state is not None:
                assert first == second, f"{arg.name}: another result from the same state"
                continue
            untouched = _untouched(first, second)
            if name in WRITE_ALL and not arg.is_optional:
                assert not untouched, f"{arg.name}: {untouched} bytes were not written"
            outcomes["bytes written"] += len(first or b"") - untouched
    assert outcomes["computed"] + outcomes["refused"] == outcomes["rounds"]
    assert outcomes["computed"] >= rounds // 12, outcomes
    assert outcomes["bytes written"], outcomes


@pytest.mark.parametrize("rounds", [25, pytest.param(2_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPS)
def test_tensors_that_do_not_fit_are_refused(name: str, rounds: int, seed: int) -> None:
    """A refused call writes nothing, and fake tensors are refused like real ones."""
    op, dice, outcomes = OPS[name], random.Random(seed), Counter()
    for number in range(rounds):
        operands = _computing(dice, op)
        if number % 20:
            place = dice.randrange(len(op.tensors))
            arg = op.tensors[place]
            operands.tensors[place] = hostile_tensor(dice, arg, operands.tensors[place])
        arguments = operands.arguments()
        if dice.random() < 0.05:
            arguments[op.num_required] = hostile_field(dice)
        before = _bytes(arguments)
        error = _refusal(op, op.overload, arguments)
        fake_error = _fake_refusal(op, arguments)
        if error:
            assert _bytes(arguments) == before, f"a refused call wrote: {error}"
            outcomes["refused"] += 1
        else:
            outcomes["computed"] += 1
        assert error or not fake_error, f"{name}: computed, but refused as fake: {fake_error}"
    assert outcomes.total() == rounds
    assert outcomes["refused"] > rounds // 2, outcomes
    assert outcomes["computed"] > rounds // 100, outcomes


@pytest.mark.parametrize("rounds", [50, pytest.param(2_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(OPS.keys() - BUNDLED))
def test_public_functions_name_what_is_wrong(name: str, rounds: int, seed: int) -> None:
    op, dice, outcomes = OPS[name], random.Random(seed), Counter()
    function = getattr(dsv4.ops, name)
    for number in range(rounds):
        call = _computing_call(dice, op, function)
        if number % 5:
            chosen = dice.choice(list(inspect.signature(function).parameters))
            arg = next((a for a in op.tensors if chosen in (a.name, a.public)), None)
            if isinstance(call.get(chosen), GatedWeights) and dice.random() < 0.8:
                field = dice.choice(GatedWeights._fields)
                tensor = hostile_tensor(dice, None, getattr(call[chosen], field))
                call[chosen] = call[chosen]._replace(**{field: tensor})
            elif isinstance(call.get(chosen), list) and dice.random() < 0.8:
                items = list(call[chosen])
                place = dice.randrange(len(items))
                items[place] = hostile_tensor(dice, None, items[place])
                call[chosen] = items
            elif arg is None:
                call[chosen] = hostile_field(dice)
            else:
                call[chosen] = hostile_tensor(dice, arg, call.get(chosen))
        before = _bytes(list(call.values()))
        error = _refusal(op, function, [], call)
        outcomes["refused" if error else "computed"] += 1
        if error:
            assert _bytes(list(call.values())) == before, f"a refused call wrote: {error}"
    assert outcomes.total() == rounds
    assert outcomes["refused"] > rounds // 4, outcomes
    assert outcomes["computed"] >= rounds // 5, outcomes


@pytest.mark.parametrize("rounds", [100, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPS)
def test_fields_of_other_types_are_refused(name: str, rounds: int, seed: int) -> None:
    op, dice, outcomes = OPS[name], random.Random(seed), Counter()
    for _ in range(rounds):
        config = any_config(dice, op)
        values = [getattr(config, field.name) for field in fields(config)]
        place = dice.randrange(len(values))
        values[place] = hostile_field(dice)
        try:
            identity = op.runner_id(*values)
        except (TypeError, ValueError) as error:
            _assert_clear(op, error)
            # A value of the right type may contradict another field.
            assert isinstance(error, ValueError) or fields(config)[place].name in str(error), error
            outcomes["refused"] += 1
        else:
            assert identity == op.runner_id(*values)
            outcomes["taken"] += 1
    assert outcomes.total() == rounds
    assert outcomes["refused"] > rounds // 2, outcomes


def _operands(dice: random.Random, op: KernelOp) -> Operands:
    """Random operands, more often of sizes that fit each other than chance would have it."""
    for tries in range(10_000):
        try:
            operands = Operands(dice, op, any_config(dice, op))
            op.check(operands.config, tuple(operands.tensors))
        except OverflowError:
            continue
        except (TypeError, ValueError):
            if tries < 10:
                continue
        return operands
    raise AssertionError(f"{op.name}: no tensors of less than {MAX_ELEMENTS} elements found")


KNOWN: dict[str, list[Operands]] = {}
ENOUGH = 4


def _computing(dice: random.Random, op: KernelOp) -> Operands:
    """Operands that the operator takes; after a few searches mostly of sizes that it took."""
    known = KNOWN.setdefault(op.name, [])
    for _ in range(1000):
        is_new = len(known) < ENOUGH or dice.random() < 0.05
        operands = _operands(dice, op) if is_new else dice.choice(known).again(dice)
        if not _refusal(op, op.overload, operands.arguments()):
            if is_new:
                known.append(operands)
            return operands
    raise AssertionError(f"{op.name}: no call that computes in 1,000")


def _computing_call(dice: random.Random, op: KernelOp, function: Any) -> dict[str, Any]:
    """Arguments that the public function takes; not all that the operator takes can be said."""
    known = KNOWN.setdefault(f"{op.name}, public", [])
    for _ in range(1000):
        is_new = len(known) < ENOUGH
        operands = _operands(dice, op) if is_new else dice.choice(known).again(dice)
        call = _public_call(op, function, operands)
        if not _refusal(op, function, [], call):
            if is_new:
                known.append(operands)
            return call
    raise AssertionError(f"{op.name}: no public call that computes in 1,000")


def _public_call(op: KernelOp, function: Any, operands: Operands) -> dict[str, Any]:
    """Arguments of the public function that say the same, as far as names tell."""
    call = _bundles(op, operands)
    for name, parameter in inspect.signature(function).parameters.items():
        for arg, tensor in zip(op.tensors, operands.tensors):
            # What a call need not bring is left out: the default must do.
            is_needed = parameter.default is parameter.empty or not (
                arg.is_optional or arg.is_output
            )
            # What a table says with no rows, a call says by leaving it out.
            is_given = not (parameter.default is None and tensor is not None and not len(tensor))
            if name in (arg.name, arg.public) and is_needed and is_given:
                call[name] = tensor
        if name not in call and hasattr(operands.config, name):
            value = getattr(operands.config, name)
            call[name] = getattr(torch, value) if "dtype" in str(parameter.annotation) else value
    return call


def _bundles(op: KernelOp, operands: Operands) -> dict[str, Any]:
    """Arguments of a public function that hold several tensors or fields."""
    given = {
        arg.name: tensor if tensor is not None and len(tensor) else None
        for arg, tensor in zip(op.tensors, operands.tensors)
    }
    if op.name == "dshb_to_bhsd":
        return {"shape": tuple(operands.tensors[0].shape[::-1])}
    if op.name == "fp8_linear":
        return {"epilogue": _epilogue(operands.config.head_epilogue, given, "")}
    if op.name == "merged_linear":
        lists = {
            "weights": ("weight_", "plain_"),
            "scales": ("scale_",),
            "outs": ("out_", "plain_out_"),
        }
        call: dict[str, Any] = {
            name: [
                tensor
                for stem in stems
                for arg, tensor in zip(op.tensors, operands.tensors)
                if arg.name.removeprefix(stem).isdecimal() and tensor is not None
            ]
            for name, stems in lists.items()
        }
        heads = [weight.head_epilogue for weight in operands.config.parsed]
        own = [_epilogue(one, given, f"_{i}") for i, one in enumerate(heads)]
        return {**call, "epilogues": own}
    if op.name == "latent_rows":
        groups = ("requests", Requests, REQUESTS), ("entries", Compression, COMPRESSOR)
        return {
            label: kind(*(given[name] for name in names))
            for label, kind, names in (*groups, ("index_keys", Compression, INDEXER))
            if all(given[name] is not None for name in names)
        }
    if op.name == "step_indices":
        ratios = tuple(filter(None, operands.config.ratios))
        return {"chunk": _width(op, operands, "positions"), "ratios": ratios}
    if op.name != "moe":
        return {}
    units = [
        GatedWeights(**{field: given.get(prefix + field) for field in GatedWeights._fields})
        for prefix in ("", "shared_")
    ]
    config = operands.config
    block = (config.block_rows, config.block_columns)
    return {"experts": units[0], "shared": units[1], "block": block}


def _width(op: KernelOp, operands: Operands, name: str) -> int:
    """Last size of an operand."""
    place = [arg.name for arg in op.tensors].index(name)
    return operands.tensors[place].shape[-1]


def _epilogue(
    config: Any, given: dict[str, Tensor | None], suffix: str
) -> HeadRotation | IndexRounding | None:
    """What says the same as a configuration's epilogue and the tensors beside it."""
    if config is None:
        return None
    table = given["rope"], given["positions"]
    if isinstance(config, epilogues.IndexRounding):
        return IndexRounding(*table, given[f"head_scales{suffix}"])
    return HeadRotation(*table, config.head_dim, given[f"squares{suffix}"])


def _refusal(op: KernelOp, function: Any, arguments: list[Any], named: Any = None) -> str:
    """What the call was refused with; empty if it computed. Other errors fail the test."""
    try:
        function(*arguments, **(named or {}))
    except (TypeError, ValueError) as error:
        if "integer string conversion" in str(error):
            # torch's own look at the schema prints what it refuses, and Python not every integer.
            assert function is op.overload, f"{op.name}: {error!r}"
        else:
            _assert_clear(op, error)
        return str(error)
    except RuntimeError as error:
        # torch itself looks at the schema, and names operator and argument.
        assert function is op.overload, f"{op.name}: {error!r}"
        first = str(error).split("\n")[0]
        assert re.search(rf"dsv4::{op.name}(\(\) Expected|' with arguments from)", first), first
        return first
    return ""


def _fake_refusal(op: KernelOp, arguments: list[Any]) -> str:
    with FakeTensorMode() as mode:
        try:
            fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
        except (RuntimeError, NotImplementedError, AssertionError):
            return ""  # torch has no fakes of quantised tensors
        try:
            op.overload(*fakes)
        except (TypeError, ValueError, RuntimeError) as error:
            return str(error)
    return ""


def _assert_clear(op: KernelOp, error: Exception) -> None:
    """One line that begins with the argument or field it is about."""
    message = str(error)
    if message.startswith(f"dsv4::{op.name}() "):  # torch's own look at the schema
        return
    assert_one_line(message)
    names = {name for arg in op.tensors for name in (arg.name, arg.public)} | {"runner_id"}
    names |= {field.name for field in fields(op.config)}
    names |= set(inspect.signature(getattr(dsv4.ops, op.name)).parameters)
    first = re.split(r"[\s,:.\[]", message)[0]
    assert first in names, f"{op.name}: {type(error).__name__}: {message}"


def _bytes(values: list[Any]) -> list[bytes | None]:
    def bytes_of(value: Any) -> bytes | None:
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
            return None
        if value.device.type != "cpu":
            return None
        dense = value.detach().contiguous().as_strided((value.numel(),), (1,))
        return dense.view(torch.uint8).numpy().tobytes()

    return [bytes_of(value) for value in values]


def _filled(tensor: Tensor | None, fill: int) -> bytes | None:
    return None if tensor is None else bytes([fill]) * (tensor.numel() * tensor.element_size())


def _untouched(first: bytes | None, second: bytes | None) -> int:
    """Bytes that still hold either fill; all others must be the same."""
    count = 0
    for one, other in zip(first or b"", second or b""):
        if one != other:
            assert (one, other) == FILLS, "the result depends on what the output held"
            count += 1
    return count
