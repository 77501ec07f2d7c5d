"""The zero-column mask of tcgen05.mma.ws: columns of B that count as zero whatever they hold."""

from __future__ import annotations

import numpy as np

from dsv4.simulator.errors import KernelFault


def column_shift(descriptor: int, m: int) -> int:
    """By how many columns the product starts later in B."""
    shift = descriptor >> 56 & 63
    limit = 16 if m == 32 else 32
    if shift > limit:
        raise KernelFault(f"zero-column mask shifts by {shift} columns, at most {limit} for M={m}")
    return shift


def zero_columns(descriptor: int, m: int, n: int) -> np.ndarray:
    """bool [n]: True where a column of B counts as zero.

    N is cut into 128 / M parts. In each, runs of `skip` zeroed and of `use` used columns alternate,
    from the kind that the part's first-span bit says, less the columns its start count drops.
    """
    if not descriptor >> 39 & 1:
        return np.zeros(n, np.bool_)
    skip, use = (descriptor >> 40 & 255) + 1, (descriptor >> 48 & 255) + 1
    parts = 128 // m
    share = n // parts
    out = []
    for part in range(parts):
        start, first = descriptor >> 8 * part & 255, descriptor >> 32 + part & 1
        position = (np.arange(share) + start) % (skip + use)
        out.append(position < skip if first else position >= use)
    return np.concatenate(out)
