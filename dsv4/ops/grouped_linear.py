"""`grouped_linear`: FP8 weight whose groups of rows have inputs of their own, as function and
operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import index
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.kernels.gemm import grouped_plan as plans
from dsv4.kernels.gemm.config import K_BLOCK, num_code_rows
from dsv4.kernels.gemm.grouped_args import ARGS, values
from dsv4.kernels.gemm.grouped_config import CODES, GroupedLinearConfig, takes_groups
from dsv4.kernels.gemm.plan import RESIDENT_TOKENS
from dsv4.kernels.gemm.sm100 import grouped_plan as blackwell_plans
from dsv4.ops.aliasing import check_given
from dsv4.ops.code_terms import decode_codes
from dsv4.ops.quantize import dequantize_e4m3_blocks, qdq_e4m3, quantize_e4m3
from dsv4.ops.runtime.backend import Device
from dsv4.ops.runtime.kernel_op import KernelOp, Sizes
from dsv4.ops.runtime.launch import Launch
from dsv4.ops.runtime.state import State, smallest_call
from dsv4.quoting import quoted

# In features and rows of a group, groups: the first half of the output projection.
MODEL_GROUPS = {"Flash wo_a": (4096, 1024, 8), "Pro wo_a": (4096, 1024, 16)}

# Tilings of an architecture, and which one a launch takes.
PLANS = {"sm_90a": plans, "sm_100a": blackwell_plans, "sm_103a": blackwell_plans}


class GroupedLinear(KernelOp):
    """y = x W^T of each group, W in e4m3 with a scale per 128 x 128 elements."""

    name = "grouped_linear"
    config = GroupedLinearConfig
    args = ARGS
    kernels: ClassVar = {
        "sm_90a": "dsv4.kernels.gemm.sm90.grouped_linear",
        "sm_100a": "dsv4.kernels.gemm.sm100.grouped_linear",
        "sm_103a": "dsv4.kernels.gemm.sm100.grouped_linear",
    }
    early = ("weight", "scale")

    def values(self, config: GroupedLinearConfig) -> Mapping[str, int | str]:
        return values(config)

    def plan(self, config: GroupedLinearConfig, sizes: Sizes, device: Device) -> tuple[int, ...]:
        """Index of the tiling, and number of SMs."""
        if "X" in sizes:
            _check_rows(config, sizes["X"], sizes["T"])
        found = PLANS[device.arch].choose(config, sizes["T"], device.num_sms)
        return found, device.num_sms

    def needs(self, config: GroupedLinearConfig, name: str) -> bool | None:
        needs = {"out_scale": config.rounds_output, "x_scale": not config.quantizes}
        return needs.get(name)

    def check_sizes(self, config: GroupedLinearConfig, *tensors: Tensor | None) -> None:
        given = {arg.name: tensor for arg, tensor in zip(self.tensors, tensors, strict=True)}
        x, out = given["x"], given["out"]
        for of in ("out", "x"):
            name = f"{of}_scale"
            has_scale = given[name] is not None
            if has_scale != self.needs(config, name):
                got = "a tensor" if has_scale else "nothing"
                raise ValueError(f"{name}: got {got}, {of} is {_name(given[of].dtype)}")
        if not config.quantizes and x.dtype == torch.float32:
            raise TypeError(f"x: got {x.dtype}, x_scale belongs to codes")
        _check_rows(config, x.shape[0], out.shape[0])

    def make_launch(self, state: State) -> Launch:
        """The usual launch; where inputs or outputs are codes, behind a check of the optional
        tensors that the kernels then need: the compiled function takes any number of rows."""
        launch, config = super().make_launch(state), state.config
        has_scratch = config.quantizes and config.rounds_output
        needed = {
            "codes": has_scratch,
            "code_scales": has_scratch,
            "out_scale": config.rounds_output,
            "x_scale": not config.quantizes,
        }
        # By place behind the runner's id.
        places = [(i, arg.name) for i, arg in enumerate(self.tensors, 1) if needed.get(arg.name)]
        if not places:
            return launch
        out = self.num_required - 1

        def checked(*arguments: Any) -> None:
            tokens = arguments[out].shape[0]
            for i, name in places:
                rows = num_code_rows(tokens, config.terms) if name == "codes" else tokens
                tensor = arguments[i] if i < len(arguments) else None
                if tensor is None or tensor.shape[0] != rows:
                    got = "nothing" if tensor is None else f"{tensor.shape[0]} rows"
                    raise ValueError(f"{name}: got {got}, needs {rows} rows")
            launch(*arguments)

        return checked

    def torch(
        self,
        config: GroupedLinearConfig,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        out: Tensor,
        codes: Tensor | None,
        code_scales: Tensor | None,
        out_scale: Tensor | None = None,
        x_scale: Tensor | None = None,
    ) -> None:
        if x_scale is not None:
            x = decode_codes(x, x_scale, config.terms)
        elif config.act == "fp8":
            x = qdq_e4m3(x, K_BLOCK)
        # e4m3 times a power of two is exact in bf16; times an arbitrary fp32 scale it is not. And
        # bf16 products are rounded to bf16.
        out_dtype = torch.bfloat16 if config.rounds_output else out.dtype
        is_exact = out_dtype == x.dtype and config.scale_dtype == "float8_e8m0fnu"
        compute = x.dtype if is_exact else torch.float32
        dense = dequantize_e4m3_blocks(weight, scale, (K_BLOCK, K_BLOCK), compute)
        groups = x.to(compute).unflatten(1, (config.groups, -1)).transpose(0, 1)
        y = torch.bmm(groups, dense.unflatten(0, (config.groups, -1)).mT).transpose(0, 1).flatten(1)
        if config.rounds_output:
            codes, scales = quantize_e4m3(y.bfloat16(), K_BLOCK)
            out.copy_(codes)
            out_scale.copy_(scales)
        else:
            out.copy_(y)

    def probes(
        self, config: GroupedLinearConfig, target: Device, device: torch.device
    ) -> Iterator[tuple[Tensor | int, ...]]:
        """One token through every tiling, with the scratch that leads to the quantisation."""
        for tiling in range(len(PLANS[target.arch].tilings(config))):
            call = list(smallest_call(self, config, (tiling, target.num_sms), device))
            width, place = config.groups * config.in_features, self.num_required
            codes, scales = _scratch(1, width, config.terms, device)
            if config.quantizes:
                call[place : place + 2] = codes, scales
            else:
                call[0], call[place + 3] = codes.view(torch.uint8).zero_().view(codes.dtype), scales
            if config.rounds_output:
                call[place + 2] = _scales(1, config.out_features, device)
            yield tuple(call)

    def aot(self) -> Mapping[str, GroupedLinearConfig]:
        """The output projections of Flash and Pro: of few tokens in bf16, of more in codes."""
        found = {label: GroupedLinearConfig(*given) for label, given in MODEL_GROUPS.items()}
        for label, config in tuple(found.items()):
            found[f"{label}, codes"] = rounding = replace(config, out_dtype=CODES)
            found[f"{label}, codes of codes"] = replace(rounding, x_dtype=CODES)
        return found


GROUPED_LINEAR = GroupedLinear()
_op = GROUPED_LINEAR.overload


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    x_scale: Tensor | None = None,
    act: str = "bf16",
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply each group of columns of T tokens with its rows of an FP8 weight.

    y[t, m] = sum over k of x[t, g K + k] * weight[m, k] * scale[m // 128, k // 128], where g is the
    group of row m: M rows and groups * K columns of x lie in as many equal groups. x is not
    rounded: on Hopper and Blackwell it is multiplied as the sum of two e4m3 terms, which differ
    from it by less than 2^-21 of the largest value of 128, and not at all where it is at least
    2^-14 of that. On Hopper a k block of 128 is summed by the tensor core, then scaled, and added
    in fp32 in an order that K alone decides; on Blackwell sums are those of `fp8_linear`. The bits
    of a token depend on neither T nor the other tokens, which may hold anything. Elsewhere torch
    multiplies the decoded weight.

    Launches may begin while the one before ends: `weight` and `scale` must not be what a kernel of
    this package wrote just before.

    Args:
        x: [T, groups * K] bfloat16; or float32, on GPUs too by the torch implementation. K is a
            multiple of 512 up to 8,192. Or float8_e4m3fn with `x_scale`: codes of `act`, for "bf16"
            those of two terms, in rows as `sparse_fmha_paged_fp8` and `dsv4.ops.code_terms` have
            them.
        weight: [M, K] float8_e4m3fn, M / groups a multiple of 256.
        scale: [M / 128, K / 128] float8_e8m0fnu, or float32 as in the Base checkpoints.
        x_scale: [T, groups * K / 128] float8_e8m0fnu.
        act: "bf16", or "fp8": x is rounded to e4m3 with one power-of-two scale per 128 elements, as
            `dsv4.ops.quantize.quantize_e4m3` does it.
        out: [T, M] to write into; default a new tensor.
        out_dtype: bfloat16 or float32; default that of `out`, else of x, bfloat16 for codes.

    Returns:
        y [T, M].

    Raises:
        ValueError, TypeError: an argument does not fit, or requires grad; the message names it.
    """
    try:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            GROUPED_LINEAR.check_no_gradients(x, weight, scale, out, None, None, None, x_scale)
        tokens, width = _sizes(x, x_scale)
        if out_dtype is None:
            out_dtype = x.dtype if out is None else out.dtype
            if out is None and x.dtype == torch.float8_e4m3fn:
                out_dtype = torch.bfloat16
        name = _name(out_dtype)
        if name == CODES:
            raise ValueError(f"out_dtype: got {name}, which `grouped_linear_fp8` makes")
        identity = _runner_id_of(x, weight, scale, act, name)
        if out is None:
            out = torch.empty((tokens, weight.shape[0]), dtype=out_dtype, device=x.device)
        else:
            check_given(GROUPED_LINEAR, x, weight, scale, out, None, None, None, x_scale)
        if x_scale is not None:
            _op(x, weight, scale, out, identity, None, None, None, x_scale)
        elif x.dtype == torch.bfloat16 and x.is_cuda and tokens > RESIDENT_TOKENS:
            scratch = _scratch(tokens, width, _terms(act), x.device)
            _op(x, weight, scale, out, identity, *scratch)
        else:
            _op(x, weight, scale, out, identity)
    except Exception:
        GROUPED_LINEAR.explain(x, weight, scale, out, None, None, None, x_scale)
        if not isinstance(out_dtype, torch.dtype | None):
            raise TypeError(f"out_dtype: got {quoted(out_dtype)}, needs a torch.dtype") from None
        raise
    return out


