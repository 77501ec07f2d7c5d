"""What follows from an operator's declaration, on an operator that is declared here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from dsv4.kernels.kit.args import In, OptIn, OptOut, Out, Scalar, Workspace, check_table
from dsv4.ops.fp8_linear import FP8_LINEAR
from dsv4.ops.moe.op import MOE
from dsv4.ops.runtime import registry, runner, tensors
from dsv4.ops.runtime.backend import Device
from dsv4.ops.runtime.kernel_op import KernelOp, Sizes
from dsv4.ops.runtime.library import LIBRARY
from tests.ops.fake_cuda import FakeCuda

pytestmark = pytest.mark.stage("op")


@dataclass(frozen=True)
class ScaleConfig:
    """y = factor * (x + bias)."""

    width: int
    factor: float = 2.0
    codes: str = "float32"

    def __post_init__(self) -> None:
        if not isinstance(self.width, int):
            raise TypeError(f"width: got {self.width!r}, needs an integer")


class Scale(KernelOp):
    """An operator with every kind of argument; its kernel is a function on CPU tensors."""

    name = "test_scale"
    config = ScaleConfig
    args = (
        In("x", "T d", "bfloat16", also=("float32",), align=16),
        In("rows", "T", "int32"),
        Out("y", "T d", "codes", public="out"),
        OptIn("bias", "d", "float32"),
        OptOut("sums", "T", "float32"),
        Workspace(),
        Scalar("num_parts"),
    )
    kernels: ClassVar = {"sm_90a": "tests.ops.runtime.no_such_kernel"}

    def values(self, config: ScaleConfig) -> Mapping[str, int | str]:
        return {"d": config.width, "codes": config.codes}

    def compiled_config(self, config: ScaleConfig, arch: str) -> ScaleConfig:
        return ScaleConfig(config.width, 0.0, config.codes)

    def plan(self, config: ScaleConfig, sizes: Sizes, device: Device) -> tuple[int]:
        planned.append(dict(sizes))
        return (2 if sizes["T"] < device.num_sms else 1,)

    def workspace_size(self, config: ScaleConfig, sizes: Sizes, scalars: tuple[int, ...]) -> int:
        return sizes["T"] * config.width if scalars[0] > 1 else 0

    def max_workspace_size(self, config: ScaleConfig, rows: int, device: Device) -> int:
        return rows * config.width

    def check_values(self, config: ScaleConfig, *tensors: Tensor | None) -> None:
        if (tensors[1] < 0).any():
            raise ValueError("rows: got a negative one")

    def torch(self, config: ScaleConfig, x, rows, y, bias, sums) -> None:
        total = x.float() if bias is None else x.float() + bias
        y.copy_(config.factor * total)
        if sums is not None:
            sums.copy_(y.float().sum(-1))

    def aot(self) -> Mapping[str, ScaleConfig]:
        return {"width 64": ScaleConfig(64)}


planned: list[dict[str, int]] = []


@pytest.fixture(scope="module")
def op() -> Iterator[Scale]:
    """The operator, registered for these tests alone."""
    op = Scale()
    yield op
    del registry.OPS[op.name]


def arguments(op: Scale, count: int = 3, dtype: torch.dtype = torch.bfloat16, **fields) -> tuple:
    """Arguments of the operator without the optional ones."""
    config = ScaleConfig(64, **fields)
    x = torch.arange(count * 64).view(count, 64).to(dtype)
    y = torch.full((count, 64), torch.nan)
    rows = torch.zeros(count, dtype=torch.int32)
    return x, rows, y, op.runner_id(config.width, config.factor, config.codes)


def test_schema_and_overload(op: Scale) -> None:
    assert str(op.overload._schema) == (
        "dsv4::test_scale(Tensor x, Tensor rows, Tensor(a!) y, int runner_id, Tensor? bias=None, "
        "Tensor(b!)? sums=None, Tensor(c!)? workspace=None) -> ()"
    )
    assert op.overload is torch.ops.dsv4.test_scale.default
    assert registry.OPS["test_scale"] is op
    assert LIBRARY.ns == "dsv4"


@pytest.mark.parametrize("extras", [False, True])
def test_opcheck(op: Scale, extras: bool) -> None:
    """Schema, fake tensors, autograd registration and AOT dispatch with dynamic sizes."""
    x, rows, y, runner_id = arguments(op, dtype=torch.float32)
    y.zero_()
    keywords = {"bias": torch.ones(64), "sums": torch.zeros(3)} if extras else {}
    torch.library.opcheck(op.overload, (x, rows, y, runner_id), keywords)


def test_cpu(op: Scale) -> None:
    x, rows, y, runner_id = arguments(op, factor=3.0)
    sums = torch.empty(3)
    op.overload(x, rows, y, runner_id, sums=sums, bias=torch.ones(64))
    torch.testing.assert_close(y, 3 * (x.float() + 1))
    torch.testing.assert_close(sums, y.sum(-1))


@pytest.mark.parametrize(
    ("name", "value", "kind", "message"),
    [
        (
            "x",
            torch.zeros(3, 64).double(),
            TypeError,
            r"x: got torch\.float64, needs .* or",
        ),
        (
            "x",
            torch.zeros(3, 32).bfloat16(),
            ValueError,
            r"x: got shape .*, needs \[T, 64\]",
        ),
        ("x", torch.zeros(64, 3).bfloat16().mT, ValueError, "x: got strides .* contiguous"),
        ("rows", torch.zeros(3), TypeError, r"rows: got torch\.float32, needs torch\.int32"),
        ("rows", torch.zeros(3).bool(), TypeError, r"rows: got torch\.bool, needs torch\.int32"),
        ("rows", torch.zeros(2).int(), ValueError, r"rows: got shape \(2,\), needs \[3\]"),
        ("rows", torch.zeros(3, device="meta").int(), ValueError, "rows: .* on meta, x is on cpu"),
        ("rows", -torch.ones(3).int(), ValueError, "rows: got a negative one"),
        ("y", torch.zeros(1, 64).expand(3, 64), ValueError, r"y \(out\): got strides \(0, 1\)"),
        ("y", torch.zeros(3, 64).half(), TypeError, r"y \(out\): got torch\.float16"),
        ("bias", torch.zeros(63), ValueError, r"bias: got shape \(63,\), needs \[64\]"),
        (
            "bias",
            torch.zeros(64).requires_grad_(),
            ValueError,
            "bias: requires grad",
        ),
    ],
)
def test_wrong_arguments_are_named(op: Scale, name, value, kind, message) -> None:
    x, rows, y, runner_id = arguments(op)
    given = {"x": x, "rows": rows, "y": y, "runner_id": runner_id} | {name: value}
    with pytest.raises(kind, match=message):
        op.overload(**given)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((None, None, None), "x: got None, needs a torch.Tensor"),
        ((torch.zeros(3, 64), [1, 2], None), "rows: got a list, needs a torch.Tensor"),
        ((torch.zeros(3, 64), torch.zeros(3), "y"), "y (out): got a str, needs a torch.Tensor"),
        ((torch.zeros(3, 64).to_sparse(), None), "x: got layout torch.sparse_coo"),
        ((torch.zeros(3), torch.zeros(3)), "x: got shape (3,), needs [T, d]"),
    ],
)
def test_failed_public_calls_are_explained(op: Scale, tensors: tuple, message: str) -> None:
    """What torch says of no tensor at all names nothing."""
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        op.explain(*tensors)
    op.explain(torch.zeros(3, 64), torch.zeros(3), None, None)


def test_outputs_have_memory_of_their_own(op: Scale) -> None:
    x, rows, _, runner_id = arguments(op, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"y \(out\): shares memory with x"):
        op.overload(x, rows, x, runner_id)
    y = torch.empty(4, 64)
    with pytest.raises(ValueError, match=r"sums: shares memory with y"):
        op.overload(x, rows, y[:3], runner_id, sums=y[2, :3])
    op.overload(x, rows, y[:3], runner_id, sums=y[3, :3])


def test_dtypes_may_follow_from_the_configuration(op: Scale) -> None:
    x, rows, _, _ = arguments(op)
    y = torch.empty(3, 64, dtype=torch.bfloat16)
    op.overload(x, rows, y, op.runner_id(64, 2.0, "bfloat16"))
    assert torch.equal(y, 2 * x)
    with pytest.raises(TypeError, match=r"y \(out\): got torch\.bfloat16, needs torch\.float32"):
        op.overload(x, rows, y, op.runner_id(64, 2.0, "float32"))


def test_runner_ids(op: Scale) -> None:
    assert op.runner_id(64, 2.0) == op.runner_id(64, 2.0) != op.runner_id(64, 3.0)
    assert runner.find_runner(op.runner_id(64, 2.0)) == (op, ScaleConfig(64, 2.0))
    with pytest.raises(TypeError, match=r"width: got .*, needs an integer"):
        op.runner_id([64])
    from dsv4.ops import fmha_runner_id

    foreign = fmha_runner_id(64, 8, 128, 64)
    with pytest.raises(ValueError, match="a runner of sparse_fmha_with_swa, not of test_scale"):
        op.overload(*arguments(op)[:3], foreign)


def test_compile_keys(op: Scale) -> None:
    """What the kernel takes at run time is no part of them."""
    one, other = (op.compile_key(ScaleConfig(64, factor), "sm_90a") for factor in (2.0, 3.0))
    assert one == other == registry.CompileKey(op.kernels["sm_90a"], "sm_90a", ScaleConfig(64, 0.0))
    assert one != op.compile_key(ScaleConfig(128), "sm_90a")
    with pytest.raises(ValueError, match="arch: got 'sm_100a', needs one of sm_90a"):
        op.compile_key(ScaleConfig(64), "sm_100a")


def test_what_is_compiled_ahead_of_time(op: Scale) -> None:
    keys = dict(registry.ahead_of_time("sm_90a"))
    assert keys["sm_90a, test_scale: width 64"] == op.compile_key(ScaleConfig(64), "sm_90a")
    assert not any("test_scale" in label for label, _ in registry.ahead_of_time("sm_100a"))


def test_launch(op: Scale, fake_cuda: FakeCuda) -> None:
    """The compiled function gets the table in order: tensors, stand-ins, workspace, scalars."""
    planned.clear()
    x, rows, y, runner_id = arguments(op)
    op.cuda(x, rows, y, runner_id)
    first, second, third, bias, sums, workspace, parts = fake_cuda.kernel.calls.pop()
    assert (first is x, second is rows, third is y) == (True, True, True)
    assert (bias.shape, sums.shape, parts) == ((0,), (0,), 2)
    assert workspace.numel() >= 3 * 64
    assert planned == [{"T": 3}]
    given = torch.ones(64), torch.empty(3), torch.zeros(3 * 64)
    op.cuda(x, rows, y, runner_id, *given)
    assert fake_cuda.kernel.calls.pop()[3:] == (*given, 2)
    assert len(planned) == 1, "planned again for a known size"
    op.cuda(*arguments(op, 200))
    assert fake_cuda.kernel.calls.pop()[5:][0].numel() == 0, "a workspace that nothing needs"


def test_launch_checks_what_the_kernel_cannot(op: Scale, fake_cuda: FakeCuda) -> None:
    x, rows, y, runner_id = arguments(op)
    with pytest.raises(ValueError, match=r"sums: got shape \(2,\), needs \[3\]"):
        op.cuda(x, rows, y, runner_id, None, torch.empty(2))
    with pytest.raises(ValueError, match="workspace: got 5 elements, needs 192"):
        op.cuda(x, rows, y, runner_id, None, None, torch.zeros(5))
    assert fake_cuda.kernel.calls == []


def test_launch_of_nothing(op: Scale, fake_cuda: FakeCuda) -> None:
    """No rows: nothing to launch, and wrong arguments are still wrong."""
    x, rows, y, runner_id = arguments(op, 0)
    op.cuda(x, rows, y, runner_id)
    assert fake_cuda.kernel.calls == []
    with pytest.raises(TypeError, match="rows"):
        op.cuda(x, rows.float(), y, runner_id)


def test_failed_launch_is_explained(op: Scale, fake_cuda: FakeCuda) -> None:
    """A kernel's terse complaint becomes the named error; others pass through."""

    def run(*_: object) -> None:
        raise RuntimeError("Mismatched Tensor on argument #2")

    fake_cuda.kernel = run
    x, rows, y, runner_id = arguments(op)
    with pytest.raises(TypeError, match=r"rows: got torch\.int64"):
        op.cuda(x, rows.long(), y, runner_id)
    buffer = torch.zeros(3 * 65 + 8, dtype=torch.bfloat16)
    unaligned = buffer.as_strided((3, 64), (65, 1))
    with pytest.raises(ValueError, match=r"x: got strides .* multiple of 16 bytes"):
        op.cuda(unaligned, rows, y, runner_id)
    with pytest.raises(RuntimeError, match="argument #2"):
        op.cuda(x, rows, y, runner_id)


