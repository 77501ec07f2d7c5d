"""Launch plan of `sparse_fmha_paged`: KV splits and workspace, in plain Python.

The kernels are those of `launch_plan` with another source of keys: so are the plans.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

from dsv4.kernels.attention import launch_plan
from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.attention.pieces import most_pieces
from dsv4.kernels.attention.sm100 import costs as sm100_costs
from dsv4.kernels.attention.split_kv import (
    MAX_SPLITS,
    MOST_SWAP_AB_HEADS,
    STATS,
    SWAP_AB_TILE_HEADS,
    TILED_HEADS,
    with_counters,
)
from dsv4.kernels.gemm.config import TERM_ROWS
from dsv4.kernels.kit.kv_entry import ROPE_DIM

HEAD_DIMS = {"bf16": (64, 128, 512), "fp8": (512,)}  # that kernels exist for
MOST_HEADS = 128
# Of so few, products take less than the conversion of codes, which few heads share.
MOST_CONVERTED_HEADS = 32
# Pieces of a batch-invariant launch for each SM, at most: a CTA has a bit for each (`gather_role`).
SM_PIECES = 32
# Fitted to measurements on an H200 of 1 to 64 tokens of 8 to 128 heads, as those of dense keys are,
# which serve bf16 rows, too. A key tile of FP8 entries takes what its conversion takes.
_H200 = launch_plan.H200
# Of FP8 entries, fitted to what attention takes in steps of Flash of 2 to 24 requests with other
# numbers of splits.
_STEP = launch_plan.StepCosts(heads_m=2.4, apart=1.7)
COSTS = {
    "bf16": _H200,
    "fp8": launch_plan.Costs(
        replace(_H200.heads_m, tile=2.65, sliced_tile=2.3),
        replace(_H200.swap_ab, tile=1.8, memory_tile=2.2),
        _STEP,
    ),
}
# Of launches whose rows become codes.
CODES_COSTS = COSTS | {"fp8": replace(COSTS["fp8"], step=replace(_STEP, rows=4.4, wide=1.0))}


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


def may_round_rows(config: PagedFmhaConfig, arch: str) -> bool:
    """Whether launches round rows of the output on their way: on Hopper some, those of heads in M,
    whose quads of lanes hold whole groups of a scale; on Blackwell those of one CTA, of splits, and
    of a token for each pair."""
    if not config.rounds_output or multiplies_codes(config):
        return False
    return arch == "sm_100a" or (
        config.num_query_heads > MOST_SWAP_AB_HEADS
        and config.head_dim == launch_plan.SLICED_HEAD_DIM
    )


def always_rounds_rows(config: PagedFmhaConfig, arch: str) -> bool:
    """Whether all launches do: those of one CTA of Blackwell."""
    return arch == "sm_100a" and may_round_rows(config, arch) and not _has_pairs(config)


def _has_pairs(config: PagedFmhaConfig) -> bool:
    """Whether Blackwell's kernel has two CTAs."""
    return sm100_costs.variant_of(config.head_dim, config.num_query_heads)[0] == "2cta"


