"""Blocks that are kept for later requests: found by their tokens, dropped in order of use."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from dsv4.cache.allocator import BlockAllocator, OutOfBlocksError
from dsv4.cache.manager import CacheManager
from dsv4.cache.prefixes import Prefixes
from dsv4.cache.ring_snapshots import RingSnapshots
from tests.engine.tiny_model import BLOCK, tiny_model

pytestmark = pytest.mark.stage("cache")

SIZE = 4


class TestHolders:
    def test_a_block_is_free_when_its_last_holder_gives_it_back(self) -> None:
        allocator = BlockAllocator(3)
        blocks = allocator.allocate(2)
        allocator.share(blocks[:1])
        allocator.free(blocks)
        assert (allocator.num_free, allocator.is_held(blocks[0])) == (2, True)
        allocator.free(blocks[:1])
        assert (allocator.num_free, allocator.is_held(blocks[0])) == (3, False)
        with pytest.raises(ValueError, match="freed twice"):
            allocator.free(blocks[:1])

    def test_a_kept_block_is_free_when_it_is_dropped(self) -> None:
        allocator = BlockAllocator(2)
        first, second = allocator.allocate(2)
        allocator.keep(first)
        allocator.free([first, second])
        assert (allocator.num_free, allocator.num_idle) == (1, 1)
        allocator.share([first])
        assert (allocator.num_free, allocator.num_idle) == (1, 0)
        allocator.drop(first)
        assert (allocator.num_free, allocator.num_idle) == (1, 0)
        allocator.free([first])
        assert (allocator.num_free, allocator.num_idle) == (2, 0)

    def test_blocks_that_nothing_holds_are_refused(self) -> None:
        allocator = BlockAllocator(3)
        [block] = allocator.allocate(1)
        other = 1 - block if block < 2 else 0
        for refused in (
            lambda: allocator.share([block, other]),
            lambda: allocator.share([block, block]),
            lambda: allocator.keep(other),
            lambda: allocator.drop(block),
        ):
            with pytest.raises(ValueError, match=r"not allocated|distinct"):
                refused()
        allocator.free([block])
        assert (allocator.num_free, allocator.num_idle) == (3, 0)


def kept(prefixes: Prefixes, allocator: BlockAllocator, tokens: list[int]) -> list[int]:
    """Keep a sequence of whole blocks as a request would that is over then; its blocks."""
    match = prefixes.find(tokens, len(tokens))
    allocator.share(match.blocks)
    blocks = match.blocks + allocator.allocate(len(tokens) // SIZE - len(match.blocks))
    snapshot = prefixes.take_snapshot()
    prefixes.insert(tokens, blocks, snapshot, match.node)
    allocator.free(blocks)
    return blocks


def test_the_longest_known_beginning_is_found() -> None:
    allocator = BlockAllocator(20)
    prefixes = Prefixes(allocator, SIZE, 8)
    tokens = list(range(16))
    assert prefixes.find(tokens, 16).blocks == []
    two = kept(prefixes, allocator, tokens[:8])
    four = kept(prefixes, allocator, tokens)
    other = kept(prefixes, allocator, tokens[:8] + [99] * 4)
    assert four[:2] == two == other[:2], "what is known already is kept twice"
    assert len({*four, *other}) == 5
    cases = [
        (tokens, 16, four),
        ([*tokens, 1, 2], 18, four),
        (tokens, 15, two),  # three blocks are known, whose end nothing keeps
        (tokens, 7, []),
        (tokens[:8] + [99] * 5, 13, other),
        ([*tokens[:11], 99], 12, two),
        ([99, *tokens], 17, []),
    ]
    for known, most, blocks in cases:
        match = prefixes.find(known, most)
        assert match.blocks == blocks, known
        assert (match.snapshot is None) == (match.node is None) == (not blocks)
    snapshots = [prefixes.find(t, len(t)).snapshot for t in (tokens[:8], tokens, cases[4][0])]
    assert len(set(snapshots)) == 3


def test_a_sequence_that_is_kept_again_gives_its_snapshot_back() -> None:
    allocator = BlockAllocator(4)
    prefixes = Prefixes(allocator, SIZE, 2)
    tokens = list(range(8))
    blocks = kept(prefixes, allocator, tokens)
    first = prefixes.find(tokens, 8).snapshot
    # Of a request that did not know of it.
    doubles = allocator.allocate(2)
    prefixes.insert(tokens, doubles, prefixes.take_snapshot())
    allocator.free(doubles)
    assert prefixes.find(tokens, 8)[:2] == (blocks, first)
    assert (allocator.num_free, allocator.num_idle) == (2, 2)
    assert prefixes.take_snapshot() not in (None, first)


def test_the_end_that_was_of_no_use_for_longest_makes_way() -> None:
    allocator = BlockAllocator(20)
    prefixes = Prefixes(allocator, SIZE, 3)
    a, b, c, d = ([n] * 8 for n in range(4))
    for tokens in (a, b, c):
        kept(prefixes, allocator, tokens)
    prefixes.find(a, 8)
    kept(prefixes, allocator, d)
    assert [bool(prefixes.find(t, 8).blocks) for t in (a, b, c, d)] == [True, False, True, True]
    assert allocator.num_idle == 6
    taken = [prefixes.take_snapshot() for _ in range(4)]
    assert sorted(taken[:3]) == [0, 1, 2] and taken[3] is None
    assert (allocator.num_free, allocator.num_idle) == (20, 0)
    prefixes.give_snapshot(taken[1])
    assert prefixes.take_snapshot() == taken[1]


def test_room_is_made_of_what_no_request_holds() -> None:
    allocator = BlockAllocator(6)
    prefixes = Prefixes(allocator, SIZE, 4)
    old, new = [0] * 8, [1] * 8
    used = kept(prefixes, allocator, old)
    allocator.share(used)
    kept(prefixes, allocator, new)
    prefixes.make_room(5)
    assert (allocator.num_free, allocator.num_idle) == (2, 2), "in vain"
    prefixes.make_room(4)
    assert (allocator.num_free, allocator.num_idle) == (4, 0)
    assert prefixes.find(old, 8).blocks == used
    assert prefixes.find(new, 8).blocks == []


def test_a_branch_keeps_the_blocks_before_it() -> None:
    allocator = BlockAllocator(6)
    prefixes = Prefixes(allocator, SIZE, 3)
    stem = [0] * 8
    blocks = kept(prefixes, allocator, stem + [1] * 4)
    kept(prefixes, allocator, stem + [2] * 4)
    prefixes.make_room(3)  # drops the first branch
    assert prefixes.find(stem + [1] * 4, 12).blocks == []
    assert prefixes.find(stem + [2] * 4, 12).blocks[:2] == blocks[:2]
    assert allocator.num_idle == 3


def test_a_node_that_was_dropped_is_no_beginning(seed: int) -> None:
    """A request goes on from where it was found, while the tree forgets that."""
    allocator = BlockAllocator(6)
    prefixes = Prefixes(allocator, SIZE, 1)
    blocks = kept(prefixes, allocator, [0] * 8)
    match = prefixes.find([0] * 8, 8)
    allocator.share(blocks)
    snapshot = prefixes.take_snapshot()
    assert allocator.num_idle == 0 and not match.node.is_known
    blocks += allocator.allocate(1)
    prefixes.insert([0] * 12, blocks, snapshot, match.node)
    assert prefixes.find([0] * 12, 12).blocks == blocks
    allocator.free(blocks)
    assert (allocator.num_free, allocator.num_idle) == (3, 3)


def test_room_is_made_behind_a_block_that_leads_to_another_requests(seed: int) -> None:
    """Two requests compute the same beginning side by side; the first one's block is kept, and the
    second one's block behind it."""
    allocator = BlockAllocator(4)
    prefixes = Prefixes(allocator, SIZE, 2)
    first, second = allocator.allocate(1), allocator.allocate(2)
    prefixes.insert([0] * 4, first, prefixes.take_snapshot())
    prefixes.insert([0] * 8, second, prefixes.take_snapshot())
    allocator.free(first)
    assert (allocator.num_free, allocator.num_idle) == (1, 1)
    prefixes.make_room(2)
    assert (allocator.num_free, allocator.num_idle) == (2, 0)