def test_a_capture_is_warm_after_one_call(op: Scale, fake_cuda: FakeCuda) -> None:
    x, rows, y, runner_id = arguments(op)
    with (
        pytest.raises(RuntimeError, match=r"test_scale: .* cold .* call it once"),
        fake_cuda.capture(2),
    ):
        op.cuda(x, rows, y, runner_id)
    op.cuda(x, rows, y, runner_id)
    with fake_cuda.capture(2):
        op.cuda(x, rows, y, runner_id)
    eager, captured = (call[5] for call in fake_cuda.kernel.calls)
    assert eager is not captured


def test_other_dtypes_are_computed_by_torch(op: Scale, fake_cuda: FakeCuda) -> None:
    x, rows, y, runner_id = arguments(op, dtype=torch.float32)
    op.cuda(x, rows, y, runner_id)
    assert fake_cuda.kernel.calls == []
    assert torch.equal(y, 2 * x)


def test_probes_load_the_kernel(op: Scale) -> None:
    """One call of size 1 without optional tensors, with the workspace that it needs."""
    target = Device("sm_90a", 132)
    (call,) = op.probes(ScaleConfig(64), target, torch.device("cpu"))
    shapes = [tuple(value.shape) for value in call[:-1]]
    assert shapes == [(1, 64), (1,), (1, 64), (0,), (0,), (64,)]
    assert call[-1] == 2


