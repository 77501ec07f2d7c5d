"""`HeadRotation` on a Hopper GPU: bits of the torch implementation, whatever the number of tokens;
merged launches, padding, graphs; attention that takes the squares."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4 import ops
from dsv4.ops.fp8_linear import MODEL_LAYERS
from dsv4.ops.head_rotation import norm_factor
from dsv4.testing.fp8_linear import Case, Inputs
from dsv4.testing.head_rotation import make_rotation
from dsv4.testing.paged_attention import Case as PagedCase
from dsv4.testing.paged_attention import assert_paged_close, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.stage("projections")]

TOKENS = (1, 2, 7, 8, 9, 16, 17, 63, 64, 65, 128, 200, 256, 257, 300, 1000, 4096, 8192)
HEAD_DIM = 512


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def run(inputs: Inputs, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """y and squares of the first tokens, in poisoned memory."""
    rotation = make_rotation(inputs.case, HEAD_DIM, seed, "cuda").first(tokens)
    shape = (tokens, inputs.case.out_features)
    y = torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")
    x = inputs.x[:tokens]
    ops.fp8_linear(x, inputs.weight, inputs.scale, out=y, epilogue=rotation.epilogue)
    return y, rotation.squares


@pytest.mark.parametrize("layer", ["Flash wq_b", "Pro wq_b"])
def test_bits_of_the_torch_implementation(layer, seed) -> None:
    rows, width = MODEL_LAYERS[layer]
    inputs = Inputs.make(Case(max(TOKENS), width, rows), seed, "cuda")
    expected = ops.fp8_linear(inputs.x, inputs.weight, inputs.scale)
    rotation = make_rotation(inputs.case, HEAD_DIM, seed, "cuda")
    rotation.epilogue.apply_(expected)
    for tokens in TOKENS:
        y, squares = run(inputs, tokens, seed)
        assert torch.equal(y, expected[:tokens]), f"T = {tokens}"
        assert torch.equal(squares, rotation.squares[:tokens]), f"T = {tokens}"


@pytest.mark.parametrize("tokens", [5, 15, 60, 200])
def test_rows_that_are_not_finite_touch_no_other(tokens, seed) -> None:
    inputs = Inputs.make(Case(tokens, 1024, 4096, has_special_rows=True), seed, "cuda")
    y, squares = run(inputs, tokens, seed)
    assert y[0::5].isnan().all() and squares[0::5].isnan().all()
    assert not y[4::5].isnan().any() and not squares[4::5].isnan().any()
    rotation = make_rotation(inputs.case, HEAD_DIM, seed, "cuda")
    ordinary = rotation.epilogue._replace(
        positions=rotation.positions[4::5].contiguous(), squares=torch.empty_like(squares[4::5])
    )
    alone = ops.fp8_linear(inputs.x[4::5], inputs.weight, inputs.scale, epilogue=ordinary)
    assert torch.equal(alone, y[4::5])
    assert torch.equal(ordinary.squares, squares[4::5])


@pytest.mark.parametrize("label", ["Flash CSA latent", "Pro CSA latent"])
def test_one_weight_of_a_merged_launch(label, seed) -> None:
    width = {"Flash CSA latent": 1024, "Pro CSA latent": 1536}[label]
    rows = {"Flash CSA latent": 32768, "Pro CSA latent": 65536}[label]
    heads = Inputs.make(Case(max(TOKENS), width, rows), seed, "cuda")
    other = Inputs.make(Case(1, width, 8192), seed + 1, "cuda")
    for tokens in (1, 8, 9, 64, 65, 300):
        rotation = make_rotation(heads.case, HEAD_DIM, seed, "cuda").first(tokens)
        merged = ops.merged_linear(
            heads.x[:tokens],
            [heads.weight, other.weight],
            [heads.scale, other.scale],
            epilogues=[rotation.epilogue, None],
        )
        y, squares = run(heads, tokens, seed)
        assert torch.equal(merged[0], y), f"T = {tokens}"
        assert torch.equal(rotation.squares, squares), f"T = {tokens}"
        alone = ops.fp8_linear(heads.x[:tokens], other.weight, other.scale)
        assert torch.equal(merged[1], alone), f"T = {tokens}"


@pytest.mark.parametrize("tokens", [1, 13, 100])
def test_graph_replay_reads_new_positions(tokens, seed) -> None:
    inputs = Inputs.make(Case(tokens, 1024, 8192), seed, "cuda")
    rotation, other = (make_rotation(inputs.case, HEAD_DIM, seed + i, "cuda") for i in range(2))
    wanted = []
    for positions in (rotation.positions, other.positions):
        epilogue = rotation.epilogue._replace(positions=positions, squares=None)
        wanted.append(ops.fp8_linear(inputs.x, inputs.weight, inputs.scale, epilogue=epilogue))
    y, graph = torch.empty_like(wanted[0]), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.fp8_linear(inputs.x, inputs.weight, inputs.scale, out=y, epilogue=rotation.epilogue)
    first = rotation.positions.clone()
    for positions, expected in zip((first, other.positions, first), (*wanted, wanted[0])):
        rotation.positions.copy_(positions)
        y.fill_(torch.nan)
        rotation.squares.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, expected)
        assert not rotation.squares.isnan().any()


def test_squares_and_tables_are_checked_before_the_launch(seed) -> None:
    inputs = Inputs.make(Case(3, 512, 1024), seed, "cuda")
    epilogue = make_rotation(inputs.case, HEAD_DIM, seed, "cuda").epilogue
    for wrong, message in (
        ({"squares": epilogue.squares[:, :1]}, r"^squares: got 1 heads"),
        ({"squares": epilogue.squares[:2]}, r"^squares: got shape|^squares: got 2 rows"),
        ({"positions": epilogue.positions[:2]}, r"^positions: got shape|^positions: got 2 rows"),
        ({"rope": epilogue.rope[:0]}, r"^rope: got no rows"),
        ({"rope": None}, r"^rope: got None"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.fp8_linear(
                inputs.x, inputs.weight, inputs.scale, epilogue=epilogue._replace(**wrong)
            )


@pytest.mark.parametrize(
    "case",
    [
        PagedCase(4, 1, 64, kv_format="fp8", entries=512, has_rope=True, has_squares=True),
        PagedCase(1, 1, 64, kv_format="fp8", entries=512, has_rope=True, has_squares=True),
        PagedCase(200, 1, 64, kv_format="fp8", entries=64, has_squares=True, wild=True),
        PagedCase(40, 2, 128, kv_format="bf16", entries=256, has_squares=True, ragged=True),
        PagedCase(3, 1, 16, kv_format="fp8", entries=256, has_squares=True, ragged=True),
        PagedCase(3, 1, 24, head_dim=128, entries=256, has_squares=True, wild=True),
        PagedCase(3, 1, 64, head_dim=64, entries=256, has_squares=True, wild=True),
    ],
    ids=str,
)
def test_attention_takes_squares(case, seed) -> None:
    inputs = make_inputs(case, seed)
    given = inputs.to("cuda")
    options = {**given.options, **given.kernel_options, "return_lse": True}
    found = ops.sparse_fmha_paged(*given.tensors, **options, return_max_logits=True)
    assert_paged_close(inputs, *(x.cpu() for x in found))
    # The same kernels with the factor that follows from the squares.
    factor = norm_factor(given.q_squares, case.head_dim, options["q_eps"])
    options |= {"q_squares": None, "q_eps": None, "q_factor": factor}
    other = ops.sparse_fmha_paged(*given.tensors, **options)
    for one, that in zip(found[:2], other):
        torch.testing.assert_close(one, that, atol=2e-3, rtol=2e-2)


def test_tokens_of_a_batch_have_bits_of_their_own(seed) -> None:
    case = PagedCase(9, 1, 64, kv_format="fp8", entries=128, batch_invariant=True, has_squares=True)
    inputs = make_inputs(case, seed).to("cuda")
    options = {**inputs.options, **inputs.kernel_options}
    together = ops.sparse_fmha_paged(*inputs.tensors, **options)
    part = inputs.of_tokens(slice(3, 5))
    alone = ops.sparse_fmha_paged(*part.tensors, **{**options, **part.optional})
    assert torch.equal(alone, together[3:5])
    assert replace(case, has_squares=False).config != case.config
