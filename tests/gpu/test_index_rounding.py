"""`IndexRounding` on a Hopper GPU: codes of the torch implementation, for any number of tokens;
merged launches, padding, graphs; scores that take the codes."""

from __future__ import annotations

import pytest
import torch

from dsv4 import ops
from dsv4.layers.indexer import Indexer
from dsv4.model.model import DeepseekV4
from dsv4.ops.fp8_linear import MODEL_LAYERS
from dsv4.ops.head_rotation import HeadRotation, head_squares
from dsv4.ops.index_rounding import IndexRounding, index_scales, round_heads
from dsv4.testing.fp8_linear import Case
from dsv4.testing.fp8_linear import Inputs as Linear
from dsv4.testing.index_rounding import Inputs, assert_same_heads
from dsv4.testing.index_topk import Case as ScoresCase
from dsv4.testing.index_topk import Inputs as Scores
from dsv4.testing.index_topk import run_op
from tests.model.tiny import quantized_config, random_model

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.stage("projections")]

TOKENS = (1, 2, 7, 8, 9, 16, 17, 63, 64, 65, 128, 200, 256, 257, 300, 1000, 4096, 8192)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def run(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales, in poisoned memory."""
    epilogue = inputs.epilogue
    shape = (inputs.case.tokens, inputs.case.out_features)
    y = torch.full(shape, 0x7F, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    given = inputs.x, inputs.weight, inputs.scale
    ops.fp8_linear(*given, x_scale=inputs.x_scale, out=y, epilogue=epilogue)
    return y, epilogue.scales


def plain(inputs: Inputs) -> torch.Tensor:
    return ops.fp8_linear(inputs.x, inputs.weight, inputs.scale, x_scale=inputs.x_scale)


@pytest.mark.parametrize("layer", ["Flash indexer wq_b", "Pro indexer wq_b"])
def test_bits_of_two_steps(layer, seed) -> None:
    rows, width = MODEL_LAYERS[layer]
    inputs = Inputs.make_heads(Case(max(TOKENS), width, rows), seed, "cuda")
    y = plain(inputs)
    expected = inputs.applied(y)
    for tokens in TOKENS:
        found = run(inputs.first(tokens))
        wanted = [t[:tokens] for t in expected]
        assert_same_heads(found, tuple(wanted), y[:tokens], f"T = {tokens}")


@pytest.mark.parametrize("tokens", [5, 15, 60, 200])
def test_rows_that_are_not_finite_touch_no_other(tokens, seed) -> None:
    inputs = Inputs.make_heads(Case(tokens, 1024, 8192, has_special_rows=True), seed, "cuda")
    y = plain(inputs)
    assert y[0::5].isnan().all() and y[4::5].isfinite().all()
    assert_same_heads(run(inputs), inputs.applied(y), y)


@pytest.mark.parametrize("layer", ["Flash", "Pro"])
def test_beside_rotated_heads_in_a_merged_linear(layer, seed) -> None:
    rows, width = MODEL_LAYERS[f"{layer} indexer wq_b"]
    inputs = Inputs.make_heads(Case(300, width, rows), seed, "cuda")
    rows, width = MODEL_LAYERS[f"{layer} wq_b"]
    heads = Linear.make(Case(300, width, rows), seed, "cuda")
    y = plain(inputs)
    expected = inputs.applied(y)

    def rotation(tokens: int) -> HeadRotation:
        squares = head_squares(tokens, rows // 512, 512, "cuda").fill_(torch.nan)
        return HeadRotation(inputs.rope, inputs.positions[:tokens], 512, squares)

    whole = rotation(300)
    given = {"x_scale": inputs.x_scale, "epilogue": whole}
    queries = ops.fp8_linear(inputs.x, heads.weight, heads.scale, **given)
    for tokens in (1, 2, 8, 9, 16, 17, 64, 65, 128, 200, 256, 300):
        own = rotation(tokens)
        scales = index_scales(tokens, 64, "cuda").fill_(torch.nan)
        rounding = IndexRounding(own.rope, own.positions, scales)
        ys = ops.merged_linear(
            inputs.wide[:tokens],
            [heads.weight, inputs.weight],
            [heads.scale, inputs.scale],
            x_codes=inputs.x[:tokens],
            x_scale=inputs.x_scale[:tokens],
            epilogues=[own, rounding],
        )
        assert torch.equal(ys[0], queries[:tokens]), f"T = {tokens}"
        assert torch.equal(own.squares, whole.squares[:tokens]), f"T = {tokens}"
        wanted = [t[:tokens] for t in expected]
        assert_same_heads((ys[1], scales), tuple(wanted), y[:tokens], f"T = {tokens}")


def test_a_replay_reads_positions_anew(seed) -> None:
    inputs = Inputs.make_heads(Case(20, 1024, 8192), seed, "cuda")
    run(inputs)
    graph, epilogue = torch.cuda.CUDAGraph(), inputs.epilogue
    given = inputs.x, inputs.weight, inputs.scale
    with torch.cuda.graph(graph):
        codes = ops.fp8_linear(*given, x_scale=inputs.x_scale, epilogue=epilogue)
    y = plain(inputs)
    for shift in (0, 7):
        positions = inputs.positions + shift
        inputs.positions.copy_(positions)
        graph.replay()
        expected = round_heads(y, inputs.rope, positions)
        assert_same_heads((codes, epilogue.scales), expected, y, f"shift {shift}")


@pytest.mark.parametrize("key_format", ["fp8", "fp4"])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_scores_of_codes_are_those_of_queries(key_format, count, seed) -> None:
    lens = (4000, 20_011, 0, 513) + (700, 100, 3000, 9000) * 9
    case = ScoresCase(lens[:count], key_format=key_format, gives_slots=True)
    coded = ScoresCase(**{**vars(case), "has_codes": True})
    inputs = Scores.make(case, seed, "cuda")
    wanted, found = run_op(inputs), run_op(Scores(coded, inputs.tensors))
    assert torch.equal(found["indices"], wanted["indices"])
    for token, entries in enumerate(inputs.counts()):
        if entries > case.topk:
            pair = [outputs["scores"][token, :entries] for outputs in (found, wanted)]
            assert torch.equal(*pair), f"token {token}"


@pytest.mark.parametrize("chunk", [1, 7, 150])
def test_a_layer_chooses_the_same_entries(chunk, seed, monkeypatch) -> None:
    sizes = {"q_lora_rank": 512, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 16}
    model = random_model(quantized_config("C", rates=(4, 128), **sizes), torch.bfloat16)
    twin = DeepseekV4(model.config, dtype=torch.bfloat16, device="cuda")
    twin.load_state_dict(model.state_dict())
    ids = torch.randint(0, model.config.vocab_size, (2, 150), device="cuda")
    made, rounding = [], Indexer.rounding

    def counted(*arguments: object) -> IndexRounding | None:
        made.append(rounding(*arguments))
        return made[-1]

    monkeypatch.setattr(Indexer, "rounding", counted)
    monkeypatch.setattr(Indexer, "has_coded_queries", True)
    found = twin(ids, chunk=chunk)
    assert made and all(made)
    monkeypatch.setattr(Indexer, "has_coded_queries", False)
    assert torch.equal(found, twin(ids, chunk=chunk))
