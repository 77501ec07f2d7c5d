"""Weights of gated units as operators take them, and what brings them into the kernels' order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.ops.moe import layout
from dsv4.ops.quantize import dequantize_e2m1, dequantize_e4m3_blocks

MATRICES = ("w1", "w3", "w2")
E2M1_MAGNITUDES = 0x77  # of two codes in a byte
E4M3_NAN = 0x7F  # without its sign
# Bound on the elements that are moved at once: a temporary copy stays small beside the weights.
MAX_MOVED = 1 << 27


class GatedWeights(NamedTuple):
    """w2(silu(w1 x) * w3 x): of all routed experts, stacked, or of the shared one.

    Attributes:
        w1, w3: gate and up, [(E,) I, D] bfloat16, float32 or float8_e4m3fn; or two e2m1 codes in a
            byte, [(E,) I, D / 2] int8 (FP4) or uint8 (NVFP4).
        w2: down, [(E,) D, I], the same.
        w1_scale, w3_scale, w2_scale: of quantised weights; None for others.
        global_scales: of NVFP4, [3, E] float32: of w1, w3 and w2; or [6, E], then of their inputs,
            which are rounded to NVFP4.
    """

    w1: Tensor
    w3: Tensor
    w2: Tensor
    w1_scale: Tensor | None = None
    w3_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    global_scales: Tensor | None = None

    @property
    def dtype_name(self) -> str:
        """As configurations call it."""
        names = {torch.float8_e4m3fn: "fp8", torch.int8: "fp4", torch.uint8: "nvfp4"}
        return names.get(self.w1.dtype, str(self.w1.dtype).removeprefix("torch."))

    @property
    def rounds_to_nvfp4(self) -> bool:
        """Whether scales of the inputs are given."""
        return self.global_scales is not None and len(self.global_scales) > len(MATRICES)

    def without_input_scales(self) -> GatedWeights:
        """The same, whose activations are not rounded."""
        return self._replace(global_scales=self.global_scales[: len(MATRICES)])

    @property
    def x_scale(self) -> Tensor | None:
        """[1] of x, where it is rounded to NVFP4: the largest of all experts', which so read the
        same codes."""
        if not self.rounds_to_nvfp4:
            return None
        return self.global_scales[len(MATRICES) : len(MATRICES) + 2].amax().unsqueeze(0)

    @property
    def h_scales(self) -> Tensor | None:
        """[E] of the inputs of w2, where they are rounded to NVFP4."""
        return self.global_scales[-1] if self.rounds_to_nvfp4 else None

    @property
    def scales(self) -> tuple[Tensor | None, ...]:
        """In the order of `MATRICES`."""
        return self.w1_scale, self.w3_scale, self.w2_scale

    @property
    def codes(self) -> tuple[Tensor, ...]:
        """In the order of `MATRICES`."""
        return self.w1, self.w3, self.w2


def decoded(
    codes: Tensor,
    scale: Tensor | None,
    form: str,
    block: tuple[int, int],
    dtype: torch.dtype,
    global_scale: Tensor | None = None,
) -> Tensor:
    """Values [..., out, in] of weights in any form.

    Args:
        codes, scale: of some experts, [...] may be any leading dimensions.
        form: "released", or what FP4 scales were prepared as.
        block: rows and columns of an FP8 scale.
        global_scale: [...] float32, of NVFP4.
    """
    if codes.dtype == torch.float32:  # which nothing prepares
        return codes.to(dtype)
    if codes.dtype == torch.bfloat16:
        return (codes if form == "released" else layout.restore_codes(codes, form)).to(dtype)
    if codes.dtype == torch.float8_e4m3fn:
        released = codes if form == "released" else layout.restore_codes(codes, form)
        return dequantize_e4m3_blocks(released, scale, block, dtype)
    if form != "released":
        codes = layout.restore_codes(codes, form)
        scale = layout.restore_scales(scale, form)
    if global_scale is None:
        return dequantize_e2m1(codes, scale, dtype)
    wide = dequantize_e2m1(codes, scale, torch.float32)
    return wide.mul_(global_scale[..., None, None]).to(dtype)


def choose_form(weights: GatedWeights, forms: tuple[str, ...]) -> str:
    """The form that routed experts can be prepared in, of those that kernels read: "row_packed" or
    "packed" only where all FP4 scales fit it, and groups that count as empty are.

    Reads the scales back: for loading, not for steps.

    Raises:
        ValueError: a scale of NVFP4 weights is NaN, or one that Blackwell's tensor cores do not
            multiply is: of a weight negative, of inputs not positive.
    """
    is_tiled = "packed" not in forms
    if weights.dtype_name == "nvfp4":
        _check_nvfp4(weights, is_tiled)
    if is_tiled:
        return forms[0]
    if weights.dtype_name != "fp4":
        return "packed"
    for form in ("row_packed", "packed"):
        fits = [layout.fits_packed(scale, form) for scale in weights.scales]
        if bool(torch.stack(fits).all()):
            pairs = zip(weights.codes, weights.scales)
            return "raw" if any(_has_tiny_values(*pair) for pair in pairs) else form
    return "raw"


def _has_tiny_values(codes: Tensor, scale: Tensor) -> bool:
    """Whether a group that counts as empty by its exponent has a value: a code that is not zero."""
    groups = codes.view(torch.uint8).unflatten(-1, (scale.shape[-1], -1))
    is_empty = scale.view(torch.uint8) == layout.EMPTY_EXPONENT
    return bool((groups[is_empty] & E2M1_MAGNITUDES).any())


def _check_nvfp4(weights: GatedWeights, is_tiled: bool) -> None:
    for name, scale in zip(MATRICES, weights.scales):
        codes = scale.view(torch.uint8)
        if bool((codes & E4M3_NAN == E4M3_NAN).any()):
            raise ValueError(f"{name}_scale: got NaN, which is no scale of NVFP4 weights")
        if is_tiled and bool((codes > E4M3_NAN).any()):
            raise ValueError(f"{name}_scale: got a negative scale, kernels of Blackwell need none")
    inputs = weights.global_scales[len(MATRICES) :]
    if is_tiled and not bool((inputs.isfinite() & (inputs > 0)).all()):
        raise ValueError("global_scales: got a scale of inputs that is no positive number")


@torch.no_grad()
def prepare_(weights: GatedWeights, form: str) -> None:
    """Bring weights, where they are, from the released order into the kernels'."""
    _move_(weights, form, layout.prepare_codes, layout.prepare_scales)


