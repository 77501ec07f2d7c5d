"""`fp8_linear`: linear layer with FP8 weights in blocks, as function and operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import index
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.kernels.gemm import epilogues
from dsv4.kernels.gemm import plan as plans
from dsv4.kernels.gemm.args import ARGS, values
from dsv4.kernels.gemm.config import K_BLOCK, Fp8LinearConfig, has_kernel
from dsv4.kernels.gemm.sm100 import plan as blackwell_plans
from dsv4.ops.aliasing import check_epilogue, check_given
from dsv4.ops.head_rotation import HeadRotation, check_heads, epilogue_config, rotate_heads_
from dsv4.ops.index_rounding import IndexRounding, round_heads
from dsv4.ops.quantize import dequantize_e4m3_blocks, qdq_e4m3
from dsv4.ops.runtime import tensors as make
from dsv4.ops.runtime.backend import Device
from dsv4.ops.runtime.checks import check_are_tensors, check_ranks
from dsv4.ops.runtime.kernel_op import KernelOp, Sizes
from dsv4.ops.runtime.launch import Launch
from dsv4.ops.runtime.state import State, smallest_call
from dsv4.quoting import quoted

# (M, K) of the FP8 linears of Flash and Pro.
MODEL_LAYERS = {
    "Flash wq_a": (1024, 4096),
    "Flash wq_b": (32768, 1024),
    "Flash wkv": (512, 4096),
    "Flash wo_b": (4096, 8192),
    "Flash shared w1": (2048, 4096),
    "Flash shared w2": (4096, 2048),
    "Flash indexer wq_b": (8192, 1024),
    "Pro wq_a": (1536, 7168),
    "Pro wq_b": (65536, 1536),
    "Pro wkv": (512, 7168),
    "Pro wo_b": (7168, 16384),
    "Pro shared w1": (3072, 7168),
    "Pro shared w2": (7168, 3072),
    "Pro indexer wq_b": (8192, 1536),
}
# Of what the draft layer makes of an embedding and of a stream.
DRAFT_LAYERS = {"Flash draft": (4096, 4096), "Pro draft": (7168, 7168)}


# Tilings of an architecture, and which one a launch takes.
PLANS = {"sm_90a": plans, "sm_100a": blackwell_plans, "sm_103a": blackwell_plans}
MODEL_EPILOGUE = str(epilogues.HeadRotation(512))  # of the queries
INDEX_EPILOGUE = str(epilogues.IndexRounding())  # of the indexer's
OF_HEADS = 4  # tensors of an epilogue, the last ones


class Fp8Linear(KernelOp):
    """y = x W^T, both in e4m3 with a scale per 128 elements of K."""

    name = "fp8_linear"
    config = Fp8LinearConfig
    args = ARGS
    kernels: ClassVar = {
        "sm_90a": "dsv4.kernels.gemm.sm90.fp8_linear",
        "sm_100a": "dsv4.kernels.gemm.sm100.fp8_linear",
        "sm_103a": "dsv4.kernels.gemm.sm100.fp8_linear",
    }
    early = ("weight", "scale")

    def values(self, config: Fp8LinearConfig) -> Mapping[str, int | str]:
        return values(config)

    def compiled_config(self, config: Fp8LinearConfig, arch: str) -> Fp8LinearConfig:
        """M is known at run time; what remains of it is which tilings there are."""
        return PLANS[arch].representative(config)

    def plan(self, config: Fp8LinearConfig, sizes: Sizes, device: Device) -> tuple[int, ...]:
        """Index of the tiling, and number of SMs; refuses scales that the kernel would read past
        the end of."""
        check_scale_rows(config, **{name: sizes[name] for name in ("T", "M", "G", "S")})
        found = PLANS[device.arch].choose(config, sizes["T"], device.num_sms)
        return found, device.num_sms

    def check_sizes(self, config: Fp8LinearConfig, *tensors: Tensor | None) -> None:
        x, weight, scale, x_scale = tensors[:4]
        check_scale_rows(
            config, T=x.shape[0], M=weight.shape[0], G=scale.shape[0], S=x_scale.shape[0]
        )
        if config.head_epilogue is not None:
            check_heads(config.head_epilogue, weight.shape[0], *tensors[-OF_HEADS:])

    def make_launch(self, state: State) -> Launch:
        """The usual launch; behind a check of the epilogue's tensors, where there is one: the
        compiled function takes none of them, and squares of any number of heads."""
        launch, epilogue = super().make_launch(state), state.config.head_epilogue
        if epilogue is None:
            return launch
        count = len(self.tensors) + 1  # and the runner's id

        def checked(*arguments: Any) -> None:
            given = (*arguments, *(None,) * (count - len(arguments)))[-OF_HEADS:]
            check_heads(epilogue, arguments[1].shape[0], *given)
            launch(*arguments)

        return checked

    def torch(
        self,
        config: Fp8LinearConfig,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        x_scale: Tensor,
        out: Tensor,
        codes: Tensor | None,
        code_scales: Tensor | None,
        rope: Tensor | None = None,
        positions: Tensor | None = None,
        squares: Tensor | None = None,
        head_scales: Tensor | None = None,
    ) -> None:
        if config.quantizes:
            rounded = qdq_e4m3(x, K_BLOCK)
        else:
            rounded = (x.float().unflatten(1, (-1, K_BLOCK)) * x_scale.float()[..., None]).flatten(
                1
            )
        # e4m3 times a power of two is exact in bf16; times an arbitrary fp32 scale it is not. And
        # bf16 products are rounded to bf16.
        is_index = isinstance(config.head_epilogue, epilogues.IndexRounding)
        out_dtype = torch.bfloat16 if is_index else out.dtype
        is_exact = out_dtype == torch.bfloat16 and config.scale_dtype == "float8_e8m0fnu"
        compute = torch.bfloat16 if is_exact else torch.float32
        dense = dequantize_e4m3_blocks(weight, scale, (K_BLOCK, K_BLOCK), compute)
        y = F.linear(rounded.to(compute), dense)
        if is_index:
            for target, found in zip(
                (out, head_scales), round_heads(y.bfloat16(), rope, positions)
            ):
                target.copy_(found)
            return
        out.copy_(y)
        if config.head_epilogue is not None:
            rotate_heads_(out, config.head_epilogue.head_dim, rope, positions, squares)

    def probes(
        self, config: Fp8LinearConfig, target: Device, device: torch.device
    ) -> Iterator[tuple[Tensor | int, ...]]:
        """One token through every tiling, with the scratch that leads to the quantisation; of heads
        one, with what their epilogue needs."""
        epilogue, dtypes = config.head_epilogue, self.values(config)
        sizes = dict.fromkeys(("T", "S", "R", "H", "C"), 1)
        for tiling in range(len(PLANS[target.arch].tilings(config))):
            call = list(smallest_call(self, config, (tiling, target.num_sms), device))
            call[self.num_required : self.num_required + 2] = scratch(1, config.in_features, device)
            if epilogue is not None:
                rows = {"M": epilogue.head_dim, "G": -(-epilogue.head_dim // K_BLOCK)}
                for place, arg in enumerate(self.tensors):
                    is_scratch = self.num_required <= place < self.num_required + 2
                    if not (is_scratch or (arg.name == "x_scale" and config.quantizes)):
                        call[place] = make.empty(arg, dtypes, sizes | rows, device).zero_()
            yield tuple(call)

    def aot(self) -> Mapping[str, Fp8LinearConfig]:
        """Linears of Flash and Pro, their inputs in bf16, and in codes where the layers' come so;
        those that no architecture tells apart once."""
        found: dict[tuple[Fp8LinearConfig, ...], tuple[str, Fp8LinearConfig]] = {}
        for label, (rows, width) in (MODEL_LAYERS | DRAFT_LAYERS).items():
            takes_codes = label in DRAFT_LAYERS or "wq_b" in label or "wo_b" in label
            for x_dtype in ("bfloat16", "float8_e4m3fn")[: 2 if takes_codes else 1]:
                has_codes = x_dtype != "bfloat16"
                # Queries come out of the layers' own call as attention takes them.
                are_queries = has_codes and label.endswith(" wq_b") and "indexer" not in label
                epilogue = MODEL_EPILOGUE if are_queries else ""
                config = Fp8LinearConfig(width, rows, x_dtype, epilogue=epilogue)
                suffix = ", codes" if has_codes else ""
                name = f"{label}, {rows} x {width}{suffix}"
                kinds = plans.representative(config), blackwell_plans.representative(config)
                found.setdefault(kinds, (name, config))
        return dict(found.values())


FP8_LINEAR = Fp8Linear()
_op = FP8_LINEAR.overload


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    x_scale: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    epilogue: HeadRotation | IndexRounding | None = None,
) -> Tensor:
    """Multiply T tokens with a weight as FP8 checkpoints store it, without preparation.

    y[t, m] = sum over k of x[t, k] * weight[m, k] * scale[m // 128, k // 128], where x was rounded
    to e4m3 with one power-of-two scale per 128 elements: as `dsv4.ops.quantize.quantize_e4m3` does
    it here for bf16, or before, for codes with `x_scale`. On Hopper a k block of 128 is summed by
    the tensor core, then scaled, and added in fp32 in an order that K alone decides. On Blackwell
    the tensor core scales and sums slices of K, whose number the weight's shape decides; where
    `scale` is float32, which may hold other than powers of two, k blocks as on Hopper. The bits of
    a token depend on neither T nor the other tokens, which may hold anything. Elsewhere torch
    multiplies the decoded weight.

    Launches may begin while the one before ends: `weight` and `scale` must not be what a kernel of
    this package wrote just before.

    Args:
        x: [T, K] bfloat16, or float8_e4m3fn with `x_scale`; or float32, on GPUs too by the torch
            implementation. K is a multiple of 512 up to 16,384.
        weight: [M, K] float8_e4m3fn.
        scale: [ceil(M / 128), K / 128] float8_e8m0fnu, or float32 as in the Base checkpoints.
        x_scale: [T, K / 128] float8_e8m0fnu.
        out: [T, M] to write into; default a new tensor.
        out_dtype: bfloat16 or float32; default that of `out`, else of x, bfloat16 for codes.
        epilogue: what becomes of y before it is stored; M is then that of whole heads. An
            `IndexRounding` needs x in codes, and makes y codes, too.

    Returns:
        y [T, M].

    Raises:
        ValueError, TypeError: an argument does not fit, or requires grad; the message names it.
    """
    given = x_scale
    try:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            FP8_LINEAR.check_no_gradients(x, weight, scale, x_scale, out)
        tokens, width = x.shape
        rows = weight.shape[0]
        has_codes = x.dtype == torch.float8_e4m3fn
        if out_dtype is None:
            out_dtype = torch.bfloat16 if has_codes else x.dtype
            if isinstance(epilogue, IndexRounding):
                out_dtype = torch.float8_e4m3fn
            out_dtype = out_dtype if out is None else out.dtype
        identity = fp8_linear_runner_id(
            index(width),
            index(rows),
            "float8_e4m3fn" if has_codes else "bfloat16",
            _name(scale.dtype),
            _name(out_dtype),
            epilogue_config(epilogue, index(rows)),
        )
        if x_scale is None:
            x_scale = torch.empty(
                (0, width // K_BLOCK), dtype=torch.float8_e8m0fnu, device=x.device
            )
        check = check_epilogue if out is None else check_given
        if out is None:
            out = torch.empty((tokens, rows), dtype=out_dtype, device=x.device)
        options: tuple[Tensor | None, ...] = ()
        if x.dtype == torch.bfloat16 and x.is_cuda and tokens > plans.RESIDENT_TOKENS:
            options = scratch(tokens, width, x.device)
        if epilogue is not None:
            options = (*(options or (None, None)), *epilogue.tensors)
        if epilogue is not None or check is check_given:
            check(FP8_LINEAR, x, weight, scale, x_scale, out, *options)
        _op(x, weight, scale, x_scale, out, identity, *options)
    except Exception:
        has_tensors = isinstance(epilogue, HeadRotation | IndexRounding)
        heads = epilogue.tensors if has_tensors else ()
        _explain(x, weight, scale, given, out, None, None, *heads)
        if not isinstance(out_dtype, torch.dtype | None):
            raise TypeError(f"out_dtype: got {quoted(out_dtype)}, needs a torch.dtype") from None
        raise
    return out


@torch.compiler.assume_constant_result
def fp8_linear_runner_id(
    in_features: int,
    out_features: int,
    x_dtype: str = "bfloat16",
    scale_dtype: str = "float8_e8m0fnu",
    out_dtype: str = "bfloat16",
    epilogue: str = "",
) -> int:
    """Id of a configuration: what `torch.ops.dsv4.fp8_linear` takes.

    Args:
        in_features, out_features: K and M of the weight.
        x_dtype: "bfloat16", also for float32, or "float8_e4m3fn".
        scale_dtype: of the weight's scales, "float8_e8m0fnu" or "float32".
        out_dtype: "bfloat16" or "float32", or "float8_e4m3fn" with the second epilogue.
        epilogue: "", "head_rotation:512" with the channels of a head, or "index_rounding".
    """
    return FP8_LINEAR.runner_id(
        in_features, out_features, x_dtype, scale_dtype, out_dtype, epilogue
    )


def takes(in_features: int, block: tuple[int, int]) -> bool:
    """Whether `fp8_linear` takes weights of this width with scales of these blocks."""
    return has_kernel(in_features) and tuple(block) == (K_BLOCK, K_BLOCK)


def scratch(tokens: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes and scales that a launch quantises many bf16 tokens into before it streams them."""
    codes = torch.empty((tokens, width), dtype=torch.float8_e4m3fn, device=device)
    shape = (tokens, width // K_BLOCK)
    return codes, torch.empty(shape, dtype=torch.float8_e8m0fnu, device=device)


def check_scale_rows(config: Fp8LinearConfig, *, T: int, M: int, G: int, S: int) -> None:
    """Refuse scales with other rows than x and the weight need: ValueError."""
    needed = -(-M // K_BLOCK)
    if needed != G:
        raise ValueError(f"scale: got {G} rows, a weight of {M} rows needs {needed}")
    if config.quantizes and S:
        raise ValueError(f"x_scale: got {S} rows, x that is not in float8_e4m3fn has no scales")
    if not config.quantizes and S != T:
        raise ValueError(f"x_scale: got {S} rows, float8_e4m3fn codes of {T} tokens need {T}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _explain(*tensors: object) -> None:
    """Name the argument of a failed call that is of the wrong type or rank."""
    given = [
        (arg, tensor)
        for arg, tensor in zip(FP8_LINEAR.tensors, tensors)
        if tensor is not None or arg.name in ("x", "weight", "scale")
    ]
    args, found = zip(*given)
    check_are_tensors(args, found)
    check_ranks(args, found)
