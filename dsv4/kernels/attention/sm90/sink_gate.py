"""Sink gate of the Hopper kernels: a bias on the scores of one branch.

The gate weighs the window by e^sink. Here -max(sink, 0) is added to compressed scores and
min(sink, 0) to window scores: the branch with the larger weight keeps bias 0, which makes sinks of
any size, infinities included, exact. An empty branch leaves the other one alone: the sink then
counts as 0.

Blackwell moves the row maximum where the window begins instead (`sink_merge`): as exact, with four
values a row to keep (sink, gate, maxima on both sides of the boundary) where a bias needs two. The
score warpgroup of `heads_m` has no registers for them beside Q, and a tile's branch comes with the
tile: the bias is one select a row.
"""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.softmax import LOG2_E


def branch_biases(sink, offset):
    """log2 biases of compressed and of window scores; `offset` is max(sink, 0)."""
    return -offset * LOG2_E, cute.arch.fmin(sink, 0.0) * LOG2_E


def branch_bias(sink, is_window):
    """log2 bias of one branch's scores."""
    low, high = cute.arch.fmin(sink, 0.0), -cute.arch.fmax(sink, 0.0)
    return cutlass.select_(is_window, low, high) * LOG2_E


def gate_offset(sink: cutlass.Float32, has_both, is_gate: bool) -> cutlass.Float32:
    """What the biases take off the log of a row's denominator."""
    if not is_gate:
        return cutlass.Float32(0.0)
    return cutlass.select_(has_both, cute.arch.fmax(sink, 0.0), cutlass.Float32(0.0))