def rounds_rows(config: PagedFmhaConfig, tokens, num_splits, num_sms, arch: str):
    """Whether a launch does: one without pieces, and not of swap-AB. Of numbers known at run time,
    too."""
    if not may_round_rows(config, arch):
        return False
    heads = config.num_query_heads
    if arch == "sm_100a":
        # A pair's next token waits for the epilogue, where codes take longer than rows.
        has_one_token = (num_splits > 1) | (2 * tokens <= num_sms)
        return True if always_rounds_rows(config, arch) else has_one_token
    if config.batch_invariant:
        tiles = -(-heads // launch_plan.TILE_HEADS)
        return (num_splits == 1) & (2 * tokens * tiles > num_sms)
    if heads not in TILED_HEADS or config.num_splits is not None:
        return True
    return tokens * (heads // SWAP_AB_TILE_HEADS) * num_splits > num_sms


def scalars(
    config: PagedFmhaConfig, sizes: Mapping[str, int], num_sms: int, arch: str
) -> tuple[int, ...]:
    """Number of KV splits, of SMs, and what tables need: `sliding_window` and `ratio`.

    Of a batch-invariant launch the splits are the most pieces that its keys may be (`pieces`).

    Args:
        sizes: T tokens, of at most k_w keys of the window and k_c compressed ones.
        num_sms, arch: of the device.
    """
    if config.batch_invariant:
        splits = _pieces(config, sizes, arch)
    else:
        size = (sizes["T"], sizes["k_c"], sizes["k_w"])
        table = CODES_COSTS if config.rounds_output else COSTS
        costs = table.get(config.kv_format, _H200)
        splits = launch_plan.num_splits(_dense(config), *size, num_sms, arch, costs)
        if config.num_splits is None and _fills_half(config, sizes["T"], num_sms):
            splits = 1
    return splits, num_sms, config.sliding_window, config.ratio


def _pieces(config: PagedFmhaConfig, sizes: Mapping[str, int], arch: str) -> int:
    """Most pieces of a token of a batch-invariant launch."""
    if not _has_pieces(config, arch):
        return 1
    return most_pieces(launch_plan.key_tiles(sizes["k_c"], sizes["k_w"]))


def _has_pieces(config: PagedFmhaConfig, arch: str) -> bool:
    """Whether a batch-invariant launch may have several: where products are of codes there are no
    splits; on Blackwell neither: see docs/design/attention_paged.md."""
    return arch == "sm_90a" and not multiplies_codes(config)


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
    if config.batch_invariant:
        return _pieces_size(config, min(sizes["T"], most_tokens(config, scalars)), splits)
    return launch_plan.workspace_size(_dense(config), sizes["T"], splits)


def most_tokens(config: PagedFmhaConfig, scalars: tuple[int, ...]) -> int:
    """Tokens of a launch, at most; more take several, one after the other.

    Of a batch-invariant launch the number of splits follows from no number of tokens: what its
    pieces leave in the workspace would know no bounds.
    """
    splits, num_sms = scalars[:2]
    if splits == 1 or not config.batch_invariant:
        return sys.maxsize
    head_tiles = -(-config.num_query_heads // launch_plan.TILE_HEADS)
    # Clusters of two CTAs leave an odd SM idle.
    work_tiles = num_sms // 2 * 2 * (SM_PIECES // splits)
    most = max(work_tiles // head_tiles, 1)
    if config.rounds_output:  # whose rows of codes are those of eight tokens
        most = max(most // TERM_ROWS * TERM_ROWS, TERM_ROWS)
    return most


def _pieces_size(config: PagedFmhaConfig, tokens: int, splits: int) -> int:
    """Workspace of a launch of pieces. Those of heads in M, in 16 bits, are many where they are
    long; each of two slices of a row's columns may have statistics of its own."""
    if (
        config.num_query_heads <= MOST_SWAP_AB_HEADS
        or config.head_dim < launch_plan.SLICED_HEAD_DIM
    ):
        return launch_plan.workspace_size(_dense(config), tokens, splits)
    rows = -(-config.num_query_heads // launch_plan.TILE_HEADS) * launch_plan.TILE_HEADS
    return with_counters(tokens * splits * rows * (config.head_dim // 2 + 4 * STATS))


def max_workspace_size(config: PagedFmhaConfig, rows: int, num_sms: int, arch: str) -> int:
    """fp32 elements that no launch of up to `rows` tokens exceeds."""
    if config.batch_invariant:
        if rows == 0 or not _has_pieces(config, arch):
            return 0
        most = MAX_SPLITS, num_sms
        return workspace_size(config, {"T": rows}, most)
    return launch_plan.max_workspace_size(_dense(config), rows, num_sms)


def _dense(config: PagedFmhaConfig) -> FmhaConfig:
    """The configuration of the kernels of dense keys that share the plan."""
    heads, splits = config.num_query_heads, config.num_splits
    return FmhaConfig(config.head_dim, heads, 0, 0, num_splits=splits)
