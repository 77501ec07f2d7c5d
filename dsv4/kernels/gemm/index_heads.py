"""Index heads of a tile as codes: the epilogue `IndexRounding` behind its sums, of any
architecture.

The 128 rows of a tile are a head, which its threads leave in shared memory, rounded to bf16. Then
16 lanes take a token: RoPE, Hadamard transform, FP4 and codes by the functions that round the
queries of the indexer elsewhere, so that the bits are those.
"""

from __future__ import annotations

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint32, cute

from dsv4.kernels.gemm.config import K_BLOCK
from dsv4.kernels.gemm.operands import HeadOperands, OutputTile, chosen_matrix, table_row
from dsv4.kernels.gemm.plan import STAGED_ROW
from dsv4.kernels.gemm.quantize import PAIRS, TEAM, VECTOR, WARP_TEAMS
from dsv4.kernels.kit.index_entry import MODEL_DIM
from dsv4.kernels.kit.index_rounding import coded, rotated, transformed
from dsv4.kernels.kit.kv_entry import ROPE_DIM
from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.kit.vectors import address_of, vector_at

WARP = 32
ROTATED_LANES = ROPE_DIM // VECTOR  # the last ones of a team

assert MODEL_DIM == K_BLOCK and ROTATED_LANES * VECTOR == ROPE_DIM


class IndexHeads:
    """The device functions of the epilogue.

    Args:
        threads: that call them, whole warps.
        tokens: of a tile that they round, neighbours.
    """

    def __init__(self, threads: int, tokens: int):
        self.teams, self.tokens = threads // TEAM, tokens
        self.turns = -(-tokens // self.teams)  # tokens of a team
        # Both teams of a warp, whose lanes shuffle, take as many, and its lanes hold a position of
        # each.
        assert tokens % WARP_TEAMS == 0 and self.turns <= TEAM, f"{tokens} tokens, {threads}"

    def held(self) -> tuple[cute.Tensor, cute.Tensor]:
        """Registers of `load_position`, and of `load_turns`: [pair, cosine or sine]."""
        position = cute.make_rmem_tensor(1, Int32)
        return position, cute.make_rmem_tensor((PAIRS, 2), Float32)

    def load_position(self, heads: HeadOperands, first_token, position: cute.Tensor) -> None:
        """Ask for the positions of a team's tokens: lane i has the i-th one's."""
        thread, positions = cute.arch.thread_idx()[0], heads.positions
        token = first_token + (thread % TEAM * self.teams + thread // TEAM)
        position[0] = positions[cutlass.min(token, Int32(positions.shape[0]) - 1)]

    def load_turns(
        self, heads: HeadOperands, position: cute.Tensor, i: Int32 | int, turns: cute.Tensor
    ) -> None:
        """Ask for cosines and sines of a lane's pairs, of the team's i-th token; lanes whose
        channels are not rotated have some, too."""
        thread, rope = cute.arch.thread_idx()[0], heads.rope
        own = cute.arch.shuffle_sync(position[0], thread % WARP // TEAM * TEAM + i)
        row = Int64(table_row(rope, own)) * rope.stride[0]
        for part in range(2):
            first = row + part * (ROPE_DIM // 2) + thread % ROTATED_LANES * PAIRS
            source = vector_at(address_of(rope, first), Float32, 0, PAIRS)
            cute.autovec_copy(source, turns[None, part])

    @cute.jit
    def store(
        self, operands, tile: OutputTile, staged: cute.Pointer, first_token, position: cute.Tensor,
        turns: cute.Tensor,
    ):  # fmt: skip
        """Write codes and scales of the tokens from `first_token` on.

        Args:
            operands: of the launch.
            staged: bf16 [token, row], padded.
            position, turns: of `load_position`, and of `load_turns` for the team's first token.
        """
        thread = cute.arch.thread_idx()[0]
        lane, team = thread % TEAM, thread // TEAM
        heads = operands.heads[0]
        y = chosen_matrix(operands.ys, tile.weight, Float8E4M3FN)
        scales = chosen_matrix(heads.scales, tile.weight, Float32)
        for i in cutlass.range(self.turns, unroll=1):
            own = i * self.teams + team
            now = cute.make_rmem_tensor((PAIRS, 2), Float32)
            now.store(turns.load())
            if i + 1 < self.turns:
                self.load_turns(heads, position, i + 1, turns)
            if own < self.tokens:
                codes, scale = self.codes_of(staged, own, now, lane)
                token, row = first_token + own, tile.row_tile * K_BLOCK
                # CTAs that share activations may have a row tile behind the last one.
                if token < y.shape[0] and row < y.shape[1]:
                    offset = Int64(token) * y.stride[0] + (row + lane * VECTOR)
                    target = pointer_at(y.iterator, offset, Uint32, align=VECTOR)
                    cute.autovec_copy(codes, cute.make_tensor(target, cute.make_layout(2)))
                    if lane == 0:
                        scales[token, tile.row_tile] = scale

    def codes_of(
        self, staged: cute.Pointer, own, turns: cute.Tensor, lane
    ) -> tuple[cute.Tensor, Float32]:
        """A lane's codes of a head of a token, as words, and the head's scale."""
        words = cute.make_rmem_tensor(PAIRS, Uint32)
        place = cute.assume(own * STAGED_ROW + lane * VECTOR, divby=VECTOR)
        source = cute.recast_ptr(staged + place, dtype=Uint32)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(PAIRS)), words)
        pairs = [words[i] for i in range(PAIRS)]
        is_rotated = lane >= TEAM - ROTATED_LANES
        pairs = [
            Uint32(cutlass.select_(is_rotated, new, old))
            for new, old in zip(rotated(pairs, turns[None, 0], turns[None, 1]), pairs)
        ]
        codes, scale = coded(transformed(pairs, lane))
        return cute.recast_tensor(codes, Uint32), scale


def is_one_of(chosen: list[bool], index: Int32 | int):
    """Whether the flag at an index, which may be known at run time, is set."""
    found = False
    for i, is_chosen in enumerate(chosen):
        if is_chosen:
            found = (index == i) | found
    return found
