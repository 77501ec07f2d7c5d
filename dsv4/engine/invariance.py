"""Probe of a model: may neighbours in a forward change a token's bits?

Operators with kernels add in one order for any number of tokens; libraries choose theirs by the
shapes. Which of the two a forward consists of depends on the model, its dtype and the GPU, so that
one forward is run and what it called is looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4.cache.manager import CacheManager
from dsv4.ops.runtime.registry import OPS, ran_as_kernel

if TYPE_CHECKING:
    from dsv4.model.model import DeepseekV4

PROBED_TOKENS = 2
# Of aten, by what their names begin with: sums of floating-point numbers.
SUMS = (
    *("addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "conv", "cumprod", "cumsum", "dot"),
    *("einsum", "linalg", "linear", "logcumsumexp", "logsumexp", "matmul", "mean", "mm", "mv"),
    *("_scaled", "_softmax", "_log_softmax", "_weight", "nansum", "norm", "native", "prod", "rms"),
    *("scaled_dot", "softmax", "std", "sum", "trace", "var", "vdot"),
)
INPLACE_SUMS = ("index_add", "index_put", "scatter_add", "scatter_reduce")


def depends_on_neighbours(model: DeepseekV4) -> list[str]:
    """What a forward of `model` calls that may add in another order beside other tokens.

    Empty where a token's streams and logits have the same bits in any batch. The forward is one of
    two tokens of one request, in a cache of its own.
    """
    if model.device.type != "cuda":
        return ["torch on " + model.device.type]
    cache = model.new_cache(1, 1, 1, max_tokens=PROBED_TOKENS, batch_invariant=True)
    manager = CacheManager(cache)
    slot = manager.admit(2 * PROBED_TOKENS)
    ids = torch.zeros(1, PROBED_TOKENS, dtype=torch.int64, device=model.device)
    probe = _Probe()
    with torch.inference_mode():
        for chunk in (PROBED_TOKENS, 1):
            step = manager.step([slot], [chunk], chunk)
            with probe:
                streams = model.unwritten_streams(ids[:, :chunk], cache, step)
                model.outputs(streams)
                model.best(streams)
    return sorted(probe.found)


class _Probe(TorchDispatchMode):
    """Record of calls whose sums may be in an order of the library's."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        family, name = function.namespace, function._opname
        if family == "dsv4":
            if not ran_as_kernel(OPS[name], args):
                self.found.add(str(function))
        elif name.startswith((*SUMS, *INPLACE_SUMS)) and _has_fractions(result):
            self.found.add(str(function))
        return result


def _has_fractions(result: Any) -> bool:
    results = result if isinstance(result, tuple | list) else (result,)
    return any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in results)
