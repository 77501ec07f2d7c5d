"""`dshb_to_bhsd`: tensors channels first, as ggml keeps them, turned heads first: function and
operator."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.kernels.lowp.relayout_config import ARGS, RelayoutConfig, values
from dsv4.ops.runtime.checks import check_is_tensor
from dsv4.ops.runtime.kernel_op import KernelOp
from dsv4.quoting import quoted

MAX_COLUMNS = 2**31 - 1


class DshbToBhsd(KernelOp):
    """[d, s, h, b] to [b, h, s, d]."""

    name = "dshb_to_bhsd"
    config = RelayoutConfig
    args = ARGS
    kernels: ClassVar = dict.fromkeys(("sm_90a", "sm_100a"), "dsv4.kernels.lowp.relayout")

    def values(self, config: RelayoutConfig) -> Mapping[str, int | str]:
        return values(config)

    def check_sizes(self, config: RelayoutConfig, *tensors: Tensor | None) -> None:
        columns = prod(tensors[0].shape[1:])
        if columns > MAX_COLUMNS:
            raise ValueError(f"x: got {columns} rows of channels, needs at most {MAX_COLUMNS}")

    def torch(self, config: RelayoutConfig, x: Tensor, y: Tensor) -> None:
        y.copy_(x.permute(3, 2, 1, 0))

    def aot(self) -> Mapping[str, RelayoutConfig]:
        """What quantised attention takes."""
        return {dtype: RelayoutConfig(dtype) for dtype in ("bfloat16", "float16")}


DSHB_TO_BHSD = DshbToBhsd()
_op = DSHB_TO_BHSD.overload


def dshb_to_bhsd(
    x: Tensor, shape: tuple[int, int, int, int], *, out: Tensor | None = None
) -> Tensor:
    """Tensor [B, H, S, d] of elements that lie as [d, S, H, B], as ggml's kernels take them.

    Args:
        x: as many elements, contiguous, in whatever shape; bfloat16, float16 or float32.
        shape: B, H, S, d.
        out: [B, H, S, d] to write into, channels contiguous; default a new tensor.

    Raises:
        ValueError, TypeError: another number of elements, elements that do not lie one after the
            other, or an argument that does not fit; the message names it.
    """
    for name, tensor in (("x", x), ("out", out)):
        if name == "x" or tensor is not None:
            check_is_tensor(name, tensor)
    try:
        batch, heads, rows, dim = (int(size) for size in shape)
    except (TypeError, ValueError):
        raise TypeError(f"shape: got {quoted(shape)}, needs four integers") from None
    if not x.is_contiguous():
        raise ValueError(f"x: got strides {quoted(x.stride())}, needs a contiguous tensor")
    if min(batch, heads, rows, dim) < 0 or x.numel() != batch * heads * rows * dim:
        raise ValueError(f"x: got {x.numel()} elements, {quoted(shape)} has another number")
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        DSHB_TO_BHSD.check_no_gradients(x, out)
    if out is None:
        out = x.new_empty((batch, heads, rows, dim))
    identity = dshb_to_bhsd_runner_id(str(x.dtype).removeprefix("torch."))
    _op(x.view(dim, rows, heads, batch), out, identity)
    return out


@torch.compiler.assume_constant_result
def dshb_to_bhsd_runner_id(dtype: str = "bfloat16") -> int:
    """Id of a configuration: what `torch.ops.dsv4.dshb_to_bhsd` takes.

    Args:
        dtype: "bfloat16", "float16" or "float32".
    """
    return DSHB_TO_BHSD.runner_id(dtype)
