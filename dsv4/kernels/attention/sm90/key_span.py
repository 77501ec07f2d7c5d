"""Which keys a token sees, and which of them a work item takes: from the lengths, clamped."""

from typing import NamedTuple

import cutlass
from cutlass import cute

from dsv4.kernels.attention.mask import clamp_length

# Flags of a work item: both branches have keys; the block that the guess brings into the ring is
# its first one, or none of its.
BOTH_BRANCHES, RIGHT_GUESS, WRONG_GUESS = 1, 2, 4


class Lengths(NamedTuple):
    """Everything that says how many keys there are."""

    tokens: cutlass.Int32
    compressed_rows: cutlass.Int32
    batch: cutlass.Int32
    window_rows: cutlass.Int32
    swa_lens: cute.Tensor  # [batch] int32
    request_ids: cute.Tensor  # [T] int32
    compressed_lens: cute.Tensor  # [T] int32, or [0]: every row counts
    by_request_tokens: cute.FastDivmodDivisorV2


class Guess(NamedTuple):
    """A split's first block if all lengths are full and all requests have equally many tokens,
    as is likely in a decoding batch: known without a load."""

    block: cutlass.Int32  # or -1
    is_window: cutlass.Boolean
    row: cutlass.Int32
    request: cutlass.Int32

    def exists(self):
        return self.block >= 0


class Work(NamedTuple):
    """The keys of a work item, as words in shared memory: eight, because neighbouring loads become
    loads of four."""

    count: cutlass.Int32  # of blocks
    flags: cutlass.Int32
    first: cutlass.Int32  # block
    compressed_len: cutlass.Int32
    compressed_blocks: cutlass.Int32
    window_begin: cutlass.Int32
    window_end: cutlass.Int32  # exclusive
    request: cutlass.Int32

    @classmethod
    def load(cls, words: cute.Tensor):
        return cls(*(words[i] for i in range(len(cls._fields))))

    def store(self, words: cute.Tensor) -> None:
        for i, word in enumerate(self):
            words[i] = word

    def has(self, flag: int):
        return self.flags & flag != 0

    def place(self, block, keys: int):
        """Whether a block is of the window, its first row, and how many of its keys are valid."""
        is_window = block >= self.compressed_blocks
        window_row = self.window_begin + (block - self.compressed_blocks) * keys
        row = cutlass.select_(is_window, window_row, block * keys)
        end = cutlass.select_(is_window, self.window_end, self.compressed_len)
        return is_window, row, cutlass.min(end - row, keys)


WORK_WORDS = len(Work._fields)


def request_divisor(tokens, batch) -> cute.FastDivmodDivisorV2:
    """Divisor by the tokens of a request, if all have equally many; host code."""
    request_tokens = cute.ceil_div(tokens, cutlass.max(batch, 1))
    return cute.fast_divmod_create_divisor_v2(cutlass.max(request_tokens, 1))


def blocks_of_split(blocks, split, by_splits: cute.FastDivmodDivisorV2):
    """First block of a split, and how many it has: the first splits have one more, if not all have
    equally many."""
    each, more = (cutlass.Int32(x) for x in divmod(cutlass.Int32(blocks), by_splits))
    count = each + cutlass.select_(split < more, cutlass.Int32(1), cutlass.Int32(0))
    return each * split + cutlass.min(split, more), count


