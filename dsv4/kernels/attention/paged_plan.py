"""Launch plan of `sparse_fmha_paged`: KV splits and workspace, in plain Python.

The kernels are those of `launch_plan` with another source of keys: so are the plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dsv4.kernels.attention import launch_plan
from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.kit.kv_entry import ROPE_DIM

HEAD_DIMS = {"bf16": (64, 128, 512), "fp8": (512,)}  # that kernels exist for
MOST_HEADS = 128
# Of so few, products take less than the conversion of codes, which few heads share.
MOST_CONVERTED_HEADS = 32
# Fitted to measurements on an H200 of 1 to 64 tokens of 8 to 128 heads, as those of dense keys are,
# which serve bf16 rows, too. A key tile of FP8 entries takes what its conversion takes.
_H200 = launch_plan.H200
COSTS = {
    "bf16": _H200,
    "fp8": launch_plan.Costs(
        replace(_H200.heads_m, tile=2.65, sliced_tile=2.3),
        replace(_H200.swap_ab, tile=1.8, memory_tile=2.2),
    ),
}


def has_kernel(config: PagedFmhaConfig) -> bool:
    """Whether a GPU kernel serves a configuration."""
    heads = config.num_query_heads
    return (
        config.head_dim in HEAD_DIMS.get(config.kv_format, ())
        and heads % 8 == 0
        and heads <= MOST_HEADS
        and config.rope_dim == ROPE_DIM
        and config.scale > 0
    )


def multiplies_codes(config: PagedFmhaConfig) -> bool:
    """Whether launches without splits multiply FP8 codes; all others multiply bf16 values, which
    are more exact."""
    return config.compute != "bf16" and config.num_query_heads > MOST_CONVERTED_HEADS


def scalars(
    config: PagedFmhaConfig, sizes: Mapping[str, int], num_sms: int, arch: str
) -> tuple[int, ...]:
    """Number of KV splits, of SMs, and what tables need: `sliding_window` and `ratio`.

    A batch-invariant launch has one split.

    Args:
        sizes: T tokens, of at most k_w keys of the window and k_c compressed ones.
        num_sms, arch: of the device.
    """
    splits = 1
    if not config.batch_invariant:
        size = (sizes["T"], sizes["k_c"], sizes["k_w"])
        costs = COSTS.get(config.kv_format, _H200)
        splits = launch_plan.num_splits(_dense(config), *size, num_sms, arch, costs)
        if config.num_splits is None and _fills_half(config, sizes["T"], num_sms):
            splits = 1
    return splits, num_sms, config.sliding_window, config.ratio


def _fills_half(config: PagedFmhaConfig, tokens: int, num_sms: int) -> bool:
    """Whether a launch without splits, whose products are of codes, has work for half of the SMs:
    it is then faster than one of bf16 values with splits."""
    tiles = tokens * -(-config.num_query_heads // launch_plan.TILE_HEADS)
    return multiplies_codes(config) and 2 * tiles > num_sms


def workspace_size(
    config: PagedFmhaConfig, sizes: Mapping[str, int], scalars: tuple[int, ...]
) -> int:
    """fp32 elements of the workspace of a launch."""
    splits = scalars[0]
    if splits == 1:
        return 0
    return launch_plan.workspace_size(_dense(config), sizes["T"], splits)


def max_workspace_size(config: PagedFmhaConfig, rows: int, num_sms: int, arch: str) -> int:
    """fp32 elements that no launch of up to `rows` tokens exceeds."""
    if config.batch_invariant:
        return 0
    return launch_plan.max_workspace_size(_dense(config), rows, num_sms)


def _dense(config: PagedFmhaConfig) -> FmhaConfig:
    """The configuration of the kernels of dense keys that share the plan."""
    heads, splits = config.num_query_heads, config.num_splits
    return FmhaConfig(config.head_dim, heads, 0, 0, num_splits=splits)
