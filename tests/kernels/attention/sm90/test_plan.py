"""Plans of the Hopper kernels: budgets, barrier graph, print."""

from __future__ import annotations

import pytest

from dsv4.kernels.attention.sm90.codes_plan import CodesPlan
from dsv4.kernels.attention.sm90.plan import (
    KEYS,
    SMEM_LINE_BYTES,
    STAGES,
    HeadsMPlan,
    PagedHeadsMPlan,
    PagedSwapAbPlan,
    SwapAbPlan,
)
from dsv4.kernels.kit.plan import SMEM_CAPACITY

pytestmark = pytest.mark.stage("H")

HEAD_DIMS = (64, 128, 256, 512)
TILE_HEADS = (8, 16, 24)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_heads_m_fills_the_register_file_and_no_more(head_dim) -> None:
    plan = HeadsMPlan(head_dim)
    threads = {role.name: role.threads for role in plan.warps.roles}
    assert sum(plan.registers[name] * count for name, count in threads.items()) == 64 * 1024
    assert plan.warps.threads == 512


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_heads_m_splits_q_between_shared_memory_and_registers(head_dim) -> None:
    plan = HeadsMPlan(head_dim)
    assert plan.q_smem_dim + plan.q_register_dim == head_dim
    assert plan.q_register_dim == (320 if head_dim == 512 else 0)
    assert plan.smem.total_bytes <= SMEM_CAPACITY


def test_heads_m_of_head_dim_512_has_no_room_for_another_kilobyte() -> None:
    """What a paged FP8 source would have to find room for: see the capacity it leaves."""
    plan = HeadsMPlan(512)
    kv = STAGES * KEYS * 512 * 2
    assert plan.smem["kv"].bytes == kv
    assert plan.smem.free_bytes == 1024


@pytest.mark.parametrize(
    "plan",
    [PagedHeadsMPlan(512, is_fp8=True)]
    + [PagedSwapAbPlan(512, heads, 1, is_fp8=True) for heads in TILE_HEADS],
    ids=["heads-m", *(f"swap-ab-{heads}" for heads in TILE_HEADS)],
)
def test_entries_wait_in_lines_of_shared_memory(plan) -> None:
    assert plan.smem.offset("staging") % SMEM_LINE_BYTES == 0


def test_heads_m_arrivals_follow_from_the_roles() -> None:
    graph = HeadsMPlan(512).barriers
    # The load warp, 4 score warps and 8 output warps read a key span.
    assert graph.empty_arrivals("span") == 1 + 4 + 8
    assert (graph.full_arrivals("p"), graph.empty_arrivals("p")) == (4, 8)
    assert (graph.full_arrivals("rows"), graph.empty_arrivals("rows")) == (4, 8)
    assert (graph.full_arrivals("q"), graph.empty_arrivals("q")) == (1, 4)
    # One output warpgroup frees a half, or both where two CTAs slice the columns.
    for slices in (1, 2):
        assert graph.empty_arrivals("kv", column_slices=slices) == 4 * slices
    assert graph["kv"].stages == 2 * STAGES


@pytest.mark.parametrize("lanes", [1, 32])
def test_arrivals_grow_with_the_lanes_that_arrive_for_a_warp(lanes) -> None:
    heads_m, swap_ab = HeadsMPlan(64, lanes).barriers, SwapAbPlan(64, 8, 1, lanes).barriers
    assert heads_m.empty_arrivals("span") == 13 * lanes
    assert swap_ab.empty_arrivals("span") == 5 * lanes
    # One thread announces what TMA brings.
    assert heads_m.full_arrivals("kv") == swap_ab.full_arrivals("kv") == 1


