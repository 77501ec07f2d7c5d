"""`merged_linear`: products of one input with several weights, as function and operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import index
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.kernels.gemm import epilogues as kinds
from dsv4.kernels.gemm import merged_plan as plans
from dsv4.kernels.gemm.config import K_BLOCK, Fp8LinearConfig
from dsv4.kernels.gemm.merged_args import ARGS, values
from dsv4.kernels.gemm.merged_config import (
    MOST_FP8,
    MOST_PLAIN,
    PLAIN,
    MergedLinearConfig,
    Weight,
    weights_text,
)
from dsv4.kernels.gemm.plan import RESIDENT_TOKENS
from dsv4.kernels.gemm.sm100 import merged_plan as blackwell_plans
from dsv4.kernels.kit.args import In, Scratch, tensors_of
from dsv4.ops.aliasing import check_epilogue, check_given
from dsv4.ops.fp8_linear import FP8_LINEAR, MODEL_EPILOGUE, scratch
from dsv4.ops.head_rotation import HeadRotation, check_table, epilogue_config
from dsv4.ops.index_rounding import IndexRounding
from dsv4.ops.runtime import tensors as make
from dsv4.ops.runtime.backend import Device
from dsv4.ops.runtime.checks import check_is_tensor
from dsv4.ops.runtime.kernel_op import KernelOp, Sizes
from dsv4.ops.runtime.launch import Launch
from dsv4.ops.runtime.state import State
from dsv4.quoting import quoted

SCRATCH = tuple(arg.name for arg in ARGS if isinstance(arg, Scratch))
FIRST_OF_HEADS = [arg.name for arg in tensors_of(ARGS)].index("rope")
# Tilings of an architecture, and which one a launch takes.
PLANS = {"sm_90a": plans, "sm_100a": blackwell_plans, "sm_103a": blackwell_plans}
Epilogue = HeadRotation | IndexRounding
E8M0, F32, BF16 = "float8_e8m0fnu", "float32", "bfloat16"


def _of_layer(*rows: int, plain: Sequence[tuple[int, str]] = (), epilogue: str = "") -> str:
    first, *others = rows
    fp8 = [Weight(first, E8M0, BF16, epilogue), *(Weight(count, E8M0, BF16) for count in others)]
    return weights_text([*fp8, *(Weight(count, PLAIN, dtype) for count, dtype in plain)])


# What the layers of Flash and Pro multiply one input with: width of the input, weights.
MODEL_INPUTS = {
    "Flash CSA x": (
        4096,
        _of_layer(1024, 512, plain=[(1024, F32)] * 2 + [(256, F32)] * 2 + [(64, BF16)]),
    ),
    "Flash HCA x": (4096, _of_layer(1024, 512, plain=[(512, F32)] * 2)),
    "Flash SWA x": (4096, _of_layer(1024, 512)),
    "Flash CSA latent": (1024, _of_layer(32768, 8192, epilogue=MODEL_EPILOGUE)),
    "Flash shared x": (4096, _of_layer(2048, 2048)),
    "Pro CSA x": (
        7168,
        _of_layer(1536, 512, plain=[(1024, F32)] * 2 + [(256, F32)] * 2 + [(64, BF16)]),
    ),
    "Pro HCA x": (7168, _of_layer(1536, 512, plain=[(512, F32)] * 2)),
    "Pro SWA x": (7168, _of_layer(1536, 512)),
    "Pro CSA latent": (1536, _of_layer(65536, 8192, epilogue=MODEL_EPILOGUE)),
}


class MergedLinear(KernelOp):
    """y_i = x W_i^T: FP8 weights with x in e4m3, plain ones with x as it is."""

    name = "merged_linear"
    config = MergedLinearConfig
    args = ARGS
    kernels: ClassVar = {
        "sm_90a": "dsv4.kernels.gemm.sm90.merged_linear",
        "sm_100a": "dsv4.kernels.gemm.sm100.merged_linear",
        "sm_103a": "dsv4.kernels.gemm.sm100.merged_linear",
    }
    early = tuple(
        arg.name
        for arg in ARGS
        if arg.name.startswith(("weight_", "scale_", "plain_")) and isinstance(arg, In)
    )

    def values(self, config: MergedLinearConfig) -> Mapping[str, int | str]:
        return values(config)

    def plan(self, config: MergedLinearConfig, sizes: Sizes, device: Device) -> tuple[int, ...]:
        """Index of the tiling, and number of SMs."""
        found = PLANS[device.arch].choose(config, sizes["T"], device.num_sms)
        return found, device.num_sms

    def needs(self, config: MergedLinearConfig, name: str) -> bool | None:
        squares = _of_heads(config, "squares", kinds.HeadRotation)
        return None if name in SCRATCH + squares else name in _needed(config)

    def check_sizes(self, config: MergedLinearConfig, *tensors: Tensor | None) -> None:
        for arg, tensor in zip(self.tensors, tensors):
            if self.needs(config, arg.name) not in (None, tensor is not None):
                has = "nothing" if tensor is None else "a tensor"
                raise ValueError(f"{arg.name}: got {has}, the weights are {quoted(config.weights)}")
        rope = self._given(*tensors)["rope"]
        if rope is not None:
            check_table(rope)

    def make_launch(self, state: State) -> Launch:
        """The usual launch behind a check of what may be absent: the compiled function takes any
        number of rows there, and reads past the end of too few."""
        launch, place = super().make_launch(state), self.num_required
        rows = _needed(state.config)
        # The runner's id stands between required tensors and optional ones.
        optional = [
            (place + 1 + i, arg.name, rows[arg.name])
            for i, arg in enumerate(self.tensors[place:])
            if arg.name in rows
        ]

        def checked(*arguments: Any) -> None:
            tokens = arguments[0].shape[0]
            for i, name, count in optional:
                tensor = arguments[i] if i < len(arguments) else None
                found = 0 if tensor is None else tensor.shape[0]
                needed = tokens if count is None else count or max(found, 1)
                if tensor is None or found != needed:
                    got = "nothing" if tensor is None else f"{found} rows"
                    raise ValueError(f"{name}: got {got}, needs {needed} rows")
            launch(*arguments)

        return checked

    def _given(self, *tensors: Tensor | None) -> dict[str, Tensor | None]:
        """The tensors of a call by the names of the table."""
        return dict(zip((arg.name for arg in self.tensors), tensors, strict=True))

    def torch(self, config: MergedLinearConfig, *tensors: Tensor | None) -> None:
        given = self._given(*tensors)
        x, codes, x_scale = (given[name] for name in ("x", "x_codes", "x_scale"))
        x_dtype = "float8_e4m3fn"
        if not config.has_codes:
            codes, x_dtype = x, "bfloat16"
            x_scale = x.new_empty((0, config.k_blocks), dtype=torch.float8_e8m0fnu)
        for i, weight in enumerate(config.fp8):
            part = Fp8LinearConfig(
                config.in_features,
                weight.rows,
                x_dtype,
                weight.stored,
                weight.out_dtype,
                weight.epilogue,
            )
            matrix, scale, out = (given[f"{name}_{i}"] for name in ("weight", "scale", "out"))
            heads = [given[f"{name}_{i}"] for name in ("squares", "head_scales")]
            heads = given["rope"], given["positions"], *heads
            FP8_LINEAR.torch(part, codes, matrix, scale, x_scale, out, None, None, *heads)
        for i in range(len(config.plain)):
            matrix, out = given[f"plain_{i}"], given[f"plain_out_{i}"]
            # bf16 products are exact in fp32.
            out.copy_(F.linear(x.to(out.dtype), matrix.to(out.dtype)))

    def probes(
        self, config: MergedLinearConfig, target: Device, device: torch.device
    ) -> Iterator[tuple[Tensor | int, ...]]:
        """One token through every tiling, with the scratch that leads to the quantisation."""
        dtypes, needed = self.values(config), _needed(config)
        tensors = [
            make.empty(arg, dtypes, {"T": 1, "R": 1}, device).zero_()
            if arg.name in needed
            else make.absent(arg, dtypes, device)
            for arg in self.tensors
        ]
        first = [arg.name for arg in self.tensors].index(SCRATCH[0])
        tensors[first : first + len(SCRATCH)] = scratch(1, config.in_features, device)
        for tiling in range(len(PLANS[target.arch].tilings(config))):
            yield (*tensors, tiling, target.num_sms)

    def aot(self) -> Mapping[str, MergedLinearConfig]:
        """What the layers of Flash and Pro multiply one input with; attention's comes as codes."""
        return {
            label: MergedLinearConfig(*given, has_codes="shared" not in label)
            for label, given in MODEL_INPUTS.items()
        }


