"""post and comb of hyper-connections from their projections: sigmoids, and the passes of Sinkhorn's
iteration that are not left to the next seam."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute, range_constexpr

from dsv4.kernels.kit.vectors import address_of, vector_at
from dsv4.kernels.seam.config import MIX_ROWS, STREAMS, SeamConfig


class Mixing:
    """Arithmetic of the warp that mixes."""

    def __init__(self, config: SeamConfig):
        self.config = config

    @cute.jit
    def load_parameters(self, operands, lane) -> tuple[Float32, Float32]:
        """Base and scale of the row that a lane projects."""
        row = cutlass.min(lane, MIX_ROWS - 1)
        scale = operands.scale[cutlass.select_(row < STREAMS, Int32(1), Int32(2))]
        return operands.base[STREAMS + row], scale

    @cute.jit
    def store_post(self, target, lane, parameters, projected: Float32) -> None:
        """Write post of a token, of which lane k has the projection; keep what comb starts with,
        the softmax of each source's targets, by lanes: one alone would run sixteen exponentials.

        Args:
            target: operands, buffers, the token, and its place among those of the CTA.
            parameters: base and scale of the lane's row.
            projected: row 4 + lane of fn times the streams, over their root mean square.
        """
        operands, buffers, token, owned = target
        base, scale = parameters
        logit = cute.math.fma(projected, scale, base)
        # Four lanes have the targets of a source.
        largest = logit
        for offset in (1, 2):
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=offset))
        value = cute.math.exp(logit - largest)
        total = butterfly_of_four(value)
        if lane < STREAMS:
            if token < operands.x.shape[0]:
                operands.post_out[token, lane] = 2 * sigmoid(logit)
        elif lane < MIX_ROWS:
            start = cute.math.fma(value, reciprocal(total), Float32(self.config.eps))
            buffers.starts[lane - STREAMS, owned] = start

    @cute.jit
    def store_comb(self, starts: cute.Tensor, comb_out: cute.Tensor, token) -> None:
        """Write comb of a token, from what it starts with [16], source stream first; one lane
        does."""
        eps = Float32(self.config.eps)
        matrix = cute.make_rmem_tensor((STREAMS, STREAMS), Float32)  # [target, source]
        for j in range_constexpr(STREAMS):
            for k in range_constexpr(STREAMS):
                matrix[k, j] = starts[STREAMS * j + k]
        normalize_columns(matrix, eps)
        iterate(matrix, self.config.sinkhorn_iters - self.config.passes_left - 1, eps)
        for j in range_constexpr(STREAMS):
            at = Int64(token) * comb_out.stride[0] + j * Int64(comb_out.stride[1])
            target = vector_at(address_of(comb_out, at), Float32, 0, STREAMS)
            cute.autovec_copy(matrix[None, j], target)


@cute.jit
def iterate(matrix: cute.Tensor, passes: cutlass.Constexpr, eps: Float32) -> None:
    """Passes of Sinkhorn's iteration over a matrix [target, source]."""
    # Not unrolled: instructions that run once are fetched where they are needed.
    for _ in cutlass.range(passes, unroll=1):
        normalize_rows(matrix, eps)
        normalize_columns(matrix, eps)


@cute.jit
def normalize_rows(matrix: cute.Tensor, eps: Float32) -> None:
    """Divide the targets of each source by their sum."""
    for j in range_constexpr(STREAMS):
        inverse = reciprocal(tree_of_four([matrix[k, j] for k in range(STREAMS)]) + eps)
        for k in range_constexpr(STREAMS):
            matrix[k, j] = matrix[k, j] * inverse


@cute.jit
def normalize_columns(matrix: cute.Tensor, eps: Float32) -> None:
    """Divide the sources of each target by their sum."""
    for k in range_constexpr(STREAMS):
        inverse = reciprocal(tree_of_four([matrix[k, j] for j in range(STREAMS)]) + eps)
        for j in range_constexpr(STREAMS):
            matrix[k, j] = matrix[k, j] * inverse


def tree_of_four(terms: list) -> Float32:
    """Sum of four terms, two and two."""
    return (terms[0] + terms[1]) + (terms[2] + terms[3])


def butterfly_of_four(value: Float32) -> Float32:
    """Sum over four neighbouring lanes, with the bits of `tree_of_four`."""
    for offset in (1, 2):
        value = value + cute.arch.shuffle_sync_bfly(value, offset=offset)
    return value


def reciprocal(value: Float32) -> Float32:
    """1 / value, approximately: off by at most one unit in the last place."""
    return cute.arch.rcp_approx(value)


def sigmoid(logit: Float32) -> Float32:
    """1 / (1 + exp(-logit))."""
    return reciprocal(1 + cute.math.exp(-logit))
