"""`sparse_fmha_paged_fp8` on a GPU: the codes of rows that `sparse_fmha_paged` gives, bit for bit,
in launches of every kind, in graphs, behind poison."""

from __future__ import annotations

import pytest
import torch

from dsv4 import ops
from dsv4.testing.paged_attention import Case, Inputs, assert_codes_of, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.stage("op")]

FORMATS = ("bf16", "fp8")
CODES = ("fp8", "fp8x2")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def rounded(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Codes and their scales, behind a poisoned allocator: of scratch, too."""
    del_later = torch.full((1 << 27,), torch.nan, dtype=torch.bfloat16, device="cuda")
    del del_later
    options = {**inputs.options, **inputs.kernel_options}
    found = ops.sparse_fmha_paged_fp8(*inputs.tensors, **options)
    return dict(zip(("codes", "code_scales"), found, strict=True))


def rows_of(inputs: Inputs) -> torch.Tensor:
    """The same output in bf16, by as many splits."""
    return ops.sparse_fmha_paged(*inputs.tensors, **{**inputs.options, **inputs.kernel_options})


ROUNDED = {"ragged": True, "wild": True, "padded": True, "has_rope": True, "has_squares": True}


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("heads", [16, 64, 72, 128])
@pytest.mark.parametrize(
    ("requests", "queries"),
    [(3, 1), (9, 1), (16, 1), (64, 1), (96, 1), (128, 1), (64, 4), (50, 20), (64, 64)],
)
def test_codes_are_those_of_rows(requests, queries, heads, kv_format, seed) -> None:
    """In launches of split keys, of slices of columns, and of those that round on their way."""
    case = Case(requests, queries, heads, 512, kv_format, 128, 256, **ROUNDED)
    inputs = make_inputs(case, seed).to("cuda")
    assert_codes_of(rounded(inputs), rows_of(inputs))


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("sink_mode", ["softmax", "swa_gate"])
def test_codes_of_tables_and_growing_maxima(sink_mode, kv_format, seed) -> None:
    options = {"form": "table", "sink_mode": sink_mode, "has_rope": True}
    for case in (
        Case(40, 4, 64, kv_format=kv_format, entries=300, ragged=True, **options),
        Case(150, 1, 64, kv_format=kv_format, entries=1500, growing=True),
    ):
        inputs = make_inputs(case, seed).to("cuda")
        assert_codes_of(rounded(inputs), rows_of(inputs))


@pytest.mark.parametrize(("requests", "queries"), [(9, 1), (128, 1), (40, 64)])
def test_codes_of_pieces(requests, queries, seed) -> None:
    """Of launches of many tokens, too, which take several."""
    case = Case(requests, queries, 64, entries=1300, batch_invariant=True, ragged=True)
    inputs = make_inputs(case, seed).to("cuda")
    assert_codes_of(rounded(inputs), rows_of(inputs))


@pytest.mark.parametrize("compute", CODES)
@pytest.mark.parametrize("requests", [9, 128])
def test_codes_of_products_of_codes(requests, compute, seed) -> None:
    case = Case(requests, 1, 64, 512, "fp8", entries=300, uniform=True, compute=compute)
    inputs = make_inputs(case, seed).to("cuda")
    assert_codes_of(rounded(inputs), rows_of(inputs))


@pytest.mark.parametrize("requests", [12, 160])
def test_codes_of_what_is_not_finite(requests, seed) -> None:
    inputs = make_inputs(Case(requests, 1, 64, kv_format="fp8", entries=300), seed)
    inputs.q[1, 3, 5], inputs.q[2, 4:9], inputs.q[3] = torch.nan, torch.inf, -torch.inf
    inputs = inputs.to("cuda")
    rows = rows_of(inputs)
    assert rows[1:4].isnan().any() and not rows[4:].isnan().any()
    assert_codes_of(rounded(inputs), rows)


@pytest.mark.parametrize("requests", [9, 64, 128, 512])
def test_codes_in_graphs(requests, seed) -> None:
    first, other = (
        make_inputs(Case(requests, 1, 64, kv_format="fp8", entries=300), seed + i).to("cuda")
        for i in range(2)
    )
    wanted = rows_of(other)
    found = rounded(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = dict(zip(found, ops.sparse_fmha_paged_fp8(
            *first.tensors, **{**first.options, **first.kernel_options}
        )))  # fmt: skip
    for name, tensor in vars(first).items():
        if torch.is_tensor(tensor):
            tensor.copy_(getattr(other, name))
    for _ in range(3):
        graph.replay()
        assert_codes_of(found, wanted)