def test_poison(op: Scale) -> None:
    """What no right result holds, for every dtype of an output."""
    kinds = [torch.float32, torch.bfloat16, torch.int32, torch.int8, torch.float8_e4m3fn]
    outputs = [torch.zeros(4).to(kind) for kind in kinds]
    tensors.poison_([*outputs, None])
    floats = [outputs[0], outputs[1], outputs[4].float()]
    assert all(output.isnan().all() for output in floats)
    assert (outputs[2] == -1).all() and (outputs[3] == -1).all()


def test_tables_have_one_order() -> None:
    with pytest.raises(ValueError, match="in this order"):
        check_table((OptIn("a", "T"), In("b", "T")))
    with pytest.raises(ValueError, match="different names"):
        check_table((In("a", "T"), Out("a", "T")))


def test_a_dtype_that_the_configuration_names_may_have_a_gradient() -> None:
    """Else a result comes without its derivative, or torch speaks of a leaf that is written."""
    assert In("x", "T", "x_dtype").has_gradient and Out("y", "T", "float32").has_gradient
    assert not In("x", "T", "x_dtype", differentiable=False).has_gradient
    assert not In("ids", "T", "int64").has_gradient
    assert not In("codes", "T", "float8_e4m3fn").has_gradient
    args = {arg.name: arg for op in (FP8_LINEAR, MOE) for arg in op.tensors}
    assert args["gate"].has_gradient and args["out"].has_gradient
