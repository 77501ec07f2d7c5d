"""Launch plan of `sparse_fmha_paged`: KV splits and workspace, in plain Python."""

from __future__ import annotations

from collections.abc import Mapping

from dsv4.kernels.attention.paged_config import PagedFmhaConfig

# Splits of a batch-invariant launch: each token's follow from its own keys, on the device.
BY_OWN_KEYS = 0


def scalars(
    config: PagedFmhaConfig, sizes: Mapping[str, int], num_sms: int, arch: str
) -> tuple[int, ...]:
    """Number of KV splits, of SMs, and what tables need: `sliding_window` and `ratio`.

    Args:
        sizes: T tokens, of at most k_w keys of the window and k_c compressed ones.
        num_sms, arch: of the device.
    """
    splits = BY_OWN_KEYS if config.batch_invariant else config.num_splits or 1
    return splits, num_sms, config.sliding_window, config.ratio


def workspace_size(
    config: PagedFmhaConfig, sizes: Mapping[str, int], scalars: tuple[int, ...]
) -> int:
    """fp32 elements of the workspace of a launch."""
    return 0


def max_workspace_size(config: PagedFmhaConfig, rows: int, num_sms: int, arch: str) -> int:
    """fp32 elements that no launch of up to `rows` tokens exceeds."""
    return 0
