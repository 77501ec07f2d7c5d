"""comb of a CTA's tokens: the passes of Sinkhorn's iteration that the seam before left, a token a
thread.

The iteration is 40 normalisations one behind the other, 1.1 us on an H200, of which half end with
x. For the others the launch behind that seam would wait; before a seam's own wait the launch before
it is still busy. So a seam leaves them to the next one, which begins with them.

What it finds there is a guess: nothing says that the seam before the sublayer is over when this one
starts early. The same words are loaded again behind the wait, past L1 as before; where they are
others the iteration is run again. So a guess costs nothing but time, whatever it finds.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, cute

from dsv4.kernels.kit.loads import load_words
from dsv4.kernels.kit.vectors import address_of, pointer_to
from dsv4.kernels.seam.config import STREAMS, SeamConfig
from dsv4.kernels.seam.mixing import iterate


@dataclass(frozen=True)
class Guess:
    """A token's matrix in registers.

    Attributes:
        words: [target, source], what it is made from.
        matrix: [target, source] fp32, doubly stochastic.
    """

    words: cute.Tensor
    matrix: cute.Tensor


class Combs:
    """Arithmetic of one configuration."""

    def __init__(self, config: SeamConfig):
        self.config = config

    def registers(self) -> Guess:
        """Room for a token's matrix."""
        shape = (STREAMS, STREAMS)
        return Guess(cute.make_rmem_tensor(shape, Int32), cute.make_rmem_tensor(shape, Float32))

    @cute.jit
    def load(self, comb: cute.Tensor, token: Int32, words: cute.Tensor) -> None:
        """Begin to load what a token's matrix is made from, as memory holds it now."""
        for j in cutlass.range_constexpr(STREAMS):
            at = Int64(token) * comb.stride[0] + j * Int64(comb.stride[1])
            row = load_words(pointer_to(address_of(comb, at), Int32, 16), STREAMS, past_l1=True)
            for k in cutlass.range_constexpr(STREAMS):
                words[k, j] = row[k]

    @cute.jit
    def iterate(self, guess: Guess) -> None:
        """Make the matrix."""
        words = cute.recast_tensor(guess.words, Float32)
        for i in cutlass.range_constexpr(STREAMS * STREAMS):
            guess.matrix[i] = words[i]
        iterate(guess.matrix, self.config.passes_left, Float32(self.config.eps))

    @cute.jit
    def settle(self, comb: cute.Tensor, token: Int32, guess: Guess, target: cute.Tensor) -> None:
        """Store a token's matrix [target, source], behind the wait."""
        words = cute.make_rmem_tensor((STREAMS, STREAMS), Int32)
        self.load(comb, token, words)
        differences = Int32(0)
        for i in cutlass.range_constexpr(STREAMS * STREAMS):
            differences = differences | (words[i] ^ guess.words[i])
        if differences != 0:
            for i in cutlass.range_constexpr(STREAMS * STREAMS):
                guess.words[i] = words[i]
            self.iterate(guess)
        cute.autovec_copy(guess.matrix, target)

    @cute.jit
    def store(self, comb: cute.Tensor, token: Int32, target: cute.Tensor) -> None:
        """Store a token's matrix that nothing was guessed of."""
        guess = self.registers()
        self.load(comb, token, guess.words)
        self.iterate(guess)
        cute.autovec_copy(guess.matrix, target)
