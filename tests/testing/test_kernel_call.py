"""Calls that follow from an argument table."""

from __future__ import annotations

import pytest
import torch

from dsv4.kernels.kit.args import In, InOut, OptIn, OptOut, Out, Scalar, Scratch, Workspace
from dsv4.ops.runtime.backend import Device
from dsv4.testing.kernel_call import make_call
from dsv4.testing.rms_norm_fp8 import PADDING, Case, Inputs

TABLE = (
    In("x", "T d", "bfloat16"),
    In("rows", "T", "int32", nullable=True),
    Out("y", "T d", "float32"),
    OptIn("bias", "d", "float32"),
    OptOut("sums", "T n", "float32"),
    Scratch("codes", "T d", "float8_e4m3fn"),
    Workspace(),
    Scalar("splits"),
    Scalar("num_ctas"),
)
VALUES = {"d": 8, "n": 2}
SCALARS = {"num_ctas": 7, "splits": 3}


def test_what_is_not_given_is_made_or_absent() -> None:
    x = torch.zeros(5, 8, dtype=torch.bfloat16)
    call = make_call(TABLE, VALUES, {"x": x, "rows": None}, SCALARS)
    assert call.args[0] is x
    assert [tuple(t.shape) for t in call.args] == [(5, 8), (0,), (5, 8)]
    assert call.args[1].dtype == torch.int32 and call.args[2].dtype == torch.float32
    assert list(call.options) == ["bias", "sums", "codes", "workspace", "splits", "num_ctas"]
    shapes = {name: tuple(t.shape) for name, t in call.options.items() if torch.is_tensor(t)}
    assert shapes == {"bias": (0,), "sums": (0, 2), "codes": (0, 8), "workspace": (0,)}
    assert (call.options["splits"], call.options["num_ctas"]) == (3, 7)
    assert list(call.outputs) == ["y"]


def test_wanted_outputs_scratch_and_workspace() -> None:
    x, bias = torch.zeros(5, 8, dtype=torch.bfloat16), torch.ones(8)
    tensors = {"x": x, "bias": bias}
    options = {"wanted": ("sums", "codes"), "workspace": 12, "padding": 3}
    call = make_call(TABLE, VALUES, tensors, SCALARS, **options)
    assert call.options["bias"] is bias
    assert list(call.outputs) == ["y", "sums"] and list(call.scratch) == ["codes", "workspace"]
    # Rows of outputs lie apart, those of scratch do not.
    assert call.outputs["sums"].stride() == (5, 1) and call.outputs["y"].stride() == (11, 1)
    assert call.scratch["codes"].stride() == (8, 1)
    assert torch.equal(call.options["workspace"], torch.zeros(12))
    assert call.poisoned().outputs["y"].isnan().all() and not call.options["workspace"].any()


def test_outputs_that_are_given_are_written() -> None:
    x, y = torch.zeros(5, 8, dtype=torch.bfloat16), torch.zeros(5, 8)
    call = make_call(TABLE, VALUES, {"x": x, "y": y}, SCALARS)
    assert call.args[2] is y and call.outputs["y"] is y


def test_what_is_written_in_part_is_given_and_keeps_what_it_holds() -> None:
    table = (In("x", "T d", "float32"), InOut("pool", "P d", "float32"))
    x, pool = torch.zeros(5, 8), torch.ones(3, 8)
    call = make_call(table, VALUES, {"x": x, "pool": pool}, {}).poisoned()
    assert call.args[1] is pool and (pool == 1).all()
    assert call.scratch["pool"] is pool and not call.outputs
    with pytest.raises(ValueError, match="pool: got nothing, the kernel needs it"):
        make_call(table, VALUES, {"x": x}, {})


def test_sizes_that_no_input_has() -> None:
    table = (In("x", "T d", "float32"), Out("lists", "P four", "int32"))
    call = make_call(table, {**VALUES, "four": 4}, {"x": torch.zeros(5, 8)}, {}, sizes={"P": 7})
    assert call.outputs["lists"].shape == (7, 4)


@pytest.mark.parametrize(
    ("tensors", "scalars", "message"),
    [
        (("x", "z"), SCALARS, "tensors: got z; the table has x, rows, y"),
        (("rows",), SCALARS, "x: got nothing, the kernel needs it"),
        (("x",), {"splits": 1}, "scalars: missing num_ctas; the table has splits, num_ctas"),
        (("x",), {**SCALARS, "sms": 1}, "scalars: got sms; the table has splits, num_ctas"),
    ],
)
def test_wrong_names_are_said(tensors, scalars, message) -> None:
    given = {
        name: torch.zeros(5, 8, dtype=torch.bfloat16)[:, : 8 if name == "x" else 1].squeeze()
        for name in tensors
    }
    with pytest.raises(ValueError, match=message):
        make_call(TABLE, VALUES, given, scalars)


def test_scalars_of_an_operator_are_planned_unless_given() -> None:
    inputs = Inputs.make(Case(3, 512, is_strided=True, wants_norm=False), 0)
    planned = inputs.call(Device("sm_90a", 132))
    assert (
        planned.options["num_ctas"]
        == inputs.op.plan(inputs.config, {"T": 3}, Device("sm_90a", 132))[0]
    )
    call = inputs.call(Device("sm_90a", 132), num_ctas=2)
    assert call.options["num_ctas"] == 2
    assert list(call.outputs) == ["out", "scale_out"]
    assert call.outputs["out"].stride() == (512 + PADDING, 1)
