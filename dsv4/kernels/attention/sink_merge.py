"""Joining the two branches and the sink. Nothing here depends on the architecture.

`"swa_gate"` weighs the window by e^sink, which is the same as adding the sink to every window
logit. Doing that literally loses the logits when the sink is large, and gives inf - inf when it is
infinite. So nothing is ever added to a logit: window logits stay as they are, and the compressed
branch's reference moves by -sink into the window's scale instead ("window scale": logits of the
window as they are; "compressed scale": the same plus the sink). A branch that dominates keeps its
own reference exactly; one that vanishes gets a weight of 0 from an infinite difference.

All references and sinks here are in base 2.
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
    """Log2 of the factor on the window's weights.

    1 in "softmax" mode, and when a branch is empty: what is left is then that branch alone, for lse
    too.
    """
    gate = Float32(0.0)
    if cutlass.const_expr(sink_mode == "swa_gate"):
        gate = sink_logit * LOG2_E if both_branches else Float32(0.0)
    return gate


class RowState(NamedTuple):
    """Softmax state of a thread's rows, each a register tensor of one fp32 a row."""

    maximum: cute.Tensor  # reference: compressed scale, window scale once the window is entered
    total: cute.Tensor  # this thread's part of the weights, relative to `maximum`
    sink: cute.Tensor  # natural log
    gate: cute.Tensor  # see `window_gate`
    left_compressed_at: cute.Tensor  # `maximum` when the window was entered, compressed scale
    entered_window_at: cute.Tensor  # the same in window scale


@cute.jit
def new_rows(
    sink: cute.Tensor, both_branches: Boolean, sink_mode: cutlass.Constexpr[str]
) -> RowState:
    """State before the first tile."""
    rows = RowState(*[cute.make_rmem_tensor(cute.size(sink), Float32) for _ in range(6)])
    for tensor in (rows.maximum, rows.left_compressed_at, rows.entered_window_at):
        tensor.fill(-Float32.inf)
    rows.total.fill(0.0)
    for row in cutlass.range_constexpr(cute.size(sink)):
        rows.sink[row] = sink[row]
        rows.gate[row] = window_gate(sink[row], both_branches, sink_mode)
    return rows


@cute.jit
def enter_window(rows: RowState) -> None:
    """Take the references from compressed to window scale, after at least one compressed tile."""
    for row in cutlass.range_constexpr(cute.size(rows.maximum)):
        rows.left_compressed_at[row] = rows.maximum[row]
        rows.maximum[row] = rows.maximum[row] - rows.gate[row]
        rows.entered_window_at[row] = rows.maximum[row]


@cute.jit
def reference(
    rows: RowState, row: cutlass.Constexpr[int], sees_window: Boolean
) -> tuple[Float32, Float32]:
    """Final reference of a row, in a scale that all splits of the row share, and its offset.

    The scale is the window's if the gate favours it, else the compressed one: the branch that an
    infinite gate leaves standing keeps its reference, the other's becomes -inf.

    Args:
        sees_window: whether any of the tiles was one of the window.

    Returns:
        reference, base 2; and what makes an lse in that scale one in compressed scale, natural log.
    """
    gate, maximum = rows.gate[row], rows.maximum[row]
    result, offset = maximum, Float32(0.0)
    if gate > 0.0:
        # The sink itself: in base 2 it may have overflowed.
        offset = rows.sink[row]
        if not sees_window:
            result = maximum - gate
    elif sees_window:
        result = maximum + gate
        if maximum == rows.entered_window_at[row]:
            result = rows.left_compressed_at[row]
    return result, offset


def output_scale(maximum: Float32, total: Float32, sink: Float32, is_softmax_sink: bool) -> Float32:
    """1 / (total + sink), what turns an accumulated row into the output; 0 for a row without keys.

    The sink of "softmax" mode joins the denominator; the lse is without it. A total of NaN, from a
    key or query that holds NaN or infinities, is no row without keys: the output is NaN.

    Args:
        maximum, total: final reference, and weights relative to it, of the whole row.
        sink: natural log, may be infinite.
    """
    denominator = total
    if is_softmax_sink:
        denominator = total + exp2(sink * LOG2_E - maximum)
    return cutlass.select_(total != 0.0, cute.arch.rcp_approx(denominator), Float32(0.0))


def row_lse(maximum: Float32, total: Float32, offset: Float32) -> Float32:
    """Natural log of the weight that formed a row; -inf for a row without keys, NaN for a total of
    NaN.

    Args:
        maximum, total: as in `output_scale`.
        offset: what `reference` gives with `maximum`.
    """
    value = (maximum + cute.math.log2(total, fastmath=True)) * LN_2 + offset
    return cutlass.select_(total != 0.0, value, -Float32.inf)
