"""`sparse_fmha_paged` on a GPU: the oracle on FlashMLA's kinds of cases, poison, graphs, streams,
bits that depend on neither the run nor, where it is promised, the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4 import ops
from dsv4.kernels.attention import paged_plan
from dsv4.kernels.attention.paged_args import PagedFmhaTensors
from dsv4.kernels.attention.pieces import most_pieces
from dsv4.ops.attention.sparse_fmha_paged import SPARSE_FMHA_PAGED
from dsv4.testing.paged_attention import Case, Inputs, assert_paged_close, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.stage("op")]

FORMATS = ("bf16", "fp8")
CODES = ("fp8", "fp8x2")
STYLES = [
    Case(1, 1, 64, window=64, entries=256),
    Case(4, 2, 128, window=128, entries=640, entry_page=61, wild=True, ragged=True, padded=True),
    Case(74, 1, 64, entries=512, entry_page=2, wild=True, ragged=True, padded=True),
    Case(321, 2, 16, window=64, entries=64, entry_page=53, wild=True, ragged=True),
    Case(5, 1, 8, window=0, entries=128, wild=True),
    Case(5, 1, 32, window=128, entries=0, ragged=True),
    Case(2, 1, 24, window=1, entries=1),
]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def run(inputs: Inputs, out: torch.Tensor | None = None, **options) -> tuple[torch.Tensor, ...]:
    """o, lse and the largest scores, in poisoned memory."""
    out = torch.full_like(inputs.q, torch.nan) if out is None else out
    return ops.sparse_fmha_paged(
        *inputs.tensors,
        **{**inputs.options, **inputs.kernel_options, **options},
        out=out,
        return_lse=True,
        return_max_logits=True,
    )


def check(case: Case, seed: int) -> None:
    inputs = make_inputs(case, seed)
    assert_paged_close(inputs, *(x.cpu() for x in run(inputs.to("cuda"))))


def assert_same(first: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(first, other, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("case", STYLES, ids=str)
def test_cases_in_the_style_of_flash_mla(case, kv_format, seed) -> None:
    check(replace(case, kv_format=kv_format, deviation=0.1), seed)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("form", ["list", "table", "mixed"])
@pytest.mark.parametrize("sink_mode", ["softmax", "swa_gate"])
@pytest.mark.parametrize("heads", [8, 64, 128])
def test_forms_modes_and_options(kv_format, form, sink_mode, heads, seed) -> None:
    case = Case(
        requests=6,
        queries=2,
        heads=heads,
        kv_format=kv_format,
        entries=300,
        form=form,
        sink_mode=sink_mode,
        ragged=True,
        wild=True,
        padded=True,
        has_rope=True,
        has_factor=True,
    )
    check(case, seed)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [8, 64])
def test_smaller_heads(head_dim, heads, seed) -> None:
    check(Case(5, 1, heads, head_dim, ragged=True, wild=True), seed)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("heads", [16, 64])
def test_growing_maxima_and_long_lists(kv_format, heads, seed) -> None:
    check(Case(2, 1, heads, kv_format=kv_format, entries=1500, growing=True), seed)
    check(Case(2, 1, heads, kv_format=kv_format, entries=8192, ragged=True), seed)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_infinite_sinks_and_no_tokens(kv_format, seed) -> None:
    for mode in ("softmax", "swa_gate"):
        inputs = make_inputs(Case(heads=64, sink_mode=mode, ragged=True, kv_format=kv_format), seed)
        inputs.sink_logits[:4] = torch.tensor([torch.inf, -torch.inf, 1000.0, -1000.0])
        assert_paged_close(inputs, *(x.cpu() for x in run(inputs.to("cuda"))))
    check(Case(requests=0, kv_format=kv_format), seed)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("requests", [1, 4, 16, 64, 200])
def test_runs_have_the_same_bits(kv_format, requests, seed) -> None:
    case = Case(requests, 1, 64, kv_format=kv_format, entries=512, ragged=True)
    inputs = make_inputs(case, seed).to("cuda")
    first = run(inputs)
    for _ in range(5):
        assert_same(first, run(inputs))


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("heads", [8, 64, 128])
def test_a_token_does_not_depend_on_the_batch(kv_format, heads, seed) -> None:
    case = Case(150, 1, heads, kv_format=kv_format, entries=512, ragged=True, batch_invariant=True)
    inputs = make_inputs(case, seed).to("cuda")
    together = run(inputs)
    assert_paged_close(inputs.to("cpu"), *(x.cpu() for x in together))
    for part in (slice(0, 1), slice(3, 20), slice(77, 149)):
        assert_same(run(inputs.of_tokens(part)), tuple(x[part] for x in together))


# By number of heads.
PIECES_MODES = {8: "softmax", 16: "swa_gate", 32: "softmax", 64: "swa_gate", 128: "softmax"}


def narrowed(inputs: Inputs, columns: int) -> Inputs:
    """The tokens whose compressed entries fit into so many columns, with lists of as many."""
    few = inputs.compressed_lens <= columns
    part = inputs.of_tokens(few)
    return replace(part, compressed_indices=part.compressed_indices[:, :columns].contiguous())


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("heads", PIECES_MODES)
def test_pieces_follow_from_a_token_s_own_keys(kv_format, heads, seed) -> None:
    """Alone, in a batch, beside tokens of more pieces, in wider lists, and as so many splits."""
    case = Case(40, 1, heads, kv_format=kv_format, entries=2400, sink_mode=PIECES_MODES[heads],
                ragged=True, wild=True, has_rope=True, has_factor=True,
                batch_invariant=True)  # fmt: skip
    inputs = make_inputs(case, seed).to("cuda")
    together = run(inputs)
    assert_paged_close(inputs.to("cpu"), *(x.cpu() for x in together))
    assert_same(run(inputs), together)
    for part in (slice(0, 1), slice(3, 20), slice(20, 21), slice(17, 40)):
        assert_same(run(inputs.of_tokens(part)), tuple(x[part] for x in together))
    wider = torch.nn.functional.pad(inputs.compressed_indices, (0, 5000), value=7)
    assert_same(run(replace(inputs, compressed_indices=wider)), together)
    short = inputs.compressed_lens <= 1024
    assert 1 < short.sum() < case.tokens
    assert_same(run(narrowed(inputs, 1024)), tuple(x[short] for x in together))
    for token in range(12):
        tiles = sum(-(-int(x[token]) // 64) for x in (inputs.window_lens, inputs.compressed_lens))
        one = inputs.of_tokens(slice(token, token + 1))
        options = {"batch_invariant": False, "num_splits": most_pieces(tiles)}
        found = ops.sparse_fmha_paged(
            *one.tensors, **{**one.options, **one.kernel_options, **options}, return_lse=True
        )
        assert_same(found, tuple(x[token : token + 1] for x in together[:2]))


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_many_tokens_of_pieces_take_several_launches(kv_format, heads, seed, monkeypatch) -> None:
    case = Case(3, 200, heads, kv_format=kv_format, entries=2400, sink_mode=PIECES_MODES[heads],
                ragged=True, batch_invariant=True)  # fmt: skip
    inputs = make_inputs(case, seed).to("cuda")
    monkeypatch.setattr(paged_plan, "SM_PIECES", 4)
    scalars = (most_pieces(2 + 38), torch.cuda.get_device_properties(0).multi_processor_count)
    assert case.tokens > paged_plan.most_tokens(case.config, scalars)
    together = run(inputs)
    for part in (slice(0, 3), slice(130, 134), slice(599, 600)):
        some = inputs.of_tokens(part)
        assert_paged_close(some.to("cpu"), *(x[part].cpu() for x in together))
        assert_same(run(some), tuple(x[part] for x in together))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(inputs)
    for _ in range(2):
        found[0].fill_(torch.nan)
        graph.replay()
        assert_same(found, together)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("requests", [2, 40])
def test_graphs_follow_lengths_and_indices_on_the_device(kv_format, requests, seed) -> None:
    """One eager call of a shape makes captures on any stream work; replays read new inputs."""
    case = Case(requests, 1, 64, kv_format=kv_format, entries=512, ragged=True, wild=True)
    inputs = make_inputs(case, seed).to("cuda")
    others = [make_inputs(case, seed + i).to("cuda") for i in (1, 2)]
    out = torch.empty_like(inputs.q)
    run(inputs, out)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run(inputs, out)
    for other in others:
        for name, tensor in vars(inputs).items():
            if torch.is_tensor(tensor):
                tensor.copy_(getattr(other, name))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, run(other)[0])


@pytest.mark.parametrize("kv_format", FORMATS)
def test_two_streams(kv_format, seed) -> None:
    case = Case(3, 1, 64, kv_format=kv_format, entries=1024)
    both = [make_inputs(case, seed + i).to("cuda") for i in range(2)]
    alone = [run(inputs) for inputs in both]
    streams = [torch.cuda.Stream() for _ in both]
    torch.cuda.synchronize()
    for _ in range(30):
        found = []
        for stream, inputs in zip(streams, both, strict=True):
            with torch.cuda.stream(stream):
                found.append(run(inputs))
    torch.cuda.synchronize()
    for one, other in zip(alone, found, strict=True):
        assert_same(one, other)


def chunk_inputs(kv_format: str, tokens: int, heads: int, seed: int) -> tuple[Inputs, Inputs]:
    """A prompt's tokens, their keys named by tables, and the same keys by lists: of the window the
    causal range, of the compressed entries those that are complete."""
    ratio, window = 128, 128
    case = Case(1, tokens, heads, 512, kv_format, window, tokens // ratio, form="table",
                ratio=ratio, batch_invariant=True, has_rope=True)  # fmt: skip
    made = make_inputs(replace(case, form="list"), seed)
    generator = torch.Generator().manual_seed(seed)

    def table(pool: torch.Tensor) -> torch.Tensor:
        return torch.randperm(len(pool), generator=generator)[None].int()

    positions = torch.arange(tokens, dtype=torch.int32)
    inputs = replace(
        made,
        # Every entry is some token's key.
        window_pool=nan_to_zero(made.window_pool),
        compressed_pool=nan_to_zero(made.compressed_pool),
        **dict.fromkeys(("window_indices", "window_lens")),
        **dict.fromkeys(("compressed_indices", "compressed_lens")),
        window_table=table(made.window_pool),
        block_table=table(made.compressed_pool),
        positions=positions,
        request_ids=torch.zeros_like(positions),
        case=case,
    )
    lens = ((positions + 1).clamp(max=window), (positions + 1) // ratio)
    first = ((positions - window + 1).clamp(min=0), torch.zeros_like(positions))
    tables = (inputs.window_table, inputs.block_table)
    pools = (inputs.window_pool, inputs.compressed_pool)
    widths = (window, tokens // ratio)
    lists = []
    for start, table_of, pool, width in zip(first, tables, pools, widths, strict=True):
        size, numbers = pool.shape[1], start[:, None] + torch.arange(width)
        pages = table_of[0].long()[numbers // size % table_of.shape[1]]
        lists.append((pages * size + numbers % size).int())
    return inputs, replace(
        inputs,
        window_indices=lists[0],
        window_lens=lens[0],
        compressed_indices=lists[1],
        compressed_lens=lens[1],
        **dict.fromkeys(("window_table", "block_table", "request_ids")),
        case=replace(case, form="list"),
    )


def nan_to_zero(pool: torch.Tensor) -> torch.Tensor:
    """A pool without values that are NaN."""
    if pool.dtype == torch.uint8:
        return pool.masked_fill(pool == 0xFF, 0)
    return pool.nan_to_num(0.0)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_chunk_sees_by_tables_what_it_sees_by_lists(kv_format, seed) -> None:
    """8,192 tokens of one prompt."""
    tables, lists = chunk_inputs(kv_format, 8192, 16, seed)
    found = run(tables.to("cuda"))
    assert_same(found, run(lists.to("cuda")))
    for few in (slice(0, 2), slice(126, 130), slice(5000, 5001), slice(8190, 8192)):
        assert_paged_close(tables.of_tokens(few), *(x[few].cpu() for x in found))


def test_pages_far_beyond_2_to_the_31(seed) -> None:
    """Pages of a pool that lie gigabytes apart."""
    inputs = make_inputs(Case(2, 1, 64, kv_format="fp8", entries=128), seed).to("cuda")
    pool = inputs.compressed_pool
    stride = 1 << 29
    frame = torch.empty((len(pool) - 1) * stride + pool[0].numel(), dtype=torch.uint8).cuda()
    far = frame.as_strided(pool.shape, (stride, pool.stride(1), 1))
    far.copy_(pool)
    assert far.stride(0) * len(pool) > 2**31
    assert_same(run(inputs), run(replace(inputs, compressed_pool=far)))


def test_no_memory_is_taken_after_the_first_call(seed) -> None:
    inputs = make_inputs(Case(4, 1, 64, entries=512), seed).to("cuda")
    out = torch.empty_like(inputs.q)
    identity = SPARSE_FMHA_PAGED.runner_id(512, 64, "bf16", "softmax")
    arguments = (*inputs.tensors, out, identity)
    torch.ops.dsv4.sparse_fmha_paged(*arguments)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(5):
        torch.ops.dsv4.sparse_fmha_paged(*arguments)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_the_torch_implementation_agrees(seed) -> None:
    inputs = make_inputs(Case(3, 2, 64, kv_format="fp8", ragged=True), seed).to("cuda")
    outputs = [torch.empty_like(x) for x in run(inputs)]
    config = inputs.case.config
    absent = len(PagedFmhaTensors._fields) - len(inputs.tensors)
    given = PagedFmhaTensors(*inputs.tensors, *(None,) * absent)
    given = given._replace(**inputs.optional, **dict(zip(("o", "lse", "max_logits"), outputs)))
    SPARSE_FMHA_PAGED.torch(config, *given[:-1])
    assert_paged_close(inputs.to("cpu"), *(x.cpu() for x in outputs))


# ---- products of FP8 codes -----------------------------------------------------------------------


def codes_case(compute: str, requests: int, heads: int, **options) -> Case:
    """Over uniform entries; a call for the largest scores has one split."""
    options = {"entries": 300, "entry_page": 53, **options}
    return Case(requests, 2, heads, 512, "fp8", uniform=True, compute=compute, **options)


@pytest.mark.parametrize("compute", CODES)
@pytest.mark.parametrize("form", ["list", "table", "mixed"])
@pytest.mark.parametrize("sink_mode", ["softmax", "swa_gate"])
@pytest.mark.parametrize("heads", [40, 72])
def test_products_of_codes(compute, form, sink_mode, heads, seed) -> None:
    options = {"ragged": True, "wild": True, "padded": True, "has_rope": True, "has_factor": True}
    check(codes_case(compute, 9, heads, form=form, sink_mode=sink_mode, **options), seed)


@pytest.mark.parametrize("compute", CODES)
@pytest.mark.parametrize("sink_mode", ["softmax", "swa_gate"])
def test_codes_of_many_tokens_and_special_sinks(compute, sink_mode, seed) -> None:
    """Each CTA has several work tiles; maxima grow; sinks are infinite or huge."""
    case = codes_case(
        compute, 150, 128, sink_mode=sink_mode, growing=True, has_factor=True, has_signs=True,
        ragged=True,
    )  # fmt: skip
    inputs = make_inputs(case, seed)
    inputs.sink_logits[:4] = torch.tensor([torch.inf, -torch.inf, 1000.0, -1000.0])
    assert_paged_close(inputs, *(x.cpu() for x in run(inputs.to("cuda"))))


@pytest.mark.parametrize("compute", CODES)
@pytest.mark.parametrize("heads", [64, 128])
def test_codes_have_the_same_bits_in_any_batch(compute, heads, seed) -> None:
    case = codes_case(compute, 150, heads, entries=512, ragged=True, batch_invariant=True)
    inputs = make_inputs(case, seed).to("cuda")
    together = run(inputs)
    assert_paged_close(inputs.to("cpu"), *(x.cpu() for x in together))
    for part in (slice(0, 1), slice(3, 20), slice(77, 149), slice(None)):
        assert_same(run(inputs.of_tokens(part)), tuple(x[part] for x in together))