def grouped_linear_fp8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    x_scale: Tensor | None = None,
    act: str = "bf16",
) -> tuple[Tensor, Tensor]:
    """`grouped_linear` whose results are rounded as the input of the next FP8 linear.

    y in bfloat16 is rounded to e4m3 with one power-of-two scale per 128 rows of the weight, as
    `dsv4.ops.quantize.quantize_e4m3` does it: the bits of the two calls, in the launch of the
    first.

    Args:
        x, weight, scale, x_scale, act: as `grouped_linear` takes them.

    Returns:
        (codes [T, M] float8_e4m3fn, scales [T, M / 128] float8_e8m0fnu), what `fp8_linear` takes as
        `x` and `x_scale`.

    Raises:
        ValueError, TypeError: an argument does not fit, or requires grad; the message names it.
    """
    try:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            GROUPED_LINEAR.check_no_gradients(x, weight, scale, None, None, None, None, x_scale)
        tokens, width = _sizes(x, x_scale)
        rows = weight.shape[0]
        identity = _runner_id_of(x, weight, scale, act, CODES)
        out = torch.empty((tokens, rows), dtype=torch.float8_e4m3fn, device=x.device)
        out_scale = _scales(tokens, rows, x.device)
        scratch = (None, None)
        if x_scale is None and x.is_cuda:
            scratch = _scratch(tokens, width, _terms(act), x.device)
        _op(x, weight, scale, out, identity, *scratch, out_scale, x_scale)
    except Exception:
        GROUPED_LINEAR.explain(x, weight, scale, None, None, None, None, x_scale)
        raise
    return out, out_scale