def test_random_sequences(seed: int) -> None:
    """Against lists of what was kept: blocks hold what they say, and none is lost."""
    dice = random.Random(seed)
    allocator = BlockAllocator(12)
    prefixes = Prefixes(allocator, SIZE, 4)
    contents: dict[int, list[int]] = {}  # of blocks, by what was last written
    running: list[list[int]] = []
    found = 0
    for _ in range(800):
        if running and dice.random() < 0.4:
            allocator.free(running.pop(dice.randrange(len(running))))
        tokens = [n for _ in range(dice.randrange(1, 5)) for n in [dice.randrange(2)] * SIZE]
        match = prefixes.find(tokens, len(tokens) - 1)
        for depth, block in enumerate(match.blocks):
            assert contents[block] == tokens[: (depth + 1) * SIZE]
        found += len(match.blocks)
        missing = len(tokens) // SIZE - len(match.blocks)
        allocator.share(match.blocks)
        prefixes.make_room(missing)
        try:
            blocks = match.blocks + allocator.allocate(missing)
        except OutOfBlocksError:
            assert allocator.num_free + allocator.num_idle < missing
            allocator.free(match.blocks)
            continue
        running.append(blocks)
        for depth in range(len(match.blocks), len(blocks)):
            contents[blocks[depth]] = tokens[: (depth + 1) * SIZE]
        snapshot = prefixes.take_snapshot()
        prefixes.insert(tokens, blocks, snapshot, match.node)
    assert found > 100
    for blocks in running:
        allocator.free(blocks)
    prefixes.make_room(12)
    assert (allocator.num_free, allocator.num_idle) == (12, 0)
    assert sorted(prefixes.take_snapshot() for _ in range(4)) == [0, 1, 2, 3]


