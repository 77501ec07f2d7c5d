"""Sums of squares of a head's channels: what a projection leaves to whoever needs the head's norm.

A head's sum has one part for each 16 channels, in order. No part depends on how the head was
computed; whoever reads them adds neighbours, pair by pair (`tree` of `kit.reduce`).
"""

from __future__ import annotations

CHANNELS = 16  # of a part: rows of a warp's accumulators in a wgmma


def parts(head_dim: int) -> int:
    """Parts of the sum of a head."""
    return -(-head_dim // CHANNELS)
