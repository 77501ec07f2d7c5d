"""Allocator, block table and manager: what they hand out, what they refuse, what they give back."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dsv4.cache.allocator import BlockAllocator, OutOfBlocksError
from dsv4.cache.block_table import NO_BLOCK, BlockTable
from dsv4.cache.manager import CacheManager, OutOfSlotsError
from dsv4.cache.staging import upload

BLOCK = 128


def manager(max_requests=4, num_blocks=8, max_blocks=6, max_draft=0) -> CacheManager:
    """A manager over the sizes of a cache; it never looks at the cache's tensors."""
    return CacheManager(
        SimpleNamespace(
            max_requests=max_requests,
            num_blocks=num_blocks,
            max_blocks_per_request=max_blocks,
            block_size=BLOCK,
            max_draft=max_draft,
            device=torch.device("cpu"),
        )
    )


@pytest.mark.stage("cache")
class TestAllocator:
    def test_hands_out_every_block_once(self) -> None:
        allocator = BlockAllocator(5)
        blocks = allocator.allocate(2) + allocator.allocate(3)
        assert sorted(blocks) == [0, 1, 2, 3, 4]
        assert allocator.num_free == 0
        allocator.free(blocks[1:4])
        assert sorted(allocator.allocate(3)) == sorted(blocks[1:4])

    def test_takes_all_or_nothing(self) -> None:
        allocator = BlockAllocator(5)
        allocator.allocate(3)
        with pytest.raises(OutOfBlocksError, match="3 needed, 2 of 5 free"):
            allocator.allocate(3)
        assert allocator.num_free == 2
        assert allocator.allocate(0) == []
        assert len(allocator.allocate(2)) == 2

    def test_refuses_wrong_blocks_and_keeps_its_state(self) -> None:
        allocator = BlockAllocator(4)
        blocks = allocator.allocate(2)
        for wrong in ([blocks[0], 3], [blocks[0], 17], [blocks[0], -1], [blocks[0]] * 2):
            with pytest.raises(ValueError, match=r"not allocated|distinct"):
                allocator.free(wrong)
            assert allocator.num_free == 2
        allocator.free(blocks)
        with pytest.raises(ValueError, match="freed twice"):
            allocator.free(blocks)
        assert allocator.num_free == 4

    @pytest.mark.parametrize("num_blocks", [0, -1])
    def test_needs_blocks(self, num_blocks: int) -> None:
        with pytest.raises(ValueError, match="num_blocks"):
            BlockAllocator(num_blocks)

    def test_refuses_a_negative_count(self) -> None:
        with pytest.raises(ValueError, match="count"):
            BlockAllocator(1).allocate(-1)


@pytest.mark.stage("cache")
class TestBlockTable:
    def test_rows_grow_and_shrink_at_the_end(self) -> None:
        table = BlockTable(2, 4)
        table.append(1, [7, 5])
        table.append(1, [6])
        assert table.row(1, 4).tolist() == [7, 5, 6, NO_BLOCK]
        assert table.row(0, 2).tolist() == [NO_BLOCK, NO_BLOCK]
        assert table.shrink(1, 3) == []
        assert table.shrink(1, 1) == [5, 6]
        assert table.row(1, 4).tolist() == [7, NO_BLOCK, NO_BLOCK, NO_BLOCK]
        assert table.count(1) == 1

    def test_refuses_more_than_a_row_holds(self) -> None:
        table = BlockTable(1, 3)
        table.append(0, [2, 1])
        with pytest.raises(ValueError, match="slot 0 would hold 4 blocks"):
            table.append(0, [3, 4])
        assert table.row(0, 3).tolist() == [2, 1, NO_BLOCK]

    @pytest.mark.parametrize("sizes", [(0, 1), (1, 0)])
    def test_needs_a_size(self, sizes: tuple[int, int]) -> None:
        with pytest.raises(ValueError, match=r"num_slots|max_blocks"):
            BlockTable(*sizes)