@pytest.mark.parametrize("tile_heads", TILE_HEADS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_swap_ab_ring_holds_two_to_three_key_tiles(head_dim, tile_heads) -> None:
    plan = SwapAbPlan(head_dim, tile_heads, 1)
    assert 2 * plan.slots_per_tile <= plan.slots <= 3 * plan.slots_per_tile
    assert plan.slots_per_tile * plan.slot_dim == head_dim
    assert plan.smem.total_bytes <= SMEM_CAPACITY
    assert plan.barriers["kv"].stages == plan.slots


def test_swap_ab_with_sinks_of_all_heads_still_fits() -> None:
    assert SwapAbPlan(512, 16, 8).smem["sinks"].count == 128
    assert SwapAbPlan(512, 16, 8).slots == 12


@pytest.mark.parametrize("plan", [HeadsMPlan(512), SwapAbPlan(512, 16, 4)])
def test_a_plan_prints_its_roles_memory_and_edges(plan) -> None:
    text = str(plan)
    for role in plan.warps.roles:
        assert str(role) in text
    for buffer in plan.smem.buffers:
        assert buffer.name in text
    for edge in plan.barriers.edges:
        assert edge.payload in text
    assert f"{plan.smem.total_bytes} of {SMEM_CAPACITY} bytes" in text


@pytest.mark.parametrize(
    ("head_dim", "is_fp8"), [(64, False), (128, False), (512, False), (512, True)]
)
def test_paged_plans_fit_and_fill_the_register_file(head_dim, is_fp8) -> None:
    plan = PagedHeadsMPlan(head_dim, is_fp8=is_fp8)
    threads = {role.name: role.threads for role in plan.warps.roles}
    assert sum(plan.registers[name] * count for name, count in threads.items()) == 64 * 1024
    assert plan.stages == (2 if is_fp8 else STAGES)
    assert plan.q_register_dim == (320 if head_dim == 512 and not is_fp8 else 0)
    assert plan.smem.total_bytes <= SMEM_CAPACITY
    assert "gather" in str(plan) and "lockstep" not in str(plan)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_paged_arrivals_are_those_of_copies_and_of_warps(is_fp8) -> None:
    """Every thread arrives when its copies are complete, every warp for what it has stored."""
    plans = (PagedHeadsMPlan(512, is_fp8=is_fp8), PagedSwapAbPlan(512, 16, 1, is_fp8=is_fp8))
    for plan in plans:
        warps = plan.warps["gather"].count
        assert warps == (8 if is_fp8 and plan is plans[1] else 4)
        assert plan.barriers.full_arrivals("kv") == warps * (1 if is_fp8 else 1 + 32)
        assert plan.barriers.full_arrivals("span") == 1
    assert plans[0].barriers.empty_arrivals("span") == 4 + 8
    assert plans[1].smem["tile_info"].count == 4 * plans[1].slots


@pytest.mark.parametrize("terms", [1, 2])
def test_products_of_codes_fill_the_register_file_and_no_more(terms) -> None:
    plan = CodesPlan(512, terms=terms)
    threads = {role.name: role.threads for role in plan.warps.roles}
    assert sum(plan.registers[name] * count for name, count in threads.items()) == 64 * 1024
    # The accumulators of half of the columns, and the sum of a key tile over 64 of them.
    assert plan.registers["output"] > 256 * 64 // 128 + 64 * 64 // 128
    assert plan.smem.total_bytes <= SMEM_CAPACITY
    assert str(plan)


@pytest.mark.parametrize("terms", [1, 2])
def test_a_key_tile_of_codes_is_one_of_records(terms) -> None:
    plan = CodesPlan(512, terms=terms)
    assert plan.code_bytes + plan.rope_bytes == KEYS * 576
    # Q takes as many bytes less as another stage of keys.
    assert plan.stages == 5 - terms
    assert plan.smem["q_codes"].bytes == terms * plan.code_bytes


def test_arrivals_of_products_of_codes_follow_from_the_roles() -> None:
    graph = CodesPlan(512).barriers
    # Every thread when its copies are complete, every warp for what it has stored.
    assert (graph.full_arrivals("kv"), graph.empty_arrivals("kv")) == (128 + 4, 8)
    assert (graph.full_arrivals("p"), graph.empty_arrivals("p")) == (4, 8)
    assert graph.empty_arrivals("span") == 4 + 8