def test_a_manager_begins_behind_known_blocks() -> None:
    sizes = SimpleNamespace(
        max_requests=2,
        num_blocks=4,
        max_blocks_per_request=4,
        block_size=BLOCK,
        max_draft=0,
        device=torch.device("cpu"),
    )
    cache = CacheManager(sizes, snapshots=2)
    first = cache.admit(2 * BLOCK)
    known = cache.first_blocks(first, 2)
    cache.step([first], [2 * BLOCK], 2 * BLOCK)
    tokens = [7] * 2 * BLOCK
    cache.prefixes.insert(tokens, known, cache.prefixes.take_snapshot())
    second = cache.admit(3 * BLOCK, known)
    assert cache.length(second) == 2 * BLOCK
    assert cache.first_blocks(second, 3)[:2] == known
    cache.release(first)
    with pytest.raises(OutOfBlocksError):
        cache.admit(2 * BLOCK)
    assert cache.num_free_slots == 1
    with pytest.raises(OutOfBlocksError):
        cache.admit(4 * BLOCK, known)
    cache.release(second)
    assert (cache.allocator.num_free, cache.allocator.num_idle) == (2, 2)
    # What is kept makes way for a request.
    third = cache.admit(4 * BLOCK)
    assert cache.blocks(third) == 4
    assert cache.prefixes.find(tokens, 2 * BLOCK).blocks == []


def test_snapshots_hold_what_is_read_behind_a_block(seed: int) -> None:
    """Window and overlapping state of every layer; other rows and other snapshots stay."""
    model = tiny_model(seed)
    cache = model.new_cache(3, 4, 2, max_draft=1)
    snapshots = RingSnapshots(cache, 2)
    rings = [layer.window.data[:3] for layer in cache.layers]
    for spec, layer in zip(model.config.schedule, cache.layers):
        rings += [ring.data for ring in layer.state.rings() if spec.overlap]
    assert len(rings) == 4 + 2  # an MTP layer; compressor and indexer of CSA
    assert snapshots.bytes == sum(ring[0].nbytes for ring in rings)
    for ring in rings:
        ring.normal_()
    before = [ring.clone() for ring in rings]
    snapshots.save(1, 0)
    snapshots.save(2, 1)
    for ring in rings:
        ring.zero_()
    snapshots.restore(0, 2)
    for ring, old in zip(rings, before):
        assert torch.equal(ring[2], old[1]) and not ring[:2].any()
    snapshots.restore(1, 0)
    for ring, old in zip(rings, before):
        assert torch.equal(ring[0], old[2])
