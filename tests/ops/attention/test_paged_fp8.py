"""`sparse_fmha_paged_fp8` on the CPU: codes of the rows that `sparse_fmha_paged` gives, and what it
refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4 import ops
from dsv4.kernels.attention import paged_plan
from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.ops.code_terms import decode_codes, num_term_rows
from dsv4.testing.paged_attention import Case, Inputs, assert_codes_of, make_inputs

pytestmark = pytest.mark.stage("op")

NAMES = ("codes", "code_scales")


def run(inputs: Inputs, **options) -> tuple[torch.Tensor, torch.Tensor]:
    options = {**inputs.options, **inputs.kernel_options, **options}
    return ops.sparse_fmha_paged_fp8(*inputs.tensors, **options)


def rows_of(inputs: Inputs) -> torch.Tensor:
    return ops.sparse_fmha_paged(*inputs.tensors, **inputs.options, **inputs.kernel_options)


@pytest.mark.parametrize(
    "case",
    [
        Case(11, 1, 8, 512, "fp8", ragged=True, wild=True, has_rope=True, has_squares=True),
        Case(4, 2, 8, 128, form="table", sink_mode="swa_gate", ragged=True),
        Case(3, 1, 8, 512, "fp8", uniform=True, compute="fp8x2"),
        Case(3, 1, 8, 128, entries=0, window=64),
        Case(0, 1, 8, 128),
    ],
    ids=str,
)
def test_codes_are_those_of_the_rows(case, seed) -> None:
    inputs = make_inputs(case, seed)
    rows, found = rows_of(inputs), run(inputs)
    assert found[0].shape == (num_term_rows(case.tokens), case.heads * case.head_dim)
    assert_codes_of(dict(zip(NAMES, found)), rows)
    rows = rows.flatten(1)
    largest = rows.float().unflatten(1, (-1, 128)).abs().amax(-1).repeat_interleave(128, 1)
    difference = (decode_codes(*found).float() - rows.float()).abs()
    assert (difference <= largest * 2.0**-21).all()
    assert (difference[rows.abs() >= largest * 2.0**-14] == 0).all()


def test_rows_of_float32_are_rounded_first(seed) -> None:
    inputs = make_inputs(Case(3, 1, 8, 512, "fp8"), seed)
    wide = replace(inputs, q=inputs.q.float())
    assert_codes_of(dict(zip(NAMES, run(wide))), rows_of(wide).bfloat16())


def test_rows_that_are_not_finite(seed) -> None:
    inputs = make_inputs(Case(3, 1, 8, 128), seed)
    inputs.q[1, 3, 5] = torch.nan
    found = run(inputs)
    assert_codes_of(dict(zip(NAMES, found)), rows_of(inputs))
    values = decode_codes(*found)
    assert values[1, 3 * 128 : 4 * 128].isnan().all() and values[::2].isfinite().all()


def test_tracing(seed) -> None:
    inputs = make_inputs(Case(3, 1, 8, 128), seed)
    traced = torch.compile(ops.sparse_fmha_paged_fp8, fullgraph=True, backend="aot_eager")
    found = traced(*inputs.tensors, **inputs.options)
    assert_codes_of(dict(zip(NAMES, found)), rows_of(inputs))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": None}, TypeError, "q: got None, needs a torch.Tensor"),
        ({"window_pool": None}, TypeError, "window_pool: got None, needs a torch.Tensor"),
        ({"compressed_pool": None}, ValueError, "compressed_pool: needs compressed_indices"),
        ({"sink_logits": torch.zeros(7)}, ValueError, r"sink_logits: got shape \(7,\), needs"),
    ],
)
def test_bad_arguments_are_named(change, error, message, seed) -> None:
    inputs = make_inputs(Case(3, 1, 8, 128), seed)
    options = {**inputs.options, **inputs.kernel_options}
    with pytest.raises(error, match=message):
        ops.sparse_fmha_paged_fp8(*replace(inputs, **change).tensors, **options)


def test_heads_that_share_a_scale_are_refused(seed) -> None:
    with pytest.raises(ValueError, match=r"head_dim must be a multiple of 128 .* got 64"):
        run(make_inputs(Case(3, 1, 8, 64), seed))
    with pytest.raises(TypeError, match="rounds_output: got 1, needs True or False"):
        PagedFmhaConfig(128, 8, rounds_output=1)


@pytest.mark.parametrize("rounds_output", [False, True])
def test_the_operator_takes_one_form_of_output(rounds_output, seed) -> None:
    inputs = make_inputs(Case(3, 1, 8, 128), seed)
    identity = ops.sparse_fmha_paged_runner_id(
        128, 8, sink_mode="softmax", rounds_output=rounds_output
    )
    o, lse = torch.empty_like(inputs.q), torch.empty(3, 8)
    codes = torch.empty(16, 1024, dtype=torch.float8_e4m3fn)
    scales = torch.empty(3, 8, dtype=torch.float8_e8m0fnu)

    def refused(given: tuple, message: str, error: type = ValueError) -> None:
        o, *others = given
        options = (*(None,) * 7, *others)
        with pytest.raises(error, match=message):
            torch.ops.dsv4.sparse_fmha_paged(*inputs.tensors, o, identity, *options)

    if rounds_output:
        refused((None, None, None, None, scales), "codes: got nothing, a rounded output needs it")
        refused((None, None, None, codes[:8], scales), "codes: got 8 rows, 3 tokens need 16")
        refused((None, None, None, codes, scales[:2]), r"code_scales: got shape \(2, 8\), needs")
        refused((o, None, None, codes, scales), "o: got a tensor, rounds_output is True")
        refused((None, lse, None, codes, scales), "lse: got a tensor, rounds_output is True")
    else:
        refused((None, None, None, None, None), r"o \(out\): got None, needs a", TypeError)
        refused((o, None, None, codes, None), "codes: got a tensor, rounds_output is False")


def test_which_launches_round_on_their_way() -> None:
    def found(config: PagedFmhaConfig, tokens: int, splits: int, arch: str = "sm_90a") -> bool:
        return bool(paged_plan.rounds_rows(config, tokens, splits, 132, arch))

    flash, pro, few = (PagedFmhaConfig(512, n, "fp8", rounds_output=True) for n in (64, 128, 16))
    assert [found(flash, tokens, 1) for tokens in (9, 33, 34, 8192)] == [False, False, True, True]
    assert [found(pro, tokens, 1) for tokens in (16, 17)] == [False, True]
    assert [found(flash, 16, splits) for splits in (2, 3, 5, 9)] == [False, True, True, True]
    assert found(replace(flash, num_splits=1), 2, 1)
    assert found(flash, 128, 1, "sm_100a") and found(few, 1, 3, "sm_100a")
    assert [found(pro, tokens, 1, "sm_100a") for tokens in (66, 67)] == [True, False]
    assert found(pro, 67, 2, "sm_100a")
    assert not found(replace(flash, compute="fp8"), 128, 1, "sm_100a")
    assert not found(few, 4096, 1)
    assert not found(replace(flash, compute="fp8"), 4096, 1)
    assert not found(replace(flash, rounds_output=False), 4096, 1)
    alone = replace(flash, batch_invariant=True)
    assert [found(alone, tokens, 1) for tokens in (66, 67)] == [False, True]
    assert not found(alone, 4096, 2)


def test_pieces_of_a_rounded_output_end_with_eight_tokens() -> None:
    config = PagedFmhaConfig(512, 64, batch_invariant=True)
    for splits in (2, 3, 5):
        scalars = (splits, 132, 0, 0)
        rounded = paged_plan.most_tokens(replace(config, rounds_output=True), scalars)
        assert rounded % 8 == 0
        assert 0 <= paged_plan.most_tokens(config, scalars) - rounded < 8