def _runner_id_of(x: Tensor, weight: Tensor, scale: Tensor, act: str, out_dtype: str) -> int:
    """Id of a call's configuration; ValueError where x and the weight are not of whole groups."""
    width, (rows, in_features) = x.shape[1], weight.shape
    groups = width // in_features
    if width % in_features or rows % max(groups, 1):
        raise ValueError(
            f"x: got {width} columns, needs those of groups of {in_features}, of a number that "
            f"the weight's {rows} rows are a multiple of"
        )
    return grouped_linear_runner_id(
        index(in_features),
        index(rows) // max(groups, 1),
        index(groups),
        act,
        _name(scale.dtype),
        out_dtype,
        CODES if x.dtype == torch.float8_e4m3fn else "bfloat16",
    )


@torch.compiler.assume_constant_result
def grouped_linear_runner_id(
    in_features: int,
    group_rows: int,
    groups: int,
    act: str = "bf16",
    scale_dtype: str = "float8_e8m0fnu",
    out_dtype: str = "bfloat16",
    x_dtype: str = "bfloat16",
) -> int:
    """Id of a configuration: what `torch.ops.dsv4.grouped_linear` takes.

    Args:
        in_features, group_rows: K and rows of a group.
        groups: their number.
        act: "bf16", also for float32, or "fp8".
        scale_dtype: of the weight's scales, "float8_e8m0fnu" or "float32".
        out_dtype: "bfloat16", "float32", or "float8_e4m3fn" of `grouped_linear_fp8`.
        x_dtype: "bfloat16", also for float32, or "float8_e4m3fn" of codes.
    """
    return GROUPED_LINEAR.runner_id(
        in_features, group_rows, groups, act, scale_dtype, out_dtype, x_dtype
    )


