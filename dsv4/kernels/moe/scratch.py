"""Scratch memory of a mixture-of-experts launch: what its kernels hand to each other.

Plain Python: operators pass integers, kernels what is an integer at run time.
"""

from __future__ import annotations

from typing import Any

from dsv4.kernels.moe.config import K_BLOCK
from dsv4.kernels.moe.layer_config import NVFP4_GROUP, MoeConfig
from dsv4.kernels.moe.routing import ARRIVAL_WORDS, GROUP_WORDS, MOST_RUNS, gate_tiling
from dsv4.kernels.moe.wide_plan import SCALE_COPIES, scale_columns

ALIGNMENT = 64  # bytes that every section starts at a multiple of
WORD = 4  # bytes
BF16 = 2


def sections(config: MoeConfig, tokens: Any, splits: Any) -> dict[str, Any]:
    """Where each section starts, and "end": bytes from the start of the scratch.

    Args:
        tokens: T.
        splits: partial sums of a logit, from `gate_tiling`.
    """
    k, pairs = config.top_k, tokens * config.top_k
    sizes = {
        "partials": splits * tokens * (config.experts * WORD),
        "codes": tokens * config.hidden,
        "scales": tokens * (config.hidden // K_BLOCK),
        "ids": pairs * WORD,
        "weights": pairs * WORD,
        "pairs": pairs * WORD,
        # A group has a pair at least; one more, so that there is a row without tokens.
        "groups": (pairs + 1) * (GROUP_WORDS * WORD),
        "counts": 2 * WORD,
        "arrivals": ARRIVAL_WORDS * WORD,
        "run_counts": MOST_RUNS * config.experts * WORD,
        # Blackwell's kernels round h at once.
        "h": (pairs + tokens) * (0 if config.form == "tiled" else config.inner * BF16),
        "h_codes": (pairs + tokens) * config.inner,
        "h_scale": scale_columns(pairs + tokens) * (config.inner // K_BLOCK * SCALE_COPIES * WORD),
        "rows": tokens * ((k + 1) * config.hidden * BF16),
    }
    if config.rounds_to_nvfp4:
        # Of h those of routed experts alone.
        sizes |= {
            "packed": tokens * (config.hidden // 2),
            "packed_scales": tokens * (config.hidden // NVFP4_GROUP),
            "packed_whole": WORD,
            "packed_h": pairs * (config.inner // 2),
            "packed_h_scales": pairs * (config.inner // NVFP4_GROUP),
        }
    starts, start = {}, 0
    for name, size in sizes.items():
        starts[name] = start
        start = start + (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    return {**starts, "end": start}


def scratch_bytes(config: MoeConfig, tokens: int) -> int:
    """Bytes of scratch of a launch of so many tokens."""
    return sections(config, tokens, gate_tiling(config.routing, tokens)[0])["end"]
