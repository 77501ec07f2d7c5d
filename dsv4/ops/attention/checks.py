"""Checks that the argument table of `sparse_fmha_with_swa` cannot express."""

from __future__ import annotations

from torch import Tensor

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.quoting import quoted


def check_top_k(config: FmhaConfig, compressed_kv: Tensor) -> None:
    """Check that a runner gets no more rows than it was promised."""
    if compressed_kv.shape[1] > config.top_k:
        raise ValueError(
            f"compressed_kv: got {compressed_kv.shape[1]} rows per token, this runner takes at "
            f"most top_k = {config.top_k}"
        )


def check_requests(config: FmhaConfig, swa_kv: Tensor, request_ids: Tensor) -> None:
    """Check what only the values of `request_ids` can tell. For CPU tensors: it reads them."""
    if request_ids.numel() == 0:
        return
    batch = swa_kv.shape[0]
    low, high = (int(bound) for bound in request_ids.aminmax())
    if low < -1 or high >= batch:
        raise ValueError(
            f"request_ids: got values from {low} to {high}, needs -1 (padding) to {batch - 1}, "
            f"the rows of swa_kv {quoted(swa_kv.shape)}"
        )
    if config.is_causal:
        runs = request_ids.unique_consecutive()
        runs = runs[runs >= 0]
        if runs.numel() != runs.unique().numel():
            raise ValueError(
                "request_ids: with is_causal the tokens of a request must be consecutive, "
                f"got {_shorten(request_ids.tolist())}"
            )


def _shorten(values: list[int], limit: int = 16) -> str:
    return str(values) if len(values) <= limit else f"{str(values[:limit])[:-1]}, ...]"