@pytest.mark.stage("cache")
class TestManager:
    def test_a_request_from_admission_to_release(self) -> None:
        cache = manager()
        slot = cache.admit(BLOCK + 1)
        assert (cache.blocks(slot), cache.length(slot), cache.allocator.num_free) == (2, 0, 6)
        cache.step([slot], [BLOCK], chunk=BLOCK)
        cache.step([slot], [1], chunk=1)
        assert cache.length(slot) == BLOCK + 1
        cache.extend(slot, BLOCK - 1)  # fills the second block exactly
        assert cache.blocks(slot) == 2
        cache.extend(slot, BLOCK)
        assert cache.blocks(slot) == 3
        cache.truncate(slot, BLOCK)
        assert (cache.blocks(slot), cache.length(slot)) == (1, BLOCK)
        cache.release(slot)
        assert (cache.allocator.num_free, cache.num_free_slots) == (8, 4)

    def test_step_describes_the_requests(self) -> None:
        cache = manager()
        first, second = cache.admit(3 * BLOCK), cache.admit(5)
        cache.step([first], [2 * BLOCK + 3], chunk=512)
        step = cache.step([second, first], [5, 2], chunk=8, rows=4)
        assert step.slots.tolist() == [second, first, -1, -1]
        assert step.starts.tolist() == [0, 2 * BLOCK + 3, 0, 0]
        assert step.lens.tolist() == [5, 2, 0, 0]
        assert (step.chunk, step.capacity) == (8, 4 * BLOCK)
        table = step.block_table
        assert table.shape == (4, 4)
        held = [b for b in table.flatten().tolist() if b != NO_BLOCK]
        assert len(held) == len(set(held)) == 4
        assert (table[0, :1] >= 0).all() and (table[0, 1:] == NO_BLOCK).all()
        assert (table[1, :3] >= 0).all() and (table[1, 3:] == NO_BLOCK).all()
        assert (table[2:] == NO_BLOCK).all()

    def test_an_idle_step_is_all_padding(self) -> None:
        step = manager().step([], [], chunk=3, rows=2)
        assert step.slots.tolist() == [-1, -1]
        assert step.lens.tolist() == [0, 0]
        assert (step.block_table == NO_BLOCK).all()
        assert not step.valid.any()

    @pytest.mark.parametrize(
        "length, max_draft, blocks",
        [
            (1, 0, 1),
            (BLOCK, 0, 1),
            (BLOCK, 1, 2),
            (BLOCK + 1, 0, 2),
            (2 * BLOCK + 1, 0, 4),
            (4 * BLOCK + 1, 0, 6),
            (6 * BLOCK, 3, 6),
        ],
    )
    def test_capacity_is_a_power_of_two_of_blocks_up_to_the_limit(
        self, length: int, max_draft: int, blocks: int
    ) -> None:
        cache = manager(max_draft=max_draft)
        slot = cache.admit(length)
        step = cache.step([slot], [length], chunk=length)
        assert step.capacity == blocks * BLOCK
        assert step.block_table.shape == (1, blocks)

    def test_a_forward_whose_inputs_are_on_the_device_advances_alike(self) -> None:
        one, other = manager(max_draft=2), manager(max_draft=2)
        for cache in (one, other):
            slots = [cache.admit(2 * BLOCK), cache.admit(BLOCK)]
            cache.step(slots, [BLOCK - 3, 2], BLOCK)
        assert one.advance(slots, [3, 1]) == other.step(slots, [3, 1], 3).capacity == 2 * BLOCK
        assert one.advance(slots, [0, 1]) == 2 * BLOCK
        assert [one.length(slot) for slot in slots] == [BLOCK, 4]
        with pytest.raises(ValueError, match=r"lens must be in \[0, 3\], got -1 for slot 1"):
            one.advance(slots, [3, -1])
        with pytest.raises(ValueError, match="holds blocks for 124 more positions"):
            one.advance(slots, [0, 125])

    def test_changes_of_the_table_are_told_once(self) -> None:
        cache = manager(max_blocks=3)
        slots = [cache.admit(1), cache.admit(2 * BLOCK)]
        rows = [[cache._table.row(slot, 3).tolist()] for slot in slots]
        changes = dict(cache.table_changes().T.tolist())
        assert changes == {0: rows[0][0][0], 3: rows[1][0][0], 4: rows[1][0][1]}
        assert cache.table_changes().shape == (2, 0)
        cache.extend(slots[0], 2 * BLOCK)
        cache.truncate(slots[0], 0)
        cache.release(slots[1])
        assert dict(cache.table_changes().T.tolist()) == dict.fromkeys((0, 1, 3, 4), NO_BLOCK)

    def test_exhaustion_changes_nothing(self) -> None:
        cache = manager(max_requests=2, num_blocks=5)
        slot = cache.admit(3 * BLOCK)
        with pytest.raises(OutOfBlocksError, match="3 needed, 2 of 5 free"):
            cache.admit(2 * BLOCK + 1)
        assert (cache.num_free_slots, cache.allocator.num_free) == (1, 2)
        other = cache.admit(2 * BLOCK)
        with pytest.raises(OutOfSlotsError, match="all 2"):
            cache.admit(0)
        cache.step([slot], [3 * BLOCK], chunk=3 * BLOCK)
        with pytest.raises(OutOfBlocksError, match="1 needed, 0 of 5 free"):
            cache.extend(slot, 1)
        assert cache.blocks(slot) == 3
        cache.release(other)
        cache.extend(slot, 1)
        assert cache.blocks(slot) == 4

    def test_a_request_too_long_for_its_row_is_refused(self) -> None:
        cache = manager()
        with pytest.raises(ValueError, match="may hold 768 positions, got 769"):
            cache.admit(6 * BLOCK + 1)
        slot = cache.admit(6 * BLOCK)
        with pytest.raises(ValueError, match="may hold 768 positions, got 769"):
            cache.extend(slot, 6 * BLOCK + 1)
        assert (cache.num_free_slots, cache.allocator.num_free) == (3, 2)

    @pytest.mark.parametrize(
        "slots, lens, chunk, rows, message",
        [
            ([0, 1], [1], 1, 2, "lens: expected one per slot"),
            ([0, 0], [1, 1], 1, 2, "slots must be distinct"),
            ([0, 1], [1, 1], 1, 1, "rows must be in"),
            ([0], [1], 1, 5, "rows must be in"),
            ([], [], 1, 0, "rows must be in"),
            ([3], [1], 1, 1, "slot 3 belongs to no request"),
            ([0], [0], 1, 1, "lens must be in"),
            ([0], [2], 1, 1, "lens must be in"),
            ([0, 1], [1, BLOCK + 1], 512, 2, "holds blocks for 128 more positions"),
        ],
    )
    def test_wrong_steps_are_refused(self, slots, lens, chunk, rows, message) -> None:
        cache = manager()
        assert [cache.admit(BLOCK), cache.admit(1)] == [0, 1]
        with pytest.raises(ValueError, match=message):
            cache.step(slots, lens, chunk, rows)
        assert (cache.length(0), cache.length(1)) == (0, 0)

    def test_slots_of_nobody_are_refused(self) -> None:
        cache = manager()
        slot = cache.admit(BLOCK)
        cache.release(slot)
        for call in (
            lambda: cache.release(slot),
            lambda: cache.extend(slot, 1),
            lambda: cache.truncate(slot, 0),
            lambda: cache.length(slot),
            lambda: cache.blocks(slot),
        ):
            with pytest.raises(ValueError, match="belongs to no request"):
                call()
        assert cache.allocator.num_free == 8

    @pytest.mark.parametrize("length", [-1, 6])
    def test_truncate_only_goes_back(self, length: int) -> None:
        cache = manager()
        slot = cache.admit(BLOCK)
        cache.step([slot], [5], chunk=5)
        with pytest.raises(ValueError, match=r"must be in \[0, 5\]"):
            cache.truncate(slot, length)

    def test_extend_only_goes_forward(self) -> None:
        cache = manager()
        with pytest.raises(ValueError, match="count"):
            cache.extend(cache.admit(1), -1)

    def test_random_schedules_never_share_or_lose_a_block(self, seed: int) -> None:
        """Against a model of a few lines: every block has one owner, and rows keep their order."""
        rng = random.Random(seed)
        cache = manager(max_requests=5, num_blocks=12)
        lengths: dict[int, int] = {}
        rows: dict[int, list[int]] = {}

        def rewrite_last_positions() -> None:
            """Look at every block table through a step over each request's last position."""
            for slot, length in lengths.items():
                cache.truncate(slot, length - 1)
                cache.extend(slot, 1)
            if not lengths:
                return
            step = cache.step(list(lengths), [1] * len(lengths), chunk=1)
            assert step.starts.tolist() == [length - 1 for length in lengths.values()]
            for slot, table in zip(lengths, step.block_table.tolist()):
                row = [block for block in table if block != NO_BLOCK]
                assert len(row) == cache.blocks(slot)
                assert row[: len(rows[slot])] == rows[slot], "a block that was kept moved"
                rows[slot] = row
            held = sorted(block for row in rows.values() for block in row)
            assert held == sorted(set(held)), "two requests share a block"
            assert len(held) == 12 - cache.allocator.num_free

        for _ in range(400):
            action = rng.choice(["admit", "write", "write", "truncate", "release"])
            free = cache.allocator.num_free
            slot = rng.choice(list(lengths)) if lengths else None
            if action == "admit":
                want = rng.randint(1, 3 * BLOCK)
                try:
                    slot = cache.admit(want)
                except (OutOfBlocksError, OutOfSlotsError):
                    assert len(lengths) == 5 or free < -(-want // BLOCK)
                    assert cache.allocator.num_free == free
                else:
                    assert slot not in lengths
                    cache.step([slot], [want], chunk=want)
                    lengths[slot], rows[slot] = want, []
            elif slot is not None and action == "write":
                count = rng.randint(1, BLOCK)
                try:
                    cache.extend(slot, count)
                except (OutOfBlocksError, ValueError):
                    assert cache.allocator.num_free == free
                else:
                    cache.step([slot], [count], chunk=count)
                    lengths[slot] += count
            elif slot is not None and action == "truncate":
                lengths[slot] = rng.randint(1, lengths[slot])
                cache.truncate(slot, lengths[slot])
                assert cache.blocks(slot) == -(-lengths[slot] // BLOCK)
                del rows[slot][cache.blocks(slot) :]
            elif slot is not None:
                cache.release(slot)
                del lengths[slot], rows[slot]
            rewrite_last_positions()
        for slot in lengths:
            cache.release(slot)
        assert (cache.allocator.num_free, cache.num_free_slots) == (12, 5)


class TestUpload:
    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    def test_a_copy_in_flight_is_no_later_one(self, device: str) -> None:
        seen = [upload(np.full(1 << 16, value), torch.device(device)) for value in range(20)]
        assert [tensor.unique().tolist() for tensor in seen] == [[value] for value in range(20)]

    def test_arrays_that_are_no_row_of_memory(self) -> None:
        array = np.arange(6).reshape(2, 3).T
        assert upload(array, torch.device("cpu")).tolist() == array.tolist()
