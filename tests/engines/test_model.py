"""Log-probabilities of the whole model against vLLM's CPU build, prompts and decode.

It computes in bfloat16. So does our model if asked to, and how far that takes it from our model in
float32 is the measure: the two stacks must not be further apart than twice that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

import dsv4
from dsv4.loader import save
from dsv4.reference.model import ReferenceModel
from tests.engines import goldens, model_cases
from tests.engines.checkpoint import ENGINE, digest
from tests.engines.model_cases import Answer, as_answer, divergences
from tests.engines.vllm_process import SOURCES

pytestmark = pytest.mark.stage("model")
LONG = pytest.mark.slow
LENGTHS = [37, pytest.param(150, marks=LONG), pytest.param(600, marks=LONG)]
LONGEST = pytest.param(2600, marks=LONG)  # 650 entries, 512 of which are selected

Ask = Callable[[int], Answer]
Models = Callable[[int, str], Tensor]


@pytest.fixture(scope="module", params=SOURCES)
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """What vLLM says about a prompt, recorded or asked now."""
    if request.param == "recorded":
        found = goldens.load("vllm_model")
    else:
        found = model_cases.ask(tmp_path_factory.mktemp("asked"))
    return lambda length: model_cases.answer(found, length)


@pytest.fixture(scope="module")
def ours(theirs: Ask, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Logits [S, vocab] of a prompt and its continuation, by our model in a dtype."""
    folder = tmp_path_factory.mktemp("ours") / "checkpoint"
    save(folder, ENGINE, model_cases.tensors())

    @cache
    def model(dtype: str):
        return dsv4.load(folder, device="cpu", dtype=getattr(torch, dtype))

    return cache(lambda length, dtype: model(dtype)(_ids(theirs, length))[0].float())


def test_recorded_for_these_tensors() -> None:
    assert goldens.about("vllm_model")["checkpoint"] == digest(model_cases.tensors())


@pytest.mark.parametrize("length", [*LENGTHS, LONGEST])
def test_as_close_as_bfloat16_is(length: int, theirs: Ask, ours: Models) -> None:
    said = theirs(length)
    exact = ours(length, "float32")
    noise = divergences(as_answer(said, ours(length, "bfloat16")), exact)
    assert 1e-4 < noise.mean() < 5e-3
    apart = divergences(said, exact)
    for part in (slice(None, -said.decoded), slice(-said.decoded, None)):
        assert apart[part].mean() <= 2 * noise.mean(), f"{apart[part].mean():.1e}"


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_tokens_are_ours(length: int, theirs: Ask, ours: Models) -> None:
    """But where two candidates are as good as equal."""
    said = theirs(length)
    rows = ours(length, "float32")[length - 1 :]
    gap = rows.amax(-1) - rows.gather(1, said.tokens[:, None])[:, 0]
    assert gap.max() < 0.3
    assert (gap == 0).float().mean() > 0.8


def _without_sink() -> ReferenceModel:
    tensors = {
        name: torch.full_like(tensor, -30) if name.endswith("attn_sink") else tensor
        for name, tensor in model_cases.tensors().items()
    }
    return ReferenceModel(ENGINE, tensors)


def _without_compressed() -> ReferenceModel:
    return ReferenceModel(ENGINE, model_cases.tensors(), compressed_branch=False)


@pytest.mark.parametrize(
    ("length", "leave_out", "least"),
    [
        (37, _without_sink, 5),
        pytest.param(150, _without_sink, 5, marks=LONG),
        pytest.param(150, _without_compressed, 5, marks=LONG),
        pytest.param(600, _without_sink, 3, marks=LONG),
        pytest.param(600, _without_compressed, 5, marks=LONG),
        pytest.param(2600, _without_sink, 3, marks=LONG),
        pytest.param(2600, _without_compressed, 5, marks=LONG),
    ],
)
def test_what_is_left_out_shows(
    length: int, leave_out: Callable[[], ReferenceModel], least: int, theirs: Ask, ours: Models
) -> None:
    said = theirs(length)
    with torch.no_grad():
        logits = leave_out().forward(_ids(theirs, length)).logits[0]
    apart = divergences(said, ours(length, "float32")).mean()
    assert divergences(said, logits).mean() > least * apart


def _ids(theirs: Ask, length: int) -> Tensor:
    """[1, S]: the prompt, and what vLLM continued it with, but the last."""
    return torch.cat((model_cases.prompt(length), theirs(length).tokens[:-1]))[None]
