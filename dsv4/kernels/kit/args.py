"""Argument tables: an operator's tensors and scalars, declared once.

A table is a tuple of declarations in the order of the operator and of its kernels' run-time call:
inputs, outputs, optional tensors, workspace, scalars. Schemas, checks, fake kernels and the fake
tensors that a kernel is compiled from follow from it.

Dimensions and dtypes are names. A name that `values` fixes (say `h` is 64, `d` is 512) is a
constant of the compiled kernel; every other dimension is a size known at run time, and one name is
one size. Imports neither torch nor cutlass: `fake_arguments` loads cutlass when it is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Bytes per element.
DTYPES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e8m0fnu": 1,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}
_CUTLASS_NAMES = {
    "bfloat16": "BFloat16",
    "float16": "Float16",
    "float32": "Float32",
    "float8_e4m3fn": "Float8E4M3FN",
    "float8_e8m0fnu": "Float8E8M0FNU",
    "int8": "Int8",
    "uint8": "Uint8",
    "int32": "Int32",
    "int64": "Int64",
}

Values = Mapping[str, int | str]


@dataclass(frozen=True)
class TensorArg:
    """A tensor argument; declare one as `In`, `Out`, `InOut`, `OptIn`, `OptOut`, `OptInOut`,
    `Scratch` or `Workspace`.

    The last dimension is contiguous, the strides of the others are the caller's.

    Attributes:
        name: in the schema and in messages.
        dims: names of the dimensions, "T h d".
        dtype: what kernels take: a name of `DTYPES`, or one that `values` resolves.
        also: further dtypes, which the torch implementation takes; arguments that have some share
            one dtype.
        align: bytes that every row starts at a multiple of, a number or a name that `values`
            resolves; default the size of an element.
        inner_align: the same of the strides of inner dimensions, a number or a name that `values`
            resolves; default `align`. Packed entries are less aligned than their pages.
        differentiable: whether a gradient could be asked for, and must be refused.
        public: name in the public function, where that is another.
        nullable: whether a required tensor may be None: it has a place among the positional
            arguments, and kernels get a tensor with no elements.
    """

    name: str
    dims: str
    dtype: str = "bfloat16"
    also: tuple[str, ...] = ()
    align: int | str | None = None
    inner_align: int | str | None = None
    differentiable: bool | None = None
    public: str = ""
    nullable: bool = False

    is_output = False
    is_optional = False

    @property
    def shape(self) -> tuple[str, ...]:
        """Names of the dimensions."""
        return tuple(self.dims.split())

    @property
    def may_be_none(self) -> bool:
        """Whether None may stand for it, so that kernels may get it without elements."""
        return self.is_optional or self.nullable

    @property
    def label(self) -> str:
        """What messages call it."""
        return f"{self.name} ({self.public})" if self.public else self.name

    @property
    def has_gradient(self) -> bool:
        """Whether gradients must be refused: of floating-point tensors unless said otherwise.

        A dtype that the configuration names may be one.
        """
        if self.differentiable is not None:
            return self.differentiable
        return self.dtype in ("bfloat16", "float16", "float32") or self.dtype not in DTYPES

    def dtype_in(self, values: Values) -> str:
        """Name of the dtype that kernels take under `values`."""
        return str(values.get(self.dtype, self.dtype))

    def row_alignment(self, values: Values) -> int:
        """Bytes that every row starts at a multiple of."""
        if isinstance(self.align, str):
            return int(values[self.align])
        return DTYPES[self.dtype_in(values)] if self.align is None else self.align

    def stride_alignments(self, values: Values) -> tuple[int, ...]:
        """Bytes that the stride of each dimension but the last is a multiple of."""
        align = self.row_alignment(values)
        inner = align if self.inner_align is None else self.inner_align
        inner = int(values[inner]) if isinstance(inner, str) else inner
        return (align, *(inner,) * (len(self.shape) - 2))[: len(self.shape) - 1]


class In(TensorArg):
    """A tensor that is read."""


class Out(TensorArg):
    """A tensor of the caller that is written."""

    is_output = True


class InOut(Out):
    """A tensor of the caller that is written in part; the rest stays as it is."""


class OptIn(In):
    """A tensor that is read, or None. Kernels get a tensor with no elements for None."""

    is_optional = True


class OptOut(Out):
    """A tensor that is written, or None. Kernels get a tensor with no elements for None."""

    is_optional = True


class OptInOut(InOut):
    """A tensor that is written in part, or None. Kernels get a tensor with no elements for None."""

    is_optional = True


class Scratch(OptOut):
    """A tensor that a launch writes for itself, or None: nothing that it holds is a result."""


@dataclass(frozen=True)
class Workspace(Scratch):
    """Scratch memory of a launch, zeros when new; None: the operator's own."""

    name: str = "workspace"
    dims: str = "workspace"
    dtype: str = "float32"
    align: int | None = 16
    differentiable: bool | None = False


