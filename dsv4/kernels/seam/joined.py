"""Both halves of a seam for many tokens in one launch: products of groups, then tokens.

CTAs are those of `products.py`: a group of 128 columns and a part of the tokens. When a CTA has
written its products, it takes tokens of its part as a CTA of `collapse.py` does: number g, g +
groups, ... of the part belong to the CTA of group g. It waits there for the products of the part's
other CTAs, but only where all of these have begun, so that no CTA waits for one that may have no
place; tokens of a CTA that does not wait are left to the last one to arrive.

Memory order: a barrier puts the stores of a CTA's threads before the atomic of one, whose release
at GPU scope is cumulative. Read-modify-writes continue a release sequence, so that an acquire that
finds the last arrival synchronises with all; the CTA's next barrier extends that to its threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.seam import collapse
from dsv4.kernels.seam.collapse import Collapse
from dsv4.kernels.seam.columns import Columns, Operands
from dsv4.kernels.seam.config import COUNTER_WORDS, TILE, TILE_CTAS, WARP, SeamConfig
from dsv4.kernels.seam.products import Place, Products

# Reads of the count of CTAs that have begun, before a CTA leaves its tokens to another one.
MAX_POLLS = 16
LEFT_WORD = 4  # place of the 64 bits among a part's words


@dataclass(frozen=True)
class Counts:
    """Counts of a part of the tokens, all 0 between launches.

    Attributes:
        begun, arrived, ended: CTAs that run or have run, have written their products, and touch
            these words no more.
        left: 64 bits, of the CTAs that left their tokens to the last one to arrive.
    """

    begun: cute.Pointer
    arrived: cute.Pointer
    ended: cute.Pointer
    left: cute.Pointer

    @classmethod
    def of(cls, workspace: cute.Tensor, part: Int32) -> Counts:
        """Those of a part, in front of the partial sums."""
        at = part * COUNTER_WORDS
        words = (pointer_at(workspace.iterator, Int64(at + i), Int32, align=4) for i in range(3))
        return cls(*words, pointer_at(workspace.iterator, Int64(at + LEFT_WORD), Int64, align=8))


class Joined:
    """Kernel of one configuration."""

    def __init__(self, config: SeamConfig, columns: Columns, products: Products):
        self.config = config
        self.products = products
        self.groups = products.groups
        self.collapse = Collapse(config, columns, products.threads // WARP)

    @cute.jit
    def launch(
        self,
        operands: Operands,
        fn: cute.Tensor,
        partials: cute.Tensor,
        workspace: cute.Tensor,
        parts: Int32,
        stream,
    ):
        self.kernel(operands, fn, partials, workspace).launch(
            grid=[self.groups, parts, 1],
            block=[self.products.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=TILE_CTAS,
            # Given, because the compiler would ask a driver for the capacity.
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self, operands: Operands, fn: cute.Tensor, partials: cute.Tensor, workspace: cute.Tensor
    ):
        products = self.products
        place = products.find_place()
        buffers, shared = products.allocate(), self.collapse.allocate()
        smem = SmemAllocator()
        told = smem.allocate_tensor(Int64, cute.make_layout(1), byte_alignment=8)
        counts = Counts.of(workspace, place.part)
        weights = products.begin(operands, fn, buffers, place)
        thread = cute.arch.thread_idx()[0]
        if thread == 0:
            cute.arch.red(counts.begun, Int32(1), op="add", dtype="s32", sem="relaxed", scope="gpu")
        live = products.write_first(operands, buffers, place, partials)
        begun = Int32(0)
        if thread == 0:
            begun = cute.arch.load(counts.begun, Int32, sem="relaxed", scope="gpu")
        products.run(operands, buffers, place, weights, live, partials)
        tokens = self.tokens_of(operands, place.part)
        parameters = self.collapse.load_parameters(operands, place.lane)
        if thread == 0:
            told[0] = self.meet(counts, place.group, place.group < tokens, begun)
        cute.arch.sync_threads()
        slices = told[0]
        if slices != 0:
            for group in cutlass.range(self.groups, unroll=1):
                if (slices >> Int64(group)) & 1 != 0:
                    self.take_slice(operands, partials, shared, place, group, tokens, parameters)
        if thread == 0:
            self.leave(counts)

    def tokens_of(self, operands: Operands, part: Int32) -> Int32:
        """Places for tokens in the tiles of a part."""
        parts = cute.arch.grid_dim()[1]
        tiles = (operands.x.shape[0] + TILE - 1) // TILE
        return (tiles - part + parts - 1) // parts * TILE

    @cute.jit
    def meet(self, counts: Counts, group: Int32, has_tokens: Boolean, begun: Int32) -> Int64:
        """Publish the CTA's products, and wait for those of the part's other CTAs where it has
        tokens; the slices of tokens that it is to take, one bit each, by one thread."""
        own = Int64(1) << Int64(group)
        groups, polls, left = Int32(self.groups), Int32(0), Boolean(False)
        if has_tokens:
            while begun < groups and polls < MAX_POLLS:
                begun = cute.arch.load(counts.begun, Int32, sem="relaxed", scope="gpu")
                polls += 1
            if begun < groups:
                left = Boolean(True)
                cute.arch.red(counts.left, own, op="or", dtype="b64", sem="relaxed", scope="gpu")
        arrived = 1 + cute.arch.atomic_add(counts.arrived, Int32(1), sem="acq_rel", scope="gpu")
        slices = Int64(0)
        if arrived == groups:
            slices = cute.arch.load(counts.left, Int64, sem="relaxed", scope="gpu")
        if has_tokens and not left:
            slices = slices | own
            while arrived < groups:
                arrived = cute.arch.load(counts.arrived, Int32, sem="acquire", scope="gpu")
        return slices

    @cute.jit
    def take_slice(
        self,
        operands: Operands,
        partials: cute.Tensor,
        shared: collapse.Buffers,
        place: Place,
        first: Int32,
        tokens: Int32,
        parameters: tuple,
    ) -> None:
        """Take the tokens of the CTA of a group."""
        parts = cute.arch.grid_dim()[1]
        for i in cutlass.range(first, tokens, self.groups, unroll=1):
            token = (place.part + i // TILE * parts) * TILE + i % TILE
            if token < operands.x.shape[0]:
                where = collapse.Place(token, cute.arch.thread_idx()[0], place.warp, place.lane)
                # Its two barriers also part what it writes from what the token before reads.
                self.collapse.take(operands, partials, shared, where, parameters)

    @cute.jit
    def leave(self, counts: Counts) -> None:
        """Leave zeros behind where the CTA is the last one of its part."""
        ended = cute.arch.atomic_add(counts.ended, Int32(1), sem="acq_rel", scope="gpu")
        if ended == self.groups - 1:
            for word in (counts.begun, counts.arrived, counts.ended):
                word.store(Int32(0))
            counts.left.store(Int64(0))
