"""Linear layers without bias, plain or with FP8 weights, one by one or several of one input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.kernels.gemm.plan import RESIDENT_TOKENS
from dsv4.layers.module import Module, empty_parameter
from dsv4.ops.fp8_linear import fp8_linear, takes
from dsv4.ops.grouped_linear import grouped_linear, grouped_linear_fp8
from dsv4.ops.grouped_linear import takes as takes_groups
from dsv4.ops.head_rotation import HeadRotation, takes_heads
from dsv4.ops.index_rounding import IndexRounding
from dsv4.ops.linear_argmax import linear_argmax
from dsv4.ops.merged_linear import has_room, merged_linear
from dsv4.ops.plain_linear import plain_linear
from dsv4.ops.plain_linear import takes as takes_plain
from dsv4.ops.quantize import dequantize_e4m3_blocks, qdq_e4m3
from dsv4.quoting import quoted

if TYPE_CHECKING:
    from dsv4.config.model_config import ModelConfig

ACTIVATION_BLOCK = 128
OPERATOR_DTYPES = (torch.bfloat16, torch.float32)  # of the input of `fp8_linear`
Epilogue = HeadRotation | IndexRounding
SCALE_DTYPES = {"e8m0": torch.float8_e8m0fnu, "float32": torch.float32}


def linear_options(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str | None
) -> dict[str, Any]:
    """Return the options of the linears that a checkpoint of this configuration quantises."""
    return {
        "scheme": config.linear_scheme,
        "block": config.fp8_block,
        "scale_dtype": SCALE_DTYPES[config.scale_dtype],
        "dtype": dtype,
        "device": device,
    }


class Rounded(NamedTuple):
    """Input of FP8 linears, rounded by the kernel that made it.

    Attributes:
        values: [..., in] bfloat16, before that.
        codes: [T, in] float8_e4m3fn, T the product of the leading dimensions.
        scale: [T, in / 128] float8_e8m0fnu.
    """

    values: Tensor
    codes: Tensor
    scale: Tensor


class Linear(Module):
    """y = x W^T.

    With scheme "fp8" the weight stays e4m3 with one scale per block, and the input is rounded to
    FP8 per 128 elements, as in the forward pass the weights were trained for (official
    inference/model.py, `linear`).

    Attributes:
        weight: [out, in], in `dtype` or float8_e4m3fn. Without a `dtype`: float32, whatever the
            model is converted to.
        scale: [ceil(out / block[0]), ceil(in / block[1])]; only with scheme "fp8".
        is_wide: whether y is float32 whatever x is; only without a scheme.

    Raises:
        ValueError: unknown scheme, or FP8 inputs that do not fill whole groups of 128.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        scheme: str | None = None,
        block: tuple[int, int] = (128, 128),
        scale_dtype: torch.dtype = torch.float8_e8m0fnu,
        dtype: torch.dtype | None = None,
        is_wide: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if scheme not in (None, "fp8"):
            raise ValueError(f"scheme must be None or 'fp8', got {quoted(scheme)}")
        self.in_features = in_features
        self.out_features = out_features
        self.scheme = scheme
        self.block = block
        self.is_wide = is_wide
        stored = torch.float8_e4m3fn if scheme else dtype or torch.float32
        self.plain = ("weight",) if scheme is None and dtype is not None else ()
        self.weight = empty_parameter((out_features, in_features), stored, device)
        if scheme:
            if in_features % ACTIVATION_BLOCK:
                raise ValueError(
                    f"in_features of an FP8 linear must be a multiple of {ACTIVATION_BLOCK}, "
                    f"got {in_features}"
                )
            blocks = (-(-out_features // block[0]), -(-in_features // block[1]))
            self.scale = empty_parameter(blocks, scale_dtype, device)

    def forward(self, x: Tensor | Rounded, epilogue: Epilogue | None = None) -> Tensor:
        """[..., in] -> [..., out] in the dtype of `x`, in float32, or in the codes of an epilogue.

        Args:
            epilogue: of the outputs, of which there is one for all rows of x; `IndexRounding` where
                `takes_codes`.
        """
        values = x.values if isinstance(x, Rounded) else x
        if epilogue is not None and not self._has_epilogue(values, epilogue):
            y = self(x)
            epilogue.apply_(y.view(-1, self.out_features))
            return y
        if isinstance(x, Rounded):
            if self.takes_codes(values):
                y = fp8_linear(x.codes, self.weight, self.scale, x_scale=x.scale, epilogue=epilogue)
                return y.view(*values.shape[:-1], self.out_features)
            x = values
        if self.is_wide:
            return self._wide(x)
        if self.scheme is None:
            return F.linear(x, self.weight)
        if x.dtype in OPERATOR_DTYPES and takes(self.in_features, self.block):
            rows = x.reshape(-1, self.in_features)
            y = fp8_linear(rows, self.weight, self.scale, epilogue=epilogue)
            return y.view(*x.shape[:-1], self.out_features)
        rounded = qdq_e4m3(x, ACTIVATION_BLOCK)
        compute = self._exact_dtype(x.dtype)
        return F.linear(rounded.to(compute), self.dense_weight(compute)).to(x.dtype)

    def takes_codes(self, x: Tensor) -> bool:
        """Whether kernels multiply this input by the weight as codes, which another one can make on
        its way; elsewhere they would only be made twice."""
        is_taken = self.scheme is not None and takes(self.in_features, self.block)
        return is_taken and x.is_cuda and x.dtype == torch.bfloat16

    def argmax(self, x: Tensor) -> Tensor:
        """Index of the largest of each row's outputs, [..., in] -> [...] int64, as `linear_argmax`
        finds it; only where `has_argmax`."""
        rows = x.reshape(-1, self.in_features)
        return linear_argmax(rows, self.weight).view(x.shape[:-1])

    def has_argmax(self, x: Tensor) -> bool:
        """Whether a kernel finds the largest outputs of such an input without writing them."""
        dtypes = {x.dtype, self.weight.dtype}
        return (
            self.is_wide
            and x.is_cuda
            and dtypes == {torch.bfloat16}
            and takes_plain(self.in_features)
        )

    def _wide(self, x: Tensor) -> Tensor:
        """y in float32: products of bf16 are exact there."""
        if self.has_argmax(x):
            rows = x.reshape(-1, self.in_features)
            y = plain_linear(rows, self.weight, out_dtype=torch.float32)
            return y.view(*x.shape[:-1], self.out_features)
        return F.linear(x.float(), self.weight.float())

    def _has_epilogue(self, x: Tensor, epilogue: Epilogue) -> bool:
        """Whether the operator of this linear does what is asked for."""
        return (
            self.scheme is not None
            and x.dtype in OPERATOR_DTYPES
            and takes(self.in_features, self.block)
            and (
                isinstance(epilogue, IndexRounding)
                or takes_heads(epilogue.head_dim, epilogue.rope.shape[1])
            )
        )

    def dense_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] in `dtype`."""
        if self.scheme is None:
            return self.weight.to(dtype)
        return dequantize_e4m3_blocks(self.weight, self.scale, self.block, dtype)

    def _exact_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # e4m3 times a power of two is exact in bf16; times an arbitrary fp32 scale it is not.
        return dtype if self.scale.dtype == torch.float8_e8m0fnu else torch.float32

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, scheme={self.scheme}"


def project(
    x: Tensor | Rounded, linears: Sequence[Linear], *epilogues: Epilogue | None
) -> list[Tensor]:
    """Each linear of the same x [..., in]: in one launch where their weights allow it.

    Args:
        linears: those with FP8 weights first.
        epilogues: of the first ones' outputs.
    """
    own = [*epilogues, *[None] * (len(linears) - len(epilogues))]
    values = x.values if isinstance(x, Rounded) else x
    fp8 = [linear for linear in linears if linear.scheme is not None]
    plain = linears[len(fp8) :]
    can_merge = (
        len(linears) > 1
        and values.dtype in OPERATOR_DTYPES
        and has_room(len(fp8), len(plain))
        and all(takes(linear.in_features, linear.block) for linear in fp8)
        and all(linear.weight.dtype == values.dtype for linear in plain)
        and all(e is None or linear._has_epilogue(values, e) for linear, e in zip(linears, own))
    )
    if not can_merge:
        return [linear(x, e) if e else linear(x) for linear, e in zip(linears, own, strict=True)]
    ys = merged_linear(
        values.reshape(-1, values.shape[-1]),
        [linear.weight for linear in linears],
        [linear.scale for linear in fp8],
        x_codes=x.codes if isinstance(x, Rounded) else None,
        x_scale=x.scale if isinstance(x, Rounded) else None,
        out_dtypes=[_out_dtype(linear, e, values) for linear, e in zip(linears, own)],
        epilogues=own,
    )
    return [y.view(*values.shape[:-1], -1) for y in ys]


def _out_dtype(linear: Linear, epilogue: Epilogue | None, x: Tensor) -> torch.dtype:
    if isinstance(epilogue, IndexRounding):
        return torch.float8_e4m3fn
    return torch.float32 if linear.is_wide else x.dtype


class GroupedLinear(Linear):
    """One linear per group of inputs, stacked along the outputs; `x` itself is never rounded.

    The first half of the output projection: `groups` linears [in] -> [out] held as one weight
    [groups * out, in].
    """

    def __init__(self, in_features: int, out_features: int, groups: int, **options: Any) -> None:
        super().__init__(in_features, groups * out_features, **options)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        """[..., groups * in] -> [..., groups * out]."""
        if self._has_operator(x):
            rows = x.reshape(-1, x.shape[-1])
            return grouped_linear(rows, self.weight, self.scale).view(*x.shape[:-1], -1)
        weight = self.dense_weight(x.dtype).view(self.groups, -1, self.in_features)
        flat = x.reshape(-1, self.groups, self.in_features).transpose(0, 1)
        return torch.bmm(flat, weight.mT).transpose(0, 1).reshape(*x.shape[:-1], -1)

    def _has_operator(self, x: Tensor) -> bool:
        group_rows = self.out_features // self.groups
        return (
            self.scheme is not None
            and x.dtype in OPERATOR_DTYPES
            and takes_groups(self.in_features, group_rows, self.block)
        )


def are_chained(first: GroupedLinear, second: Linear, x: Tensor) -> bool:
    """Whether `project_twice` of rows like those of x [..., n] runs on codes: both are kernels, and
    tokens more than `RESIDENT_TOKENS`, up to which each rounds its input while its weights are on
    their way."""
    tokens = x.shape[:-1].numel()
    return tokens > RESIDENT_TOKENS and first._has_operator(x) and second.takes_codes(x)


def project_twice(
    x: Tensor | tuple[Tensor, Tensor], first: GroupedLinear, second: Linear
) -> Tensor:
    """second(first(x)), of x [T, groups * in]; what lies between is rounded where it is made, if
    they `are_chained`.

    Args:
        x: or its codes and scales, as `sparse_fmha_paged_fp8` gives them, if they `are_chained`.
    """
    scale = None
    if isinstance(x, tuple):
        x, scale = x
    elif not are_chained(first, second, x):
        return second(first(x))
    codes, between = grouped_linear_fp8(x, first.weight, first.scale, x_scale=scale)
    return fp8_linear(codes, second.weight, second.scale, x_scale=between)