MERGED_LINEAR = MergedLinear()
_op = MERGED_LINEAR.overload


def merged_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    *,
    x_codes: Tensor | None = None,
    x_scale: Tensor | None = None,
    out_dtypes: Sequence[torch.dtype] | None = None,
    outs: Sequence[Tensor] | None = None,
    epilogues: Sequence[Epilogue | None] | None = None,
) -> list[Tensor]:
    """Multiply T tokens with several weights in one launch, FP8 and bf16 ones.

    An FP8 weight gives what `fp8_linear` gives, bit for bit; on Blackwell but for the number of
    slices, which all weights of a launch share. A plain one gives x W^T of x as it is, bf16
    products added in fp32: those of a slice of K by the tensor core, slices as those of FP8
    weights. A token's bits depend on neither T nor the other tokens.

    Launches may begin while the one before ends: `weights` and `scales` must not be what a kernel
    of this package wrote just before.

    Args:
        x: [T, K] bfloat16; or float32, on GPUs too by the torch implementation. K is a multiple of
            512 up to 16,384.
        weights: [M_i, K] each: 1 or 2 float8_e4m3fn, then up to 5 of the dtype of x.
        scales: [ceil(M_i / 128), K / 128] float8_e8m0fnu or float32, of each FP8 weight.
        x_codes: [T, K] float8_e4m3fn, x as `dsv4.ops.quantize.quantize_e4m3` rounds it, with
            `x_scale`; default: rounded here.
        x_scale: [T, K / 128] float8_e8m0fnu.
        out_dtypes: bfloat16 or float32 of each output; default those of `outs`, else of x.
        outs: [T, M_i] each, to write into; default new tensors.
        epilogues: of each weight, or None: what becomes of its output before it is stored. Plain
            weights have none; those of two FP8 weights share `rope` and `positions`. An
            `IndexRounding` needs `x_codes`, and its output are codes, too.

    Returns:
        y_i [T, M_i], in the order of the weights.

    Raises:
        ValueError, TypeError: an argument does not fit, or requires grad; the message names it.
    """
    num_fp8 = _check_given(x, weights, scales, outs)
    tokens, width = x.shape
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        places = _places(x, weights, scales, outs or [None] * len(weights), num_fp8)
        MERGED_LINEAR.check_no_gradients(*places)
    own = _epilogues(epilogues, weights)
    if out_dtypes is None and outs is None:
        out_dtypes = [
            torch.float8_e4m3fn if isinstance(one, IndexRounding) else x.dtype for one in own
        ]
    elif out_dtypes is None:
        out_dtypes = [out.dtype for out in outs]
    elif not isinstance(out_dtypes, list | tuple):
        raise TypeError(f"out_dtypes: got {quoted(out_dtypes)}, needs a list of torch.dtype")
    elif len(out_dtypes) != len(weights):
        raise ValueError(f"out_dtypes: got {len(out_dtypes)}, {len(weights)} weights need as many")
    described = ", ".join(
        f"{index(weight.shape[0])} {_name(scales[i].dtype) if i < num_fp8 else PLAIN} "
        f"{_name(out_dtypes[i])} "
        f"{epilogue_config(own[i], index(weight.shape[0]), f'epilogues[{i}]')}".rstrip()
        for i, weight in enumerate(weights)
    )
    has_codes = x_codes is not None
    if has_codes != (x_scale is not None):
        missing = "x_scale" if has_codes else "x_codes"
        raise ValueError(f"{missing}: got nothing, codes and scales of x go together")
    identity = merged_linear_runner_id(index(width), described, has_codes)
    are_given = outs is not None
    if outs is None:
        outs = [
            torch.empty((tokens, weight.shape[0]), dtype=dtype, device=x.device)
            for weight, dtype in zip(weights, out_dtypes)
        ]
    first, *rest = _places(x, weights, scales, outs, num_fp8)
    rest += [x_codes, x_scale]
    if not has_codes and x.dtype == torch.bfloat16 and x.is_cuda and tokens > RESIDENT_TOKENS:
        rest += scratch(tokens, width, x.device)
    heads = [one for one in own if one is not None]
    if heads:
        rest += [None] * (FIRST_OF_HEADS - 1 - len(rest))
        rest += heads[0].tensors[:2]
        for place in (2, 3):
            own_tensors = [one and one.tensors[place] for one in own[:MOST_FP8]]
            rest += own_tensors + [None] * (MOST_FP8 - len(own_tensors))
    if are_given:
        check_given(MERGED_LINEAR, first, *rest)
    elif heads:
        check_epilogue(MERGED_LINEAR, first, *rest)
    _op(first, *rest[:3], identity, *rest[3:])
    return list(outs)