def takes(in_features: int, group_rows: int, block: tuple[int, int]) -> bool:
    """Whether `grouped_linear` takes weights of these groups with scales of these blocks."""
    return takes_groups(in_features, group_rows) and tuple(block) == (K_BLOCK, K_BLOCK)


def _sizes(x: Tensor, x_scale: Tensor | None) -> tuple[int, int]:
    """Tokens, and columns of all groups."""
    rows, width = x.shape
    return (rows if x_scale is None else x_scale.shape[0]), width


def _check_rows(config: GroupedLinearConfig, rows: int, tokens: int) -> None:
    """Refuse x with other rows than those of so many tokens: ValueError."""
    if config.quantizes and rows != tokens:
        raise ValueError(f"out: got {tokens} rows, x of {rows} rows needs {rows}")
    needed = num_code_rows(tokens, config.terms)
    if not config.quantizes and rows != needed:
        raise ValueError(f"x: got {rows} rows, codes of {tokens} tokens need {needed}")


def _scratch(tokens: int, width: int, terms: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes and scales that a launch makes of many tokens before it streams them."""
    shape = (num_code_rows(tokens, terms), width)
    codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    return codes, _scales(tokens, width, device)


def _scales(tokens: int, width: int, device: torch.device) -> Tensor:
    """Scales of the codes of tokens."""
    shape = (tokens, width // K_BLOCK)
    return torch.empty(shape, dtype=torch.float8_e8m0fnu, device=device)


def _terms(act: str) -> int:
    return 2 if act == "bf16" else 1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