@dataclass(frozen=True)
class Scalar:
    """An integer of the kernel's call, from the operator's `plan`; not in the schema."""

    name: str
    dtype: str = "int32"


Table = Sequence[TensorArg | Scalar]


def tensors_of(table: Table) -> tuple[TensorArg, ...]:
    """The tensors of a table, in order."""
    return tuple(arg for arg in table if isinstance(arg, TensorArg))


def required_of(table: Table) -> tuple[TensorArg, ...]:
    """The tensors with a place before the runner id; None may stand for nullable ones alone."""
    return tuple(arg for arg in tensors_of(table) if not arg.is_optional)


def optional_of(table: Table) -> tuple[TensorArg, ...]:
    """The tensors that may be None, the workspace among them."""
    return tuple(arg for arg in tensors_of(table) if arg.is_optional)


def scalars_of(table: Table) -> tuple[Scalar, ...]:
    """The scalars of a table, in order."""
    return tuple(arg for arg in table if isinstance(arg, Scalar))


def check_table(table: Table) -> None:
    """Refuse a table in another order than required tensors, optional ones, scalars."""
    rank = [2 if isinstance(arg, Scalar) else int(arg.is_optional) for arg in table]
    names = [arg.name for arg in table]
    if rank != sorted(rank):
        raise ValueError(f"arguments must be required, optional, scalars in this order: {names}")
    if len(set(names)) != len(names):
        raise ValueError(f"arguments must have different names: {names}")


def fake_arguments(table: Table, values: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a kernel's call for `cute.compile`, without data.

    Sizes that `values` does not fix are symbolic, and one symbol per name among the required
    tensors; one that may be None may have no rows, so its leading size is its own. Outer strides
    are symbolic multiples of the alignment.

    Returns:
        Positional arguments, the required tensors and the stream, and keywords, the others.
    """
    import cutlass
    from cutlass import cute

    sizes: dict[str, Any] = {}

    def size(name: str) -> Any:
        if name not in sizes:
            sizes[name] = values[name] if name in values else cute.sym_int()
        return sizes[name]

    def fake(arg: TensorArg, leading: Any = None) -> Any:
        shape = tuple(size(name) for name in arg.shape[1:])
        shape = (size(arg.shape[0]) if leading is None else leading, *shape)
        align = arg.row_alignment(values)
        size_of = DTYPES[arg.dtype_in(values)]
        steps = (max(1, bound // size_of) for bound in arg.stride_alignments(values))
        strides = (*(cute.sym_int64(divisibility=step) for step in steps), 1)
        dtype = getattr(cutlass, _CUTLASS_NAMES[arg.dtype_in(values)])
        return cute.runtime.make_fake_tensor(dtype, shape, strides, assumed_align=align)

    required = tuple(
        fake(arg, cute.sym_int() if arg.nullable else None) for arg in required_of(table)
    )
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    keywords: dict[str, Any] = {}
    for arg in optional_of(table):
        wide = isinstance(arg, Workspace)
        keywords[arg.name] = fake(arg, cute.sym_int64() if wide else cute.sym_int())
    for scalar in scalars_of(table):
        keywords[scalar.name] = getattr(cutlass, _CUTLASS_NAMES[scalar.dtype])(1)
    return (*required, stream), keywords


def compile_kernel(kernel: Any, table: Table, values: Values, options: str = "") -> Any:
    """Compile a kernel object from its argument table, to be called through tvm-ffi."""
    from cutlass import cute

    arguments, keywords = fake_arguments(table, values)
    options = f"--enable-tvm-ffi {options}".strip()
    return cute.compile(kernel, *arguments, **keywords, options=options)
