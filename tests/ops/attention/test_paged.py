"""`sparse_fmha_paged` on the CPU against the FP32 oracle, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4.ops import sparse_fmha_paged
from dsv4.testing.harness import poison
from dsv4.testing.paged_attention import Case, Inputs, assert_paged_close, make_inputs

pytestmark = pytest.mark.stage("op")


def run(inputs: Inputs, **options) -> tuple[torch.Tensor, ...]:
    """o, lse and max_logits, into a poisoned output."""
    out = poison(torch.empty_like(inputs.q))
    o, lse, highest = sparse_fmha_paged(
        *inputs.tensors,
        **{**inputs.options, **inputs.kernel_options, **options},
        out=out,
        return_lse=True,
        return_max_logits=True,
    )
    assert o is out
    return o, lse, highest


def check(case: Case, seed: int) -> None:
    inputs = make_inputs(case, seed)
    assert_paged_close(inputs, *run(inputs))


@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
@pytest.mark.parametrize("form", ["list", "table", "mixed"])
@pytest.mark.parametrize("pages", [(64, 64), (61, 53), (64, 2)])
def test_forms_formats_and_pages(kv_format, form, pages, seed) -> None:
    window, entry = pages
    check(
        Case(
            requests=4,
            queries=2,
            kv_format=kv_format,
            form=form,
            window_page=window,
            entry_page=entry,
            entries=300,
            ragged=True,
            padded=True,
        ),
        seed,
    )


@pytest.mark.parametrize("head_dim", [64, 512])
def test_squares_in_place_of_factors(head_dim, seed) -> None:
    """The norm that they make is no small matter: without it another result."""
    inputs = make_inputs(Case(head_dim=head_dim, has_squares=True, ragged=True), seed)
    found = run(inputs)
    assert_paged_close(inputs, *found)
    plain = run(replace(inputs, q_squares=None), q_eps=None)
    assert not torch.allclose(found[0].float(), plain[0].float(), atol=1e-2)


@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
@pytest.mark.parametrize("sink_mode", ["softmax", "swa_gate"])
@pytest.mark.parametrize("head_dim", [64, 128, 512])
@pytest.mark.parametrize("heads", [8, 64])
def test_heads_sizes_and_sink_modes(kv_format, sink_mode, head_dim, heads, seed) -> None:
    case = Case(
        heads=heads,
        head_dim=head_dim,
        kv_format=kv_format,
        sink_mode=sink_mode,
        wild=True,
        ragged=True,
        has_rope=True,
        has_factor=True,
        has_signs=True,
    )
    check(case, seed)


@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
@pytest.mark.parametrize(
    "case",
    [
        Case(requests=74, entries=0, head_dim=128),
        Case(requests=1, window=1, entries=1, head_dim=128),
        Case(requests=0),
        Case(requests=74, heads=16, window=16, entries=24, head_dim=64, wild=True),
        Case(requests=2, entries=700, growing=True),
        Case(requests=2, entries=700, growing=True, form="table", sink_mode="swa_gate"),
        Case(requests=3, window=0, entries=40, wild=True, head_dim=128),
        Case(requests=5, form="table", wild=True, has_rope=True, head_dim=128),
        Case(requests=2, entries=4100, head_dim=64, softmax_scale=0.3, ragged=True),
        Case(requests=1, entries=8192, head_dim=64, wild=True),
        # A chunk of a prompt, its window a causal range of the pool.
        Case(requests=1, queries=150, form="table", window=40, head_dim=64, has_rope=True),
        Case(requests=1, queries=150, form="mixed", window=40, head_dim=64, wild=True),
    ],
    ids=str,
)
def test_edges(case, kv_format, seed) -> None:
    check(Case(**{**vars(case), "kv_format": kv_format}), seed)


@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("requests", "queries", "pages"),
    [
        (1, 1, 64),
        (4, 2, 61),
        pytest.param(74, 1, 2, marks=pytest.mark.slow),
        pytest.param(321, 2, 53, marks=pytest.mark.slow),
    ],
)
def test_cases_in_the_style_of_flash_mla(kv_format, requests, queries, pages, seed) -> None:
    case = Case(
        requests,
        queries,
        window=64 if requests < 100 else 16,
        entries=256 if requests < 100 else 16,
        kv_format=kv_format,
        entry_page=pages,
        wild=True,
        ragged=True,
        padded=True,
        deviation=0.1,
    )
    check(case, seed)


def test_uniform_entries_are_ordinary_entries(seed) -> None:
    check(Case(kv_format="fp8", uniform=True), seed)


def test_infinite_sinks(seed) -> None:
    for mode in ("softmax", "swa_gate"):
        inputs = make_inputs(Case(sink_mode=mode, ragged=True, head_dim=128), seed)
        inputs.sink_logits[:4] = torch.tensor([torch.inf, -torch.inf, 1000.0, -1000.0])
        assert_paged_close(inputs, *run(inputs))


def test_a_ring_is_a_table_of_one_column(seed) -> None:
    """Positions that wrapped around are those that an index list in their order names."""
    case = Case(requests=3, window=24, window_page=24, form="mixed", entries=0, head_dim=64)
    pool = torch.randn(4, 24, 64).bfloat16()
    inputs = make_inputs(case, seed)
    positions = torch.tensor([3, 23, 100], dtype=torch.int32)
    table = torch.tensor([[2], [0], [3]], dtype=torch.int32)
    lists = torch.full((3, 24), -1, dtype=torch.int32)
    for t, position in enumerate(positions.tolist()):
        seen = range(max(0, position - 23), position + 1)
        lists[t, : len(seen)] = torch.tensor([int(table[t]) * 24 + n % 24 for n in seen])
    sinks = inputs.sink_logits
    none = (None, None, None)
    by_table = sparse_fmha_paged(
        *(inputs.q, pool, None, None, *none, sinks),
        sink_mode="softmax",
        window_table=table,
        request_ids=torch.arange(3, dtype=torch.int32),
        positions=positions,
        sliding_window=24,
    )
    by_list = sparse_fmha_paged(*(inputs.q, pool, lists, None, *none, sinks), sink_mode="softmax")
    assert torch.equal(by_table, by_list)


def test_one_table_serves_both_pools(seed) -> None:
    inputs = make_inputs(Case(form="table", entries=64, window=64, head_dim=128), seed)
    table = inputs.block_table[:, :1].contiguous()
    inputs.window_pool.nan_to_num_(0.0)
    inputs.compressed_pool.nan_to_num_(0.0)
    options = {**inputs.options, "block_table": table, "positions": inputs.positions % 60}
    both = sparse_fmha_paged(*inputs.tensors, **{**options, "window_table": table})
    options["window_table"] = None
    assert torch.equal(both, sparse_fmha_paged(*inputs.tensors, **options))


def test_no_tokens_of_no_requests(seed) -> None:
    """An engine without work passes tables without a row."""
    int32 = {"dtype": torch.int32}
    pool, none = torch.zeros(4, 64, 128).bfloat16(), torch.zeros(0, **int32)
    table = torch.zeros(0, 5, **int32)
    o, lse, highest = sparse_fmha_paged(
        *(torch.zeros(0, 8, 128).bfloat16(), pool, None, None, pool, None, None, torch.zeros(8)),
        sink_mode="softmax",
        block_table=table,
        window_table=table,
        request_ids=none,
        positions=none,
        sliding_window=128,
        ratio=4,
        return_lse=True,
        return_max_logits=True,
    )
    assert o.shape == (0, 8, 128) and lse.shape == highest.shape == (0, 8)


def test_a_token_does_not_depend_on_the_batch(seed) -> None:
    inputs = make_inputs(Case(requests=9, wild=True, ragged=True, kv_format="fp8"), seed)
    together = run(inputs)
    for t in range(9):
        for alone, all_tokens in zip(run(inputs.of_tokens(slice(t, t + 1))), together, strict=True):
            torch.testing.assert_close(alone[0], all_tokens[t], rtol=2**-7, atol=1e-5)


def test_float32_is_not_rounded(seed) -> None:
    for kv_format in ("bf16", "fp8"):
        inputs = make_inputs(Case(head_dim=128, kv_format=kv_format), seed)
        changes = {"q": inputs.q.float()}
        if kv_format == "bf16":
            pools = ("window_pool", "compressed_pool")
            changes |= {name: getattr(inputs, name).float() for name in pools}
        wide = Inputs(**{**vars(inputs), **changes})
        o, lse, _ = run(wide)
        expected = wide.expected()
        torch.testing.assert_close(o, expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, expected[1], rtol=1e-6, atol=1e-5)


def test_other_byte_dtypes_are_entries(seed) -> None:
    inputs = make_inputs(Case(kv_format="fp8"), seed)
    pools = {name: getattr(inputs, name).view(torch.int8) for name in ("window_pool",)}
    assert torch.equal(run(inputs)[0], run(Inputs(**{**vars(inputs), **pools}))[0])


def test_opcheck(seed) -> None:
    from dsv4.ops import sparse_fmha_paged_runner_id

    inputs = make_inputs(Case(head_dim=64), seed)
    identity = sparse_fmha_paged_runner_id(64, 8, sink_mode="softmax", rope_dim=64)
    arguments = (*inputs.tensors, torch.empty_like(inputs.q), identity)
    torch.library.opcheck(torch.ops.dsv4.sparse_fmha_paged.default, arguments)


def changed(**changes):
    return lambda inputs: Inputs(**{**vars(inputs), **changes})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda x: Inputs(**{**vars(x), "compressed_pool": x.compressed_pool.byte()}),
            TypeError,
            "compressed_pool: got torch.uint8, needs torch.bfloat16",
        ),
        (
            changed(window_indices=None, window_lens=None),
            ValueError,
            "window_indices and window_table: needs exactly one",
        ),
        (changed(compressed_pool=None), ValueError, "compressed_pool: needs compressed_indices"),
        (
            changed(compressed_indices=None),
            ValueError,
            "compressed_pool: needs compressed_indices or block_table beside it",
        ),
        (
            changed(window_table=torch.zeros(3, 1, dtype=torch.int32)),
            ValueError,
            "window_indices and window_table: got both",
        ),
        (changed(rope=torch.zeros(9, 64)), ValueError, "positions: got None, rope needs them"),
        (
            lambda x: Inputs(**{**vars(x), "window_indices": x.window_indices.long()}),
            TypeError,
            "window_indices: got torch.int64, needs torch.int32",
        ),
        (
            lambda x: Inputs(**{**vars(x), "window_indices": x.window_indices[:2]}),
            ValueError,
            r"window_indices: got shape \(2, 128\), needs \[3, k_w\]",
        ),
        (
            changed(compressed_indices=torch.zeros(3, 8193, dtype=torch.int32)),
            ValueError,
            "compressed_indices: got 8193 columns, needs at most 8192",
        ),
        (
            lambda x: Inputs(**{**vars(x), "q": x.q.requires_grad_()}),
            ValueError,
            "q: requires grad",
        ),
        (changed(q_factor=torch.zeros(3, 7)), ValueError, "q_factor: got shape"),
        (
            changed(q_squares=torch.zeros(3, 8, 4)),
            ValueError,
            "q_eps: got None, q_squares and q_eps",
        ),
        (
            changed(q_squares=torch.zeros(3, 8, 4), q_factor=torch.zeros(3, 8)),
            ValueError,
            "q_factor and q_squares: got both, needs one",
        ),
        (changed(window_pool=None), TypeError, "window_pool: got None, needs a torch.Tensor"),
        (
            changed(window_pool=torch.zeros(4, 64, 64).half()),
            TypeError,
            "window_pool: got torch.float16, needs torch.bfloat16 or FP8 entries in a one-byte",
        ),
        (
            changed(window_table=torch.zeros(0, 1, dtype=torch.int32), window_indices=None),
            ValueError,
            r"window_table: got shape \(0, 1\), needs a row and a column",
        ),
    ],
)
def test_bad_arguments_are_named(change, error, message, seed) -> None:
    inputs = make_inputs(Case(head_dim=64), seed)
    with pytest.raises(error, match=message):
        run(change(inputs))


def test_pages_of_entries_must_be_contiguous(seed) -> None:
    inputs = make_inputs(Case(head_dim=128, kv_format="fp8"), seed)
    pool = torch.zeros(4, 64, 208, dtype=torch.uint8)[..., :200]
    with pytest.raises(ValueError, match=r"window_pool: got strides .* must be contiguous"):
        run(Inputs(**{**vars(inputs), "window_pool": pool}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compute": "fp8"}, "compute 'fp8' needs kv_format 'fp8'"),
        ({"sink_mode": "none"}, "sink_mode must be one of"),
        ({"num_splits": 0}, "num_splits must be at least 1"),
        ({"num_splits": 2, "batch_invariant": True}, "num_splits must be None"),
        ({"q_eps": -1e-6}, "q_eps must not be negative"),
        ({"q_eps": 1e-6}, "q_squares: got None"),
    ],
)
def test_options_are_checked(options, message, seed) -> None:
    with pytest.raises(ValueError, match=message):
        run(make_inputs(Case(head_dim=64), seed), **options)


def test_rows_beyond_31_bits_are_refused() -> None:
    """Where TMA gathers: pages apart by other than whole rows leave a small common stride."""
    from types import SimpleNamespace

    from dsv4.ops.attention.paged_checks import check_coordinates

    def given(pages: int, stride: int) -> SimpleNamespace:
        pool = torch.empty_strided((pages, 64, 512), (stride, 512, 1), device="meta")
        return SimpleNamespace(window_pool=pool, compressed_pool=None)

    check_coordinates(given(1 << 20, 1 << 20))
    check_coordinates(given(1 << 12, (1 << 20) + 8))
    with pytest.raises(ValueError, match="window_pool: its last row"):
        check_coordinates(given(1 << 15, (1 << 20) + 8))
