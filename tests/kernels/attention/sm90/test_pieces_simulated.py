"""Batch-invariant launches of the paged Hopper kernels, simulated: bits follow from a token's own
number of keys.

A token of several pieces stands beside tokens of one, in launches with room for more of them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4.kernels.attention.paged_plan import workspace_size
from dsv4.kernels.attention.pieces import PIECE_TILES, most_pieces
from dsv4.testing.harness import SCHEDULES, Outcome, simulator
from dsv4.testing.paged_attention import Case, Inputs, assert_paged_close, make_inputs
from dsv4.testing.paged_kernel import compiled_kernel

pytestmark = pytest.mark.stage("H")

cutlass = pytest.importorskip("cutlass")

SIMULATOR = simulator("sm_90a")
SMS = 132
# Tokens of three pieces, of one, of two, and of no keys.
LENS = (2350, 10, 1250, 0)
WINDOW_LENS = (40, 33, 7, 0)
OPTIONS = {"padded": True, "wild": True, "has_rope": True, "has_factor": True, "has_signs": True}


def case_of(
    heads: int, head_dim: int, kv_format: str, sink_mode: str, tokens: int = len(LENS)
) -> Case:
    """Of the last ones of the tokens."""
    pages = (64, 53) if kv_format == "fp8" else (53, 2)
    return Case(tokens, 1, heads, head_dim, kv_format, 40, max(LENS[-tokens:]), *pages,
                sink_mode=sink_mode, batch_invariant=True, **OPTIONS)  # fmt: skip


def inputs_of(case: Case, seed: int) -> Inputs:
    lens = (torch.tensor(x[-case.tokens :], dtype=torch.int32) for x in (LENS, WINDOW_LENS))
    return replace(make_inputs(case, seed), **dict(zip(("compressed_lens", "window_lens"), lens)))


def run(inputs: Inputs, splits: int, ctas: int, schedule: str, seed: int) -> Outcome:
    config, tokens = inputs.case.config, len(inputs.q)
    # The workspace that the operator gives a launch of so many tokens.
    size = workspace_size(config, {"T": tokens}, (splits, SMS))
    call = inputs.call((splits, ctas, config.sliding_window, config.ratio), size)
    if splits > 1 and not config.batch_invariant:
        call.options["max_logits"] = call.outputs.pop("max_logits")[:0]
    return SIMULATOR.run(compiled_kernel(SIMULATOR, inputs.case), call, schedule, seed)


def assert_rows(found: Outcome, rows: slice, part: Outcome) -> None:
    """A part of the tokens has the same bits by itself."""
    for name in part.outputs:
        assert torch.equal(found[name][rows], part[name]), name


def check(case: Case, seed: int) -> Inputs:
    """In batches, in every schedule, with room for more pieces: the oracle's values, and the same
    bits."""
    inputs, found = inputs_of(case, seed), None
    most = most_pieces(-(-case.entries // 64) + 1)
    # Few CTAs; fewer than pieces, which then cannot wait for each other; more than work tiles.
    for schedule, splits, ctas in zip(SCHEDULES, (most, most + 2, most), (3, 2, SMS)):
        outcome = run(inputs, splits, ctas, schedule, seed)
        assert_paged_close(inputs, outcome["o"], outcome["lse"], outcome["max_logits"])
        if found is not None:
            assert_rows(found, slice(None), outcome)
        found = outcome
    for token, splits in ((-3, 1), (-3, most), (-2, 2), (-1, most)):
        own = slice(case.tokens + token, case.tokens + token + 1)
        assert_rows(found, own, run(inputs.of_tokens(own), splits, 5, SCHEDULES[1], seed))
    return inputs


def test_a_token_s_bits_follow_from_its_own_keys(seed) -> None:
    check(case_of(8, 64, "bf16", "softmax", 3), seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    [
        (64, 64, "bf16", "swa_gate"),
        (40, 64, "bf16", "softmax"),
        (72, 128, "bf16", "swa_gate"),
        (16, 512, "fp8", "swa_gate"),
        (64, 512, "fp8", "softmax"),
        (128, 512, "bf16", "softmax"),
    ],
    ids=str,
)
def test_pieces_are_as_many_splits(kernel, seed) -> None:
    """The bits of a token are those of a launch of so many splits."""
    inputs = check(case_of(*kernel), seed)
    for token in range(3):
        one = inputs.of_tokens(slice(token, token + 1))
        tiles = sum(-(-lens[token] // 64) for lens in (LENS, WINDOW_LENS))
        splits = most_pieces(tiles)
        assert (splits == 1) == (tiles <= PIECE_TILES)
        fixed = replace(one, case=replace(one.case, batch_invariant=False, num_splits=splits))
        ours = run(one, splits, SMS, SCHEDULES[2], seed)
        assert_rows(ours, slice(None), run(fixed, splits, SMS, SCHEDULES[2], seed))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [8, 64])
def test_a_table_is_wider_than_what_a_token_sees(heads, seed) -> None:
    """Rows of a table that positions leave unseen are no pieces."""
    case = Case(3, 2, heads, 64, "bf16", 40, 1400, 53, 61, "table", ratio=1, ragged=True,
                batch_invariant=True, **OPTIONS)  # fmt: skip
    inputs = make_inputs(case, seed)
    found = run(inputs, 2, 3, SCHEDULES[1], seed)
    assert_paged_close(inputs, found["o"], found["lse"], found["max_logits"])
    for token in range(case.tokens):
        own = slice(token, token + 1)
        assert_rows(found, own, run(inputs.of_tokens(own), 5, 7, SCHEDULES[1], seed))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [8, 40])
def test_a_cta_has_32_work_tiles(heads, seed) -> None:
    """As many as it has bits for; the last ones are pieces."""
    tokens, entries = 16, 3500
    case = Case(tokens, 1, heads, 64, "bf16", 40, entries, 53, 61, batch_invariant=True, **OPTIONS)
    lens = torch.arange(tokens, dtype=torch.int32)
    lens[-2:] = torch.tensor((entries, entries - 100))
    inputs = replace(make_inputs(case, seed), compressed_lens=lens)
    most = most_pieces(-(-entries // 64) + 1)
    assert most == 4
    found = run(inputs, most, tokens * most // 32, SCHEDULES[1], seed)
    assert_paged_close(inputs, found["o"], found["lse"], found["max_logits"])
