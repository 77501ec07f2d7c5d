"""Random configurations and arguments of an operator, from nothing but its declaration."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import fields, replace
from typing import Any

import numpy
import torch
from torch import Tensor

from dsv4.kernels.gemm.config import num_code_rows
from dsv4.kernels.kit.args import DTYPES, TensorArg, Values
from dsv4.ops.runtime.kernel_op import KernelOp
from tests.fuzz.values import LONG

INTEGERS = (0, 1, 2, 3, 4, 6, 8, 16, 32, 64, 100, 128, 256, 512, 1024)
SIZES = (0, 1, 1, 2, 3, 5, 9)  # of dimensions that no configuration fixes
MAX_ELEMENTS = 1 << 18  # of one tensor
HOSTILE_FIELDS = (
    *(True, -1, 10**30, 0.5, float("nan"), float("inf"), 1j, "1", "a\nb", b"1", [], [1], {}),
    *(torch.ones(2), torch.tensor(1), numpy.float32(1), object(), int, torch.float16),
    *LONG,
)


# Configurations beside the models', where no single field makes one of those small.
SMALL = {
    "latent_rows": [
        (64, 1e-6, "bf16", False),
        (64, 1e-6, "fp8", True, False, 64, 128),
        (8, 1e-6, "bf16", False, False, 4, 0, 2, True, "bf16", 4, "bf16"),
    ],
    "plain_linear": [(512, 40), (1024, 9, "bfloat16")],
    "linear_argmax": [(512, 40), (1024, 9, "bfloat16")],
    "grouped_linear": [
        (512, 256, 1),
        (512, 256, 2, "fp8", "float32", "float32"),
        (512, 256, 1, "bf16", "float32", "bfloat16", "float8_e4m3fn"),
    ],
    "merged_linear": [
        (512, "40 float8_e8m0fnu bfloat16, 8 bfloat16 float32"),
        (512, "8 float32 bfloat16, 136 float32 float32, 16 bfloat16 bfloat16, 24 bfloat16 float32"),
    ],
}


@functools.cache
def _models(op: KernelOp) -> list[Any]:
    small = [op.config(*given) for given in SMALL.get(op.name, ())]
    # Small ones as often as large ones, which hold more elements than a call may have.
    models = list(op.aot().values())
    return models + small * (len(models) if small else 0)


def any_config(dice: random.Random, op: KernelOp) -> Any:
    """A configuration that the operator takes, mostly a small one.

    One of the models', whose fields change one by one as long as the whole is still taken.
    """
    models = _models(op)
    config = dice.choice(models)
    texts = {value for model in models for value in vars(model).values() if isinstance(value, str)}
    for field in dice.sample(fields(config), len(fields(config))):
        for _ in range(8):
            value = _field(dice, str(field.type), getattr(config, field.name), [*DTYPES, *texts])
            try:
                config = replace(config, **{field.name: value})
                break
            except (TypeError, ValueError):
                continue
    return config


def _field(dice: random.Random, kind: str, value: Any, texts: list[str]) -> Any:
    """Another value of a field's type; for text often the one that is known to be right."""
    if "None" in kind and dice.random() < 0.3:
        return None
    if "bool" in kind:
        return dice.random() < 0.5
    if "int" in kind:
        return dice.choice(INTEGERS)
    if "float" in kind:
        return dice.choice((1e-6, 0.07, 1.0))
    return dice.choice(texts) if dice.random() < 0.3 else value


