"""Merge of the two branches and the sink. Nothing here depends on the architecture.

`"swa_gate"` weighs the window by e^sink, which is the same as adding the sink to every window
logit. Doing that literally loses the logits when the sink is large, and gives inf - inf when it is
infinite. So nothing is ever added to a logit: window logits stay as they are, and the compressed
branch's row maximum moves by -sink into the window's scale instead ("window scale": logits of the
window as they are; "compressed scale": the same plus the sink). A branch that dominates keeps its
own row maximum exactly; one that vanishes gets a factor of 0 from an infinite difference.

All row maxima and gates here are in base 2.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from dsv4.kernels.attention.softmax import LN_2, LOG2_E, exp2


@cute.jit
def window_gate(
    sink_logit: Float32, both_branches: Boolean, sink_mode: cutlass.Constexpr[str]
) -> Float32:
    """Log2 of the factor on P of the window.

    1 in "softmax" mode, and when a branch is empty: what is left is then that branch alone, for lse
    too.
    """
    gate = Float32(0.0)
    if cutlass.const_expr(sink_mode == "swa_gate"):
        gate = sink_logit * LOG2_E if both_branches else Float32(0.0)
    return gate


class RowState(NamedTuple):
    """Softmax state of a thread's rows, each a register tensor of one fp32 a row."""

    row_max: cute.Tensor  # stale; compressed scale, window scale once the window is entered
    row_sum: cute.Tensor  # this thread's part of the sum of P, relative to `row_max`
    sink: cute.Tensor  # natural log
    gate: cute.Tensor  # see `window_gate`
    compressed_row_max: cute.Tensor  # `row_max` where the window was entered, compressed scale
    window_row_max: cute.Tensor  # the same in window scale


@cute.jit
def new_rows(
    sink: cute.Tensor, both_branches: Boolean, sink_mode: cutlass.Constexpr[str]
) -> RowState:
    """State before the first tile."""
    rows = RowState(*[cute.make_rmem_tensor(cute.size(sink), Float32) for _ in range(6)])
    for tensor in (rows.row_max, rows.compressed_row_max, rows.window_row_max):
        tensor.fill(-Float32.inf)
    rows.row_sum.fill(0.0)
    for row in cutlass.range_constexpr(cute.size(sink)):
        rows.sink[row] = sink[row]
        rows.gate[row] = window_gate(sink[row], both_branches, sink_mode)
    return rows


@cute.jit
def enter_window(rows: RowState, may_be_empty: cutlass.Constexpr[bool] = False) -> None:
    """Take the row maxima from compressed to window scale, after at least one compressed tile.

    Args:
        may_be_empty: whether that may have been without a key: the maximum of none stays -inf, an
            infinite gate would make it NaN.
    """
    for row in cutlass.range_constexpr(cute.size(rows.row_max)):
        rows.compressed_row_max[row] = rows.row_max[row]
        gate = rows.gate[row]
        if cutlass.const_expr(may_be_empty):
            gate = cutlass.select_(rows.row_max[row] == -Float32.inf, Float32(0.0), gate)
        rows.row_max[row] = rows.row_max[row] - gate
        rows.window_row_max[row] = rows.row_max[row]


@cute.jit
def final_row_max(
    rows: RowState, row: cutlass.Constexpr[int], sees_window: Boolean
) -> tuple[Float32, Float32]:
    """Row maximum in a scale that all splits of the row share, and its offset.

    The scale is the window's if the gate favours it, else the compressed one: the branch that an
    infinite gate leaves standing keeps its maximum, the other's becomes -inf.

    Args:
        sees_window: whether any of the tiles was one of the window.

    Returns:
        row maximum, base 2; and what makes an lse in that scale one in compressed scale, natural
        log.
    """
    gate, row_max = rows.gate[row], rows.row_max[row]
    result, offset = row_max, Float32(0.0)
    if gate > 0.0:
        # The sink itself: in base 2 it may have overflowed.
        offset = rows.sink[row]
        if not sees_window:
            result = row_max - gate
    elif sees_window:
        result = row_max + gate
        if row_max == rows.window_row_max[row]:
            result = rows.compressed_row_max[row]
    return result, offset


def output_scale(
    row_max: Float32, row_sum: Float32, sink: Float32, is_softmax_sink: bool
) -> Float32:
    """1 / (row_sum + sink), the factor from accumulated row to output; 0 for a row without keys.

    The sink of "softmax" mode joins the denominator; the lse is without it. A sum of NaN, from a
    key or query that holds NaN or infinities, is no row without keys: the output is NaN.

    Args:
        row_max, row_sum: final row maximum, and sum of P relative to it, of the whole row.
        sink: natural log, may be infinite.
    """
    denominator = row_sum
    if is_softmax_sink:
        denominator = row_sum + exp2(sink * LOG2_E - row_max)
    return cutlass.select_(row_sum != 0.0, cute.arch.rcp_approx(denominator), Float32(0.0))


def row_lse(row_max: Float32, row_sum: Float32, offset: Float32) -> Float32:
    """Natural log of the sum of exponentials of a row; -inf for a row without keys, NaN for a sum
    of NaN.

    Args:
        row_max, row_sum: as in `output_scale`.
        offset: what `final_row_max` gives with `row_max`.
    """
    value = (row_max + cute.math.log2(row_sum, fastmath=True)) * LN_2 + offset
    return cutlass.select_(row_sum != 0.0, value, -Float32.inf)
