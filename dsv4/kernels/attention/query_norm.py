"""Norm of a query as a factor on its scores, of the sums of squares that its projection leaves."""

from cutlass import Float32, cute

from dsv4.kernels.kit.head_squares import parts
from dsv4.kernels.kit.reduce import tree
from dsv4.kernels.kit.rms import inverse_rms
from dsv4.kernels.kit.vectors import address_of, vector_at

VECTOR = 4  # parts that one load takes


class QueryNorm:
    """1 / sqrt(mean of the squares + eps) of heads.

    Parts are added as a balanced tree, neighbours first, whoever adds them: one thread, or lanes
    that share a head.
    """

    def __init__(self, head_dim: int, eps: float):
        self.head_dim = head_dim
        self.eps = eps
        self.vectors = parts(head_dim) // VECTOR

    def of_thread(self, squares: cute.Tensor, token, head) -> Float32:
        """Factor of a head [token, head] of squares [T, n_h, parts], by one thread."""
        found = cute.make_rmem_tensor((VECTOR, self.vectors), Float32)
        for i in range(self.vectors):
            self._load(squares, token, head, i, found[None, i])
        sums = [_sum(found[None, i]) for i in range(self.vectors)]
        return inverse_rms(tree(lambda a, b: a + b, sums), self.head_dim, self.eps)

    def of_lanes(
        self, squares: cute.Tensor, token, heads: list, place, distance: int
    ) -> list[Float32]:
        """The same of some heads by eight lanes that lie so far apart, each with its place among
        them; warps stay together here. All is loaded first: one load behind the other, each takes
        as long as all."""
        found = cute.make_rmem_tensor((VECTOR, len(heads)), Float32)
        for i, head in enumerate(heads):
            self._load(squares, token, head, place % self.vectors, found[None, i])
        totals = [_sum(found[None, i]) for i in range(len(heads))]
        for step in range(self.vectors.bit_length() - 1):
            others = [cute.arch.shuffle_sync_bfly(t, offset=distance << step) for t in totals]
            totals = [total + other for total, other in zip(totals, others)]
        return [inverse_rms(total, self.head_dim, self.eps) for total in totals]

    def _load(self, squares: cute.Tensor, token, head, vector, target: cute.Tensor) -> None:
        """Load four neighbouring parts."""
        offset = token * squares.stride[0] + head * squares.stride[1]
        source = vector_at(address_of(squares, offset), Float32, vector * VECTOR, VECTOR)
        cute.autovec_copy(source, target)


def _sum(found: cute.Tensor) -> Float32:
    """Sum of four neighbouring parts."""
    return tree(lambda a, b: a + b, [found[i] for i in range(VECTOR)])


def query_norm(config) -> QueryNorm | None:
    """The norm of a paged configuration whose queries come with sums of squares."""
    return None if config.q_eps is None else QueryNorm(config.head_dim, config.q_eps)