@cute.jit
def guess_first_block(
    lengths: Lengths,
    token: cutlass.Int32,
    split: cutlass.Int32,
    by_splits: cute.FastDivmodDivisorV2,
    keys: cutlass.Constexpr,
):
    """Guess where a split's keys begin."""
    compressed_blocks = cute.ceil_div(lengths.compressed_rows, keys)
    blocks = compressed_blocks + cute.ceil_div(lengths.window_rows, keys)
    block, _ = blocks_of_split(blocks, split, by_splits)
    is_window = block >= compressed_blocks
    row = cutlass.select_(is_window, block - compressed_blocks, block) * keys
    request = cutlass.Int32(token // lengths.by_request_tokens)
    return Guess(cutlass.select_(block < blocks, block, cutlass.Int32(-1)), is_window, row, request)


@cute.jit
def window_of(lengths: Lengths, request: cutlass.Int32):
    """Given window length of a request, or 0 for that of a padding token."""
    window_len = cutlass.Int32(0)
    if request >= 0 and request < lengths.batch:
        window_len = lengths.swa_lens[request]
    return window_len


@cute.jit
def find_work(
    lengths: Lengths,
    token: cutlass.Int32,
    split: cutlass.Int32,
    by_splits: cute.FastDivmodDivisorV2,
    guess: Guess,
    keys: cutlass.Constexpr,
    is_causal: cutlass.Constexpr,
    sliding_window: cutlass.Constexpr,
):
    """The keys of a split of a token; a padding token has none. The whole warp calls this."""
    # The window's length is loaded for the guessed request, beside the request itself.
    window_len = window_of(lengths, guess.request)
    compressed_len = cutlass.Int32(lengths.compressed_rows)
    if token < lengths.compressed_lens.shape[0]:
        compressed_len = lengths.compressed_lens[token]
    request = lengths.request_ids[token]
    if request != guess.request:
        window_len = window_of(lengths, request)
    compressed_len = clamp_length(compressed_len, lengths.compressed_rows)
    window_end = clamp_length(window_len, lengths.window_rows)
    window_begin = cutlass.Int32(0)
    if cutlass.const_expr(is_causal):
        # The token sits as far from the window's end as from its request's last token.
        window_end -= tokens_after(lengths, token, request)
        window_end = cutlass.max(window_end, 0)
        window_begin = cutlass.max(window_end - sliding_window, 0)
    if request < 0 or request >= lengths.batch:
        compressed_len = cutlass.Int32(0)
        window_begin = cutlass.Int32(0)
        window_end = cutlass.Int32(0)

    compressed_blocks = cute.ceil_div(compressed_len, keys)
    blocks = compressed_blocks + cute.ceil_div(window_end - window_begin, keys)
    first, count = blocks_of_split(blocks, split, by_splits)
    window = (window_begin, window_end, request)
    work = Work(count, cutlass.Int32(0), first, compressed_len, compressed_blocks, *window)
    is_window, row, _ = work.place(first, keys)
    flags = cutlass.Int32(0)
    if compressed_len > 0 and window_end > window_begin:
        flags |= BOTH_BRANCHES
    if guess.exists():
        is_right = count > 0 and is_window == guess.is_window and row == guess.row
        if is_right and not (is_window and request != guess.request):
            flags |= RIGHT_GUESS
        else:
            flags |= WRONG_GUESS
    return work._replace(flags=flags)


@cute.jit
def tokens_after(lengths: Lengths, token: cutlass.Int32, request: cutlass.Int32):
    """How many consecutive tokens of the same request follow; the whole warp searches."""
    lane = cute.arch.lane_idx()
    count = cutlass.Int32(0)
    searching = cutlass.Boolean(True)
    while searching:
        other = token + 1 + count + lane
        same = cutlass.Boolean(False)
        if other < lengths.tokens:
            same = lengths.request_ids[other] == request
        ballot = cute.arch.vote_ballot_sync(same)
        # The length of the ballot's run of trailing ones.
        run = cute.arch.popc(ballot & ~(ballot + 1))
        count += run
        searching = run == 32
    return count


@cute.jit
def find_keys(
    smem,
    lengths: Lengths,
    tiling,
    turns,
    keys: cutlass.Constexpr,
    is_causal: cutlass.Constexpr,
    sliding_window: cutlass.Constexpr,
    describe_first_block: cutlass.Constexpr,
):
    """Find and publish the keys of each of a CTA's work items; for a warp of its own, because the
    loads take their time behind the blocks that the load warp asks for.

    Args:
        smem: has `work`, `work_full` and `work_empty`.
        tiling, turns: which work items there are, and which of them this CTA has.
        keys: of a block.
        describe_first_block: called with a work item whose first block was guessed right, before
            the item is published; or None.
    """
    lane = cute.arch.lane_idx()
    index, stop, step = turns.of_cta(cute.arch.block_idx()[0])
    _, split, token = tiling.coordinates(index)
    guess = guess_first_block(lengths, token, split, tiling.by_splits, keys)
    phase = cutlass.Int32(1)
    cute.arch.griddepcontrol_wait()
    while index < stop:
        work = find_work(
            *(lengths, token, split, tiling.by_splits, guess),
            *(keys, is_causal, sliding_window),
        )
        cute.arch.mbarrier_wait(smem.work_empty, phase)
        phase ^= 1
        if lane == 0:
            work.store(smem.work)
            if cutlass.const_expr(describe_first_block is not None):  # noqa: SIM102 static, dynamic
                if work.has(RIGHT_GUESS):
                    describe_first_block(work)
            cute.arch.mbarrier_arrive(smem.work_full)
        index += step
        _, split, token = tiling.coordinates(index)
        guess = guess._replace(block=cutlass.Int32(-1))
