"""`rms_norm_fp8` on a GPU: bits of the CPU, graphs, streams, strides, sizes, no allocation."""

from __future__ import annotations

import pytest
import torch

from dsv4 import ops
from dsv4.testing.rms_norm_fp8 import EPS, Case, Inputs, assert_same_codes

pytestmark = [pytest.mark.gpu, pytest.mark.stage("rows")]

NAMES = ("out", "scale_out", "norm_out")


def outputs_like(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Poisoned outputs for rows."""
    tokens, dim = x.shape
    codes = torch.full((tokens, dim), 0xFF, dtype=torch.uint8, device="cuda")
    scales = torch.full((tokens, dim // 128), 0xFF, dtype=torch.uint8, device="cuda")
    return {
        "out": codes.view(torch.float8_e4m3fn),
        "scale_out": scales.view(torch.float8_e8m0fnu),
        "norm_out": torch.full_like(x, torch.nan).contiguous(),
    }


def run(inputs: Inputs, outputs: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Codes, scales and normalised rows by name."""
    options = outputs_like(inputs.x) if outputs is None else outputs
    found = ops.rms_norm_fp8(inputs.x, inputs.optional_weight, eps=EPS, return_norm=True, **options)
    return dict(zip(NAMES, found, strict=True))


def check(found: dict[str, torch.Tensor], inputs: Inputs) -> None:
    """Compare with the torch implementation on the CPU, bit for bit."""
    there = Inputs(inputs.case, inputs.x.cpu(), inputs.weight.cpu())
    for name, tensor in there.expected().items():
        assert_same_codes(name, found[name].cpu(), tensor)


@pytest.mark.parametrize("dim", [128, 640, 1024, 1536, 4096, 7168, 16384])
@pytest.mark.parametrize("tokens", [1, 3, 133, 3000])
def test_bits_of_the_cpu(dim, tokens, seed) -> None:
    inputs = Inputs.make(Case(tokens, dim), seed, "cuda")
    check(run(inputs), inputs)


@pytest.mark.parametrize("kind", ["growing", "integers", "special"])
@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16", None])
def test_kinds_of_values_and_weights(kind, weight_dtype, seed) -> None:
    inputs = Inputs.make(Case(70, 4096, weight_dtype, kind, is_strided=True), seed, "cuda")
    check(run(inputs), inputs)


def test_the_torch_implementation_has_the_same_bits_on_cuda(seed) -> None:
    inputs = Inputs.make(Case(300, 7168), seed, "cuda")
    for name, tensor in inputs.expected().items():
        assert_same_codes(name, run(inputs)[name], tensor)


def test_graph_replay_reads_new_inputs(seed) -> None:
    inputs, other = (Inputs.make(Case(5, 4096), seed + i, "cuda") for i in range(2))
    run(inputs)
    outputs = outputs_like(inputs.x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(inputs, outputs)
    found = dict(zip(NAMES, outputs.values(), strict=True))
    for source in (inputs, other):
        inputs.x.copy_(source.x)
        inputs.weight.copy_(source.weight)
        for tensor in outputs.values():
            tensor.view(torch.uint8).fill_(0xFF)
        graph.replay()
        check(found, source)


def test_launches_that_follow_each_other_see_what_was_written(seed) -> None:
    """A launch begins while the one before it ends: rows that this wrote must have arrived."""
    first = Inputs.make(Case(2000, 4096), seed, "cuda")
    found = run(first)
    second = Inputs(first.case, torch.empty_like(first.x), first.weight)
    outputs = {**outputs_like(first.x), "norm_out": second.x}
    for _ in range(20):
        second.x.fill_(torch.nan)
        run(first, outputs)
        again = run(second)
    check(again, Inputs(first.case, found["norm_out"], first.weight))


def test_two_streams(seed) -> None:
    both = [Inputs.make(Case(500, 4096), seed + i, "cuda") for i in range(2)]
    streams = [torch.cuda.Stream() for _ in both]
    torch.cuda.synchronize()
    results: list[list[dict[str, torch.Tensor]]] = [[], []]
    for _ in range(20):
        for inputs, stream, found in zip(both, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(run(inputs))
    torch.cuda.synchronize()
    for inputs, found in zip(both, results, strict=True):
        check(found[0], inputs)
        for other in found[1:]:
            for name in NAMES:
                assert_same_codes(name, other[name], found[0][name])


def test_a_row_is_the_same_alone_and_in_any_batch(seed) -> None:
    inputs = Inputs.make(Case(8192, 1536), seed, "cuda")
    found = run(inputs)
    for rows in (slice(0, 1), slice(4000, 4001), slice(8191, 8192), slice(100, 700)):
        part = run(Inputs(inputs.case, inputs.x[rows], inputs.weight))
        for name in NAMES:
            assert_same_codes(name, part[name], found[name][rows])


def test_no_rows() -> None:
    codes, scales = ops.rms_norm_fp8(
        torch.empty(0, 4096, dtype=torch.bfloat16, device="cuda"), None, eps=EPS
    )
    assert (codes.shape, scales.shape) == ((0, 4096), (0, 32))


def test_unaligned_rows_are_refused_by_name() -> None:
    x = torch.zeros(3, 132, dtype=torch.bfloat16, device="cuda")[:, :128]
    with pytest.raises(ValueError, match=r"^x: got strides .* multiple of 16 bytes"):
        ops.rms_norm_fp8(x, None, eps=EPS)


def test_no_allocation_in_a_warm_call(seed) -> None:
    inputs = Inputs.make(Case(64, 4096), seed, "cuda")
    outputs = outputs_like(inputs.x)
    run(inputs, outputs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        run(inputs, outputs)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.slow
def test_more_than_two_to_the_31_elements(seed) -> None:
    tokens, dim = 2**31 // 16384 + 5, 16384
    if torch.cuda.mem_get_info()[0] < 6 * tokens * dim:
        pytest.skip("needs 13 GB of free GPU memory")
    inputs = Inputs.make(Case(4, dim), seed, "cuda")
    x = torch.zeros(tokens, dim, dtype=torch.bfloat16, device="cuda")
    x[-4:] = inputs.x
    codes, scales = ops.rms_norm_fp8(x, inputs.weight, eps=EPS)
    wanted = run(inputs)
    assert_same_codes("codes", codes[-4:], wanted["out"])
    assert_same_codes("scales", scales[-4:], wanted["scale_out"])
