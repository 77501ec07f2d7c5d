"""FlashMLA's entry points against a plain FP32 softmax over the keys the indices name."""

from __future__ import annotations

import inspect
import math
import sys

import pytest
import torch
from torch import Tensor

import dsv4.compat.flash_mla
from dsv4.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from dsv4.compat.kv_entry import ENTRY_BYTES
from dsv4.reference.cache_entry import pack_pages, unpack_pages
from dsv4.testing.accuracy import assert_close

HEADS, DIM = 8, 512


def _oracle(
    q: Tensor, keys: list[Tensor], sink: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """out, max logits and lse of each token over its own list of keys [n, d], in FP32."""
    outs, highest, lses = [], [], []
    for token, rows in zip(q.float(), keys):
        logits = token @ rows.float().T * scale
        lse = logits.logsumexp(-1)
        total = lse if sink is None else torch.logaddexp(lse, sink)
        weights = torch.where(lse[:, None].isinf(), 0, (logits - total[:, None]).exp())
        outs.append(weights @ rows.float())
        top = logits.amax(-1) if len(rows) else torch.full((HEADS,), -math.inf)
        highest.append(top)
        lses.append(torch.where(lse == -math.inf, math.inf, lse))
    return torch.stack(outs), torch.stack(highest), torch.stack(lses)


def _assert_same_lse(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-4)


SINKS = {
    "none": None,
    "finite": torch.linspace(-2, 3, HEADS),
    "infinite": torch.tensor([math.inf, -math.inf] * (HEADS // 2)),
}


@pytest.mark.parametrize("sink", SINKS.values(), ids=SINKS.keys())
@pytest.mark.parametrize("with_lengths", [False, True])
def test_prefill(sink: Tensor | None, with_lengths: bool, seed: int) -> None:
    tokens, pool, topk, scale = 7, 90, 64, 0.06
    q = torch.randn(tokens, HEADS, DIM).bfloat16()
    kv = torch.randn(pool, 1, DIM).bfloat16()
    indices = torch.randint(-30, pool + 20, (tokens, 1, topk), dtype=torch.int32)
    indices[3] = -1  # a token without keys
    lengths = torch.randint(1, topk, (tokens,), dtype=torch.int32) if with_lengths else None
    listed = [row[0, : None if lengths is None else lengths[t]] for t, row in enumerate(indices)]
    keys = [kv[row[(row >= 0) & (row < pool)].long(), 0] for row in listed]
    out, highest, lse = flash_mla_sparse_fwd(
        q, kv, indices, scale, attn_sink=sink, topk_length=lengths
    )
    expected = _oracle(q, keys, sink, scale)
    assert_close("out", out, expected[0])
    _assert_same_lse(highest, expected[1])
    _assert_same_lse(lse, expected[2])
    assert out[3].count_nonzero() == 0
    assert (lse[3] == math.inf).all()
    assert out.dtype == torch.bfloat16
    assert all(result.is_contiguous() for result in (out, highest, lse))


def test_programs_find_it_under_the_package_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """And pass arguments by position as FlashMLA declares them."""
    monkeypatch.setitem(sys.modules, "flash_mla", dsv4.compat.flash_mla)
    import flash_mla

    lists = {
        flash_mla.flash_mla_with_kvcache: "q k_cache block_table cache_seqlens head_dim_v "
        "tile_scheduler_metadata num_splits softmax_scale causal is_fp8_kvcache indices attn_sink "
        "extra_k_cache extra_indices_in_kvcache topk_length extra_topk_length",
        flash_mla.flash_mla_sparse_fwd: "q kv indices sm_scale d_v attn_sink topk_length",
    }
    for function, names in lists.items():
        parameters = inspect.signature(function).parameters.values()
        by_position = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
        assert by_position == names.split(), function
    metadata, splits = flash_mla.get_mla_metadata()
    assert isinstance(metadata, flash_mla.FlashMLASchedMeta) and splits is None


def test_prefill_in_float32_is_exact_and_may_skip_the_maximum(seed: int) -> None:
    q, kv = torch.randn(4, HEADS, 64), torch.randn(50, 1, 64)
    indices = torch.stack([torch.randperm(50)[:20] for _ in range(4)])[:, None].int()
    result = flash_mla_sparse_fwd(q, kv, indices, 0.1, d_v=64, return_max_logits=False)
    expected = _oracle(q, [kv[row[0].long(), 0] for row in indices], None, 0.1)
    torch.testing.assert_close(result[0], expected[0], atol=1e-5, rtol=1e-5)
    assert result[1] is None
    torch.testing.assert_close(result[2], expected[2], atol=1e-5, rtol=1e-5)


def test_longer_lists_than_an_operators(seed: int) -> None:
    """Columns past 8,192 are a second list of the same pool; lengths count through both."""
    q, kv = torch.randn(3, HEADS, 64), torch.randn(60, 1, 64)
    indices = torch.full((3, 1, 8200), -1, dtype=torch.int32)
    indices[..., 5:20] = torch.arange(15, dtype=torch.int32)
    indices[..., 8190:] = torch.arange(30, 40, dtype=torch.int32)
    lengths = torch.tensor([8200, 8194, 10], dtype=torch.int32)
    out, highest, lse = flash_mla_sparse_fwd(q, kv, indices, 0.1, d_v=64, topk_length=lengths)
    rows = [[*range(15), *range(30, 40)], [*range(15), *range(30, 34)], [*range(5)]]
    expected = _oracle(q, [kv[row, 0] for row in rows], None, 0.1)
    for actual, wanted in zip((out, highest, lse), expected):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="indices: got 16385 columns"):
        flash_mla_sparse_fwd(q, kv, torch.zeros(3, 1, 16385).int(), 0.1, d_v=64)


def test_longer_lists_of_a_decode_step(seed: int) -> None:
    """FlashMLA's largest case has 16,384 columns; a second cache takes the second list's place."""
    cache, keys = _cache(1, 64)
    q = torch.randn(3, 1, HEADS, DIM).bfloat16()
    indices = torch.full((3, 1, 8200), -1, dtype=torch.int32)
    indices[..., 5:20] = torch.arange(15, dtype=torch.int32)
    indices[..., 8190:] = torch.arange(30, 40, dtype=torch.int32)
    # What is below 0 is no length.
    lengths = torch.tensor([8194, -(2**31), 8200], dtype=torch.int32)
    arguments = (q, cache, None, None, DIM, None)
    options = {"is_fp8_kvcache": True, "indices": indices}
    out, lse = flash_mla_with_kvcache(*arguments, topk_length=lengths, **options)
    rows = [[*range(15), *range(30, 34)], [], [*range(15), *range(30, 40)]]
    expected = _oracle(q[:, 0], [keys[row] for row in rows], None, DIM**-0.5)
    assert_close("out", out[:, 0], expected[0])
    _assert_same_lse(lse[..., 0], expected[2])
    options |= {"extra_k_cache": cache, "extra_indices_in_kvcache": indices[..., :3]}
    with pytest.raises(ValueError, match="indices: got 8200 columns, needs at most 8192"):
        flash_mla_with_kvcache(*arguments, **options)
    options |= {"indices": indices[..., :3], "extra_indices_in_kvcache": indices}
    with pytest.raises(ValueError, match="extra_indices_in_kvcache: got 8200 columns, needs at"):
        flash_mla_with_kvcache(*arguments, **options)
    with pytest.raises(ValueError, match="indices: got 16385 columns"):
        flash_mla_with_kvcache(
            *arguments, is_fp8_kvcache=True, indices=torch.zeros(3, 1, 16385).int()
        )


def _cache(pages: int, entries: int) -> tuple[Tensor, Tensor]:
    """A packed cache as FlashMLA sees it (padded page stride), and its keys [rows, 512]."""
    packed = pack_pages(torch.randn(pages, entries, DIM).bfloat16())
    assert packed.stride(0) % 576 == 0
    view = packed[:, : entries * ENTRY_BYTES].view(pages, entries, 1, ENTRY_BYTES)
    return view, unpack_pages(packed, entries).flatten(0, 1)


@pytest.mark.parametrize("sink", SINKS.values(), ids=SINKS.keys())
@pytest.mark.parametrize("extra_page", [None, 2, 64], ids=["one cache", "HCA", "CSA"])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_decode(sink: Tensor | None, extra_page: int | None, with_lengths: bool, seed: int) -> None:
    batch, length, topk, extra_topk = 3, 2, 64, 128
    q = torch.randn(batch, length, HEADS, DIM).bfloat16()
    scopes = [(*_cache(3, 64), topk)]
    if extra_page is not None:
        scopes.append((*_cache(128 // extra_page, extra_page), extra_topk))
    indices, lengths = [], []
    for _, keys, columns in scopes:
        chosen = torch.randint(-40, len(keys), (batch, length, columns), dtype=torch.int32)
        chosen[1, 0] = -1  # a token without keys
        indices.append(chosen)
        lengths.append(torch.randint(1, columns, (batch,), dtype=torch.int32))
    listed: list[Tensor] = []
    for b in range(batch):
        for s in range(length):
            parts = []
            for (_, keys, _), chosen, lens in zip(scopes, indices, lengths):
                row = chosen[b, s, : lens[b] if with_lengths else None].long()
                parts.append(keys[row[row >= 0]])
            listed.append(torch.cat(parts))
    options = {}
    if extra_page is not None:
        options = dict(extra_k_cache=scopes[1][0], extra_indices_in_kvcache=indices[1])
        if with_lengths:
            options["extra_topk_length"] = lengths[1]
    out, lse = flash_mla_with_kvcache(
        q,
        scopes[0][0],
        None,
        None,
        DIM,
        get_mla_metadata()[0],
        is_fp8_kvcache=True,
        indices=indices[0],
        attn_sink=sink,
        topk_length=lengths[0] if with_lengths else None,
        **options,
    )
    expected = _oracle(q.flatten(0, 1), listed, sink, DIM**-0.5)
    assert out.shape == q.shape
    assert out.is_contiguous()
    # The heads of a token are neighbours, as FlashMLA returns them.
    assert lse.shape == (batch, HEADS, length)
    assert lse.stride() == (length * HEADS, 1, HEADS)
    assert_close("out", out.flatten(0, 1), expected[0])
    _assert_same_lse(lse.transpose(1, 2).flatten(0, 1), expected[2])
    assert out[1, 0].count_nonzero() == 0


def test_an_output_of_the_caller_and_batch_invariance(seed: int) -> None:
    arguments = _decode_arguments()
    expected, _ = flash_mla_with_kvcache(**arguments)
    out = torch.full_like(expected, math.nan)
    options = {"out": out, "enable_batch_invariant": True}
    assert flash_mla_with_kvcache(**arguments, **options)[0] is out
    assert torch.equal(out, expected)
    q, kv = torch.randn(2, HEADS, DIM).bfloat16(), torch.randn(9, 1, DIM).bfloat16()
    prefill = (q, kv, torch.zeros(2, 1, 64).int(), 0.1)
    out = torch.empty_like(q)
    assert flash_mla_sparse_fwd(*prefill, out=out, enable_batch_invariant=True)[0] is out
    assert torch.equal(out, flash_mla_sparse_fwd(*prefill)[0])


@pytest.mark.parametrize("size", [(2, 1), (1, 3), (2, 3)])
def test_an_output_that_is_part_of_a_buffer(size, seed: int) -> None:
    """Of more tokens and heads, as vLLM's fork takes it; nothing else of the buffer changes."""
    batch, length = size
    cache, _ = _cache(2, 64)
    arguments = _decode_arguments() | {
        "q": torch.randn(batch, length, HEADS, DIM).bfloat16(),
        "indices": torch.randint(0, 128, (batch, length, 64), dtype=torch.int32),
        "k_cache": cache,
    }
    expected, _ = flash_mla_with_kvcache(**arguments)
    buffer = torch.full((batch + 1, length + 2, HEADS + 8, DIM + 64), 7.0).bfloat16()
    out = buffer[:batch, :length, :HEADS, :DIM]
    assert flash_mla_with_kvcache(**arguments, out=out)[0] is out
    assert torch.equal(out, expected)
    untouched = buffer.clone()
    untouched[:batch, :length, :HEADS, :DIM] = 7
    assert (untouched == 7).all()
    q, kv = torch.randn(batch, HEADS, DIM).bfloat16(), torch.randn(9, 1, DIM).bfloat16()
    prefill = (q, kv, torch.zeros(batch, 1, 64).int(), 0.1)
    out = buffer[:batch, 0, :HEADS, :DIM]
    assert flash_mla_sparse_fwd(*prefill, out=out)[0] is out
    assert torch.equal(out, flash_mla_sparse_fwd(*prefill)[0])


def test_pages_of_a_block_of_many_layers_and_wide_index_rows(seed: int) -> None:
    """A page stride of all layers' pages together, and index rows of a wider buffer."""
    cache, keys = _cache(3, 64)
    block = torch.full((3, 93888), 0xFF, dtype=torch.uint8)
    packed = block[:, 1024 : 1024 + 64 * ENTRY_BYTES]
    packed.copy_(cache.view(3, -1))
    buffer = torch.full((2, 1, 200), 12345, dtype=torch.int32)
    indices = buffer[..., :64]
    indices.copy_(torch.randint(0, 192, (2, 1, 64)))
    q = torch.randn(2, 1, HEADS, DIM).bfloat16()
    out, _ = flash_mla_with_kvcache(
        *(q, packed.view(3, 64, 1, ENTRY_BYTES), None, None, DIM, None),
        is_fp8_kvcache=True,
        indices=indices,
    )
    expected = _oracle(q[:, 0], [keys[row[0].long()] for row in indices], None, DIM**-0.5)
    assert_close("out", out[:, 0], expected[0])


def test_nan_in_entries_that_are_not_chosen_stays_there(seed: int) -> None:
    cache, keys = _cache(2, 64)
    cache.view(torch.uint8)[0, 0] = 0xFF  # entry 0 is what masked indices are read as
    q = torch.randn(1, 1, HEADS, DIM).bfloat16()
    indices = torch.full((1, 1, 64), -1, dtype=torch.int32)
    indices[0, 0, 10:20] = torch.arange(70, 80)
    out, lse = flash_mla_with_kvcache(
        q, cache, None, None, DIM, None, is_fp8_kvcache=True, indices=indices
    )
    expected = _oracle(q[0], [keys[70:80]], None, DIM**-0.5)
    assert_close("out", out[0], expected[0])
    _assert_same_lse(lse[0].T, expected[2])


def _decode_arguments() -> dict:
    cache, _ = _cache(2, 64)
    return dict(
        q=torch.randn(2, 1, HEADS, DIM).bfloat16(),
        k_cache=cache,
        block_table=None,
        cache_seqlens=None,
        head_dim_v=DIM,
        tile_scheduler_metadata=None,
        is_fp8_kvcache=True,
        indices=torch.zeros(2, 1, 64, dtype=torch.int32),
    )


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"q": torch.zeros(2, HEADS, DIM)}, ValueError, "q: got shape"),
        ({"q": torch.zeros(2, 1, HEADS, 576)}, ValueError, "q: got .* 576, that of plain MLA"),
        ({"out": torch.zeros(2, 1, HEADS, DIM)}, TypeError, "out: got torch.float32"),
        (
            {"out": torch.zeros(2, 1, HEADS, 2 * DIM).bfloat16()[..., ::2]},
            ValueError,
            "out: got strides .* the last dimension must be contiguous",
        ),
        ({"enable_batch_invariant": 1}, TypeError, "enable_batch_invariant: got"),
        ({"head_dim_v": 256}, ValueError, "head_dim_v: got 256"),
        ({"causal": True}, ValueError, "causal: got True"),
        ({"is_fp8_kvcache": False}, ValueError, "is_fp8_kvcache: got False"),
        ({"num_splits": 2}, ValueError, "num_splits: got 2"),
        ({"indices": None}, ValueError, "indices: got None"),
        ({"indices": torch.zeros(3, 1, 64).int()}, ValueError, r"indices: got shape \(3, 1, 64\)"),
        ({"topk_length": torch.zeros(3).int()}, ValueError, "topk_length: got shape"),
        ({"k_cache": torch.zeros(2, 64, 1, 584)}, TypeError, "k_cache: got torch.float32"),
        (
            {"k_cache": torch.zeros(2, 64, 1, 656, dtype=torch.uint8)},
            ValueError,
            r"k_cache: got shape .* needs \[pages, entries, 1, 584\]",
        ),
        (
            {"k_cache": torch.zeros(2, 64, 1, 600, dtype=torch.uint8)[..., :584]},
            ValueError,
            "k_cache: got strides .* each page must be contiguous",
        ),
        (
            {"extra_indices_in_kvcache": torch.zeros(2, 1, 64).int()},
            ValueError,
            "extra_k_cache and extra_indices_in_kvcache: got one without the other",
        ),
        (
            {
                "extra_k_cache": torch.zeros(0, 64, 1, 584, dtype=torch.uint8),
                "extra_indices_in_kvcache": torch.zeros(2, 1, 64).int(),
            },
            ValueError,
            "extra_k_cache: got shape",
        ),
        (
            {"extra_topk_length": torch.ones(2).int()},
            ValueError,
            "extra_topk_length: got one without extra_k_cache",
        ),
        *(
            ({name: tensor}, error, f"{name}: got {message}")
            for name, shape in (("indices", (2, 1, 64)), ("topk_length", (2,)))
            for tensor, error, message in (
                (torch.zeros(shape, dtype=torch.bool), TypeError, "torch.bool, needs torch.int32"),
                (torch.full(shape, math.nan), TypeError, "torch.float32, needs torch.int32"),
                (torch.zeros(shape, dtype=torch.int64), TypeError, "torch.int64"),
                (
                    torch.zeros(shape, dtype=torch.int32, device="meta"),
                    ValueError,
                    "a tensor on meta, q is on cpu",
                ),
                ([0, 1], TypeError, "a list, needs a torch.Tensor"),
            )
        ),
        (
            {"k_cache": torch.zeros(2, 64, 1, 584, dtype=torch.uint8, device="meta")},
            ValueError,
            "k_cache: got a tensor on meta",
        ),
        ({"k_cache": None}, TypeError, "k_cache: got None, needs a torch.Tensor"),
        ({"q": [1.0]}, TypeError, "q: got a list, needs a torch.Tensor"),
        ({"attn_sink": torch.zeros(HEADS, dtype=torch.float64)}, TypeError, "attn_sink: got"),
        ({"attn_sink": torch.zeros(HEADS + 1)}, ValueError, r"attn_sink: got shape \(9,\)"),
        ({"softmax_scale": torch.ones(2)}, TypeError, "softmax_scale: got Tensor, needs a float"),
    ],
)
def test_bad_decode_arguments_are_named(changes: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        flash_mla_with_kvcache(**(_decode_arguments() | changes))


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"d_v": 256}, ValueError, "d_v: got 256"),
        ({"kv": torch.zeros(5, 2, DIM).bfloat16()}, ValueError, "kv: got shape"),
        ({"kv": torch.zeros(0, 1, DIM).bfloat16()}, ValueError, "kv: got no rows"),
        ({"kv": torch.zeros(5, 1, DIM)}, TypeError, "kv: got torch.float32, needs torch.bfloat16"),
        ({"indices": torch.zeros(2, 4).int()}, ValueError, "indices: got shape"),
        ({"indices": torch.tensor([[[True, False]]] * 2)}, TypeError, "indices: got torch.bool"),
        ({"indices": torch.tensor([[[1.9, 0.2]]] * 2)}, TypeError, "indices: got torch.float32"),
        ({"topk_length": torch.zeros(5).int()}, ValueError, "topk_length: got shape"),
        ({"topk_length": torch.full((2,), math.nan)}, TypeError, "topk_length: got torch.float32"),
        ({"sm_scale": None}, TypeError, "sm_scale: got NoneType, needs a float"),
    ],
)
def test_bad_prefill_arguments_are_named(changes: dict, error: type, message: str) -> None:
    arguments = dict(
        q=torch.zeros(2, HEADS, DIM).bfloat16(),
        kv=torch.zeros(5, 1, DIM).bfloat16(),
        indices=torch.zeros(2, 1, 4, dtype=torch.int32),
        sm_scale=0.1,
    )
    with pytest.raises(error, match=message):
        flash_mla_sparse_fwd(**(arguments | changes))