class Operands:
    """A call of an operator.

    Sizes that the configuration does not fix are drawn; relations between them that only the
    operator knows hold by chance, often enough.

    Attributes:
        tensors: in the order of the operator's table, None for an optional one left out.
    """

    def __init__(
        self, dice: random.Random, op: KernelOp, config: Any, like: Operands | None = None
    ) -> None:
        self.op, self.config = op, config
        self.values: Values = op.values(config)
        rows = dice.choice(SIZES)
        self.sizes = {
            name: int(self.values.get(name, dice.choice((rows, rows, rows, 0, 0, 1, 1, 5))))
            for arg in op.tensors
            for name in arg.shape
        }
        has_codes = any(arg.name == "codes" and arg.shape[0] == "C" for arg in op.tensors)
        if has_codes and dice.random() < 0.8:
            self._relate_codes()
        if like is not None:
            self.sizes = like.sizes
        largest = max(math.prod(self.sizes[name] for name in arg.shape) for arg in op.tensors)
        if largest > MAX_ELEMENTS:
            raise OverflowError
        # One of the dtypes that some arguments share.
        self.other = dice.random() < 0.3
        if like is not None:
            self.other = like.other
        self.tensors: list[Any] = [
            self._tensor(dice, arg) if self._is_given(dice, arg) else None for arg in op.tensors
        ]

    def _relate_codes(self) -> None:
        """Make rows of codes those of as many tokens as there are."""
        terms = getattr(self.config, "terms", 2)
        self.sizes["C"] = num_code_rows(self.sizes["T"], terms)
        if "X" in self.sizes:  # of a grouped linear
            self.sizes["X"] = self.sizes["T" if self.config.quantizes else "C"]

    def _is_given(self, dice: random.Random, arg: TensorArg) -> bool:
        """Whether a tensor is there: mostly as the operator needs it."""
        needed = self.op.needs(self.config, arg.name)
        if not arg.may_be_none:
            return True
        return dice.random() < 0.5 if needed is None or dice.random() < 0.03 else needed

    def _tensor(self, dice: random.Random, arg: TensorArg) -> Tensor:
        """A tensor that fits the table; rows of some inputs lie apart."""
        shape = [self.sizes[name] for name in arg.shape]
        gap = 16 if len(shape) > 1 and not arg.is_output and dice.random() < 0.3 else 0
        padded = (*shape[:-1], shape[-1] + gap)
        name = arg.also[0] if arg.also and self.other else arg.dtype_in(self.values)
        dtype = getattr(torch, name)
        if dtype.is_floating_point:
            values = torch.randn(padded).to(dtype)
        else:  # rows, lengths, codes: in range and out of it
            reach = dice.choice((3, 12, 127))
            values = torch.randint(0 if name == "uint8" else -reach, reach, padded, dtype=dtype)
        return values[..., : shape[-1]]

    def again(self, dice: random.Random) -> Operands:
        """Other tensors of the same sizes and dtypes."""
        return Operands(dice, self.op, self.config, self)

    @property
    def output_args(self) -> list[TensorArg]:
        """Declarations of the outputs, workspaces among them."""
        return [arg for arg in self.op.tensors if arg.is_output]

    @property
    def outputs(self) -> list[Any]:
        """What is passed as outputs."""
        return [tensor for arg, tensor in zip(self.op.tensors, self.tensors) if arg.is_output]

    @property
    def inputs(self) -> list[Any]:
        """What is passed as inputs."""
        return [tensor for arg, tensor in zip(self.op.tensors, self.tensors) if not arg.is_output]

    def arguments(self) -> list[Any]:
        """Arguments of the operator's overload."""
        values = [getattr(self.config, field.name) for field in fields(self.config)]
        place = self.op.num_required
        return [*self.tensors[:place], self.op.runner_id(*values), *self.tensors[place:]]


def hostile_field(dice: random.Random) -> Any:
    """What no configuration means: of another type, or far out of range."""
    return dice.choice(HOSTILE_FIELDS)


def hostile_tensor(dice: random.Random, arg: TensorArg, tensor: Any) -> Any:
    """What is passed in a tensor's place: of another kind, dtype, device, shape or layout."""
    if not isinstance(tensor, Tensor) or dice.random() < 0.15:
        nothing = (None, [], 1.5, "x", {}, dice.choice(LONG), numpy.zeros(3, dtype=numpy.float32))
        return dice.choice((*nothing, torch.zeros(3), torch.zeros(0)))
    return dice.choice(MUTATIONS)(dice, tensor)


def _retyped(dice: random.Random, tensor: Tensor) -> Tensor:
    name = dice.choice((*DTYPES, "bool", "float64", "complex64", "int16", "float8_e5m2"))
    return torch.zeros(tensor.shape, dtype=getattr(torch, name))


def _resized(dice: random.Random, tensor: Tensor) -> Tensor:
    shape = list(tensor.shape)
    place = dice.randrange(len(shape))
    shape[place] = max(0, shape[place] + dice.choice((-1, 1, 7, 128)))
    return torch.zeros(shape, dtype=tensor.dtype)


def _strided(dice: random.Random, tensor: Tensor) -> Tensor:
    wide = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)
    return wide[..., ::2]


def _expanded(dice: random.Random, tensor: Tensor) -> Tensor:
    return torch.zeros((1,) * tensor.dim(), dtype=tensor.dtype).expand(tensor.shape)


def _quantised(dice: random.Random, tensor: Tensor) -> Tensor:
    return torch.quantize_per_tensor(torch.zeros(tensor.shape), 0.1, 0, torch.qint8)


MUTATIONS = (
    _retyped,
    _retyped,
    _resized,
    _resized,
    _strided,
    _expanded,
    _quantised,
    lambda dice, tensor: torch.empty_like(tensor, device="meta"),
    lambda dice, tensor: tensor[None],
    lambda dice, tensor: tensor.flatten()[None, None] if tensor.dim() != 3 else tensor.flatten(),
    lambda dice, tensor: torch.zeros(tensor.shape).to_sparse(),
    lambda dice, tensor: torch.zeros(tensor.shape, requires_grad=True),
    lambda dice, tensor: tensor.clone(),
    lambda dice, tensor: tensor[(None,) * 500],
)