@torch.compiler.assume_constant_result
def merged_linear_runner_id(in_features: int, weights: str, has_codes: bool = False) -> int:
    """Id of a configuration: what `torch.ops.dsv4.merged_linear` takes.

    Args:
        in_features: K.
        weights: "rows stored out_dtype" of each between commas, FP8 ones first: the dtype of their
            scales, "float8_e8m0fnu" or "float32", or "bfloat16" of plain ones; dtype of the output;
            and its epilogue where it has one, "head_rotation:512" or "index_rounding".
        has_codes: whether x comes in e4m3, too.
    """
    return MERGED_LINEAR.runner_id(in_features, weights, has_codes)


def has_room(num_fp8: int, num_plain: int) -> bool:
    """Whether `merged_linear` takes so many weights."""
    return 1 <= num_fp8 <= MOST_FP8 and num_plain <= MOST_PLAIN


def _needed(config: MergedLinearConfig) -> dict[str, int | None]:
    """Rows of each tensor of a call by its name, None for those of x, 0 for any number but none;
    what may be there or not is left out."""
    found: dict[str, int | None] = {"x": None}
    for i, weight in enumerate(config.fp8):
        found |= {f"weight_{i}": weight.rows, f"scale_{i}": -(-weight.rows // K_BLOCK)}
        found[f"out_{i}"] = None
    for i, weight in enumerate(config.plain):
        found |= {f"plain_{i}": weight.rows, f"plain_out_{i}": None}
    if config.head_epilogues:
        found |= {"rope": 0, "positions": None}
    found |= {name: None for name in _of_heads(config, "head_scales", kinds.IndexRounding)}
    return found | ({"x_codes": None, "x_scale": None} if config.has_codes else {})


def _of_heads(config: MergedLinearConfig, name: str, kind: type) -> tuple[str, ...]:
    """What epilogues of a kind write: the scales of codes, or sums of squares, if a call asks for
    them."""
    return tuple(
        f"{name}_{i}" for i, found in enumerate(config.head_epilogues) if isinstance(found, kind)
    )


def _check_given(
    x: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    outs: Sequence[Tensor] | None,
) -> int:
    """Number of FP8 weights; TypeError or ValueError for what is no tensor or of another number."""
    check_is_tensor("x", x)
    for name, tensors in (
        ("weights", weights),
        ("scales", scales),
        ("outs", () if outs is None else outs),
    ):
        if not isinstance(tensors, list | tuple):
            raise TypeError(f"{name}: got {quoted(tensors)}, needs a list of tensors")
        for i, tensor in enumerate(tensors):
            check_is_tensor(f"{name}[{i}]", tensor)
            if tensor.dim() != 2:
                raise ValueError(f"{name}[{i}]: got shape {quoted(tensor.shape)}, needs [rows, K]")
    if x.dim() != 2:
        raise ValueError(f"x: got shape {quoted(x.shape)}, needs [T, K]")
    is_fp8 = [weight.dtype == torch.float8_e4m3fn for weight in weights]
    count = sum(is_fp8)
    if is_fp8 != sorted(is_fp8, reverse=True):
        raise ValueError("weights: FP8 ones must come first")
    if not has_room(count, len(weights) - count):
        raise ValueError(
            f"weights: got {count} in FP8 and {len(weights) - count} others, needs 1 to {MOST_FP8} "
            f"and up to {MOST_PLAIN}"
        )
    if len(scales) != count:
        raise ValueError(f"scales: got {len(scales)}, {count} FP8 weights need as many")
    if outs is not None and len(outs) != len(weights):
        raise ValueError(f"outs: got {len(outs)}, {len(weights)} weights need as many")
    return count


def _epilogues(
    epilogues: Sequence[Epilogue | None] | None, weights: Sequence[Tensor]
) -> list[Epilogue | None]:
    """Epilogue of each weight; TypeError or ValueError for what a launch does not serve."""
    if epilogues is None:
        return [None] * len(weights)
    if not isinstance(epilogues, list | tuple) or isinstance(epilogues, Epilogue):
        raise TypeError(f"epilogues: got {quoted(epilogues)}, needs a list")
    if len(epilogues) != len(weights):
        raise ValueError(f"epilogues: got {len(epilogues)}, {len(weights)} weights need as many")
    found = [one for one in epilogues if isinstance(one, Epilogue)]
    if any(
        one is not None and weight.dtype != torch.float8_e4m3fn
        for one, weight in zip(epilogues, weights)
    ):
        raise ValueError("epilogues: got one of a plain weight, these have none")
    for one in found[1:]:
        for name in ("rope", "positions"):
            if getattr(one, name) is not getattr(found[0], name):
                raise ValueError(f"epilogues: got two of {name}, those of a launch share one")
    return list(epilogues)


def _places(
    x: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    outs: Sequence[Tensor | None],
    num_fp8: int,
) -> list[Tensor | None]:
    """x, weights and outputs in the order of the table."""
    fp8 = [tensor for given in zip(weights, scales, outs) for tensor in given]
    plain = [tensor for given in zip(weights[num_fp8:], outs[num_fp8:]) for tensor in given]
    fp8 += [None] * (3 * MOST_FP8 - len(fp8))
    return [x, *fp8, *plain, *[None] * (2 * MOST_PLAIN - len(plain))]


def _name(dtype: torch.dtype) -> str:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"out_dtypes: got {quoted(dtype)}, needs a torch.dtype for each output")
    return str(dtype).removeprefix("torch.")
