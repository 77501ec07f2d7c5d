"""Base of the layers: modules whose storage formats survive `to(dtype)`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Module(nn.Module):
    """nn.Module that `to(dtype)`, `half()`, `float()` and the like convert only where it is plain.

    Codes and scales of quantised weights are bit patterns: converted to another dtype they would be
    other weights. Norms, the router's bias and their like are float32 in every model.

    Attributes:
        plain: names of the module's own parameters that have the dtype of the activations and
            follow a conversion; all others keep theirs.
    """

    plain: tuple[str, ...] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Module:
        # Every conversion and every move of nn.Module comes through here.
        if recurse:
            for child in self.children():
                child._apply(fn)
        plain = {id(self._parameters[name]) for name in self.plain}

        def converted(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            if changed.dtype == tensor.dtype or id(tensor) in plain:
                return changed
            return tensor.to(changed.device)

        return super()._apply(converted, recurse=False)


def empty_parameter(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None
) -> nn.Parameter:
    """Return an uninitialised parameter that takes no gradient, as attention has no backward."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
