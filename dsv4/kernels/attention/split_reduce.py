"""Weights of the splits of a row, from the statistics that each split has left."""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.softmax import exp2
from dsv4.kernels.kit.reduce import tree


def split_weights(stats: cute.Tensor, max_over_lanes, sum_over_lanes, scales=None, is_split=None):
    """Weights of splits whose statistics several lanes hold, some each.

    Args:
        stats: [2, splits of this lane] row maxima, base 2, and row sums; the maxima become weights.
        max_over_lanes, sum_over_lanes: reduce a value over these lanes.
        scales: [splits of this lane] of the stored values, a part of their weights.
        is_split: whether this lane's splits are any; the weights of those that are none are 0.

    Returns:
        The maximum that all weights are relative to, and the sum of the weighted row sums.
    """
    splits = range(cute.size(stats, mode=[1]))
    row_max = max_over_lanes(tree(cute.arch.fmax, [stats[0, i] for i in splits]))
    # -inf - -inf is NaN: without any key the weights are relative to 0.
    origin = cutlass.select_(row_max == -cutlass.Float32.inf, cutlass.Float32(0.0), row_max)
    row_sum = cutlass.Float32(0.0)
    for i in splits:
        weight = exp2(stats[0, i] - origin)
        if is_split is not None:
            weight = cutlass.select_(is_split, weight, cutlass.Float32(0.0))
        row_sum += weight * stats[1, i]
        stats[0, i] = weight if scales is None else weight * scales[i]
    return row_max, sum_over_lanes(row_sum)