@torch.no_grad()
def restore_(weights: GatedWeights, form: str) -> None:
    """Invert `prepare_`, byte for byte."""
    _move_(weights, form, layout.restore_codes, layout.restore_scales)


def restored(tensor: Tensor, form: str, is_scale: bool) -> Tensor:
    """A released copy of prepared codes or scales."""
    if is_scale:
        return layout.restore_scales(tensor, form)
    return layout.restore_codes(tensor, form)


def has_row_scales(codes: Tensor) -> bool:
    """Whether codes are e2m1, whose scales are prepared with them."""
    return codes.dtype in (torch.int8, torch.uint8)


def _move_(weights: GatedWeights, form: str, move_codes, move_scales) -> None:
    for codes, scale in zip(weights.codes, weights.scales):
        has_groups = has_row_scales(codes)
        columns = codes.shape[-1] * (2 if has_groups else 1)
        _replace_(codes, lambda part: move_codes(part, form), columns)
        if has_groups:
            _replace_(scale, lambda part: move_scales(part, form), scale.shape[-1])


def _replace_(tensor: Tensor, move, columns: int) -> None:
    """tensor = move(tensor), some experts at a time; in bytes, which every device copies."""
    parts = tensor.detach().reshape(-1, *tensor.shape[-2:])
    size = max(1, MAX_MOVED // (tensor.shape[-2] * columns))
    for begin in range(0, parts.shape[0], size):
        part = parts[begin : begin + size]
        part.view(torch.uint8).copy_(move(part).view(torch.uint8))


def block_scale_dtype(scale: Tensor | None) -> str:
    """Name of the dtype of FP8 blocks' scales."""
    is_float32 = scale is not None and scale.dtype == torch.float32
    return "float32" if is_float32 else "float8_e8m0fnu"
