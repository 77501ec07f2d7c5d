"""Whole models over caches of rows and of FP8 entries: the bits are the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4.config.model_config import ModelConfig
from dsv4.engine.engine import Engine
from dsv4.engine.sampling_params import SamplingParams
from dsv4.model.model import DeepseekV4
from tests.model.tiny import (
    Session,
    ids_away_from_ties,
    quantized_config,
    random_model,
    tiny_config,
    with_mtp,
)

pytestmark = pytest.mark.stage("cache")


def _quantised(kinds: str = "SCHC", **changes) -> DeepseekV4:
    return random_model(with_mtp(quantized_config(kinds, **changes)), torch.bfloat16)


def _cut(model: DeepseekV4, ids: Tensor, cuts: list[int], max_draft: int = 0) -> Tensor:
    """Logits of a request that is fed in parts, over a cache full of NaN."""
    session, parts, tokens = Session(model, 1, ids.shape[1], max_draft), [], ids[0].tolist()
    for cut in cuts:
        parts.append(session.logits({0: tokens[:cut]})[0])
        tokens = tokens[cut:]
    assert not tokens
    return torch.cat(parts)


@pytest.mark.parametrize("uniform_scale", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_logits_have_the_same_bits(uniform_scale: bool, seed: int) -> None:
    """Prefill, chunks, draft verification and decode; MTP too."""
    model = _quantised()
    model.uniform_scale = uniform_scale
    ids = torch.randint(0, model.config.vocab_size, (1, 70))
    found = []
    for kv_format, index_format in (("bf16", "fp8"), ("fp8", "fp8"), ("fp8", "fp4")):
        model.kv_format, model.index_format = kv_format, index_format
        keys = model.new_cache(1, 1, 1).layers[1].index_keys
        assert keys.key_format == index_format and keys.is_packed
        torch.manual_seed(seed)  # of the block tables, which must not matter
        cut = _cut(model, ids, [9, 40, 3, 1, 3, *[1] * 14], max_draft=2)
        generated = model.generate(ids.tolist(), max_new_tokens=8, num_draft_tokens=2).tokens
        found.append((model(ids), model(ids, chunk=13), cut, generated))
    for one, *others in zip(*found):
        for other in others:
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_engines_give_the_same_tokens_when_requests_wait_and_start_again(seed: int) -> None:
    """Requests of several chunks with too few blocks for all: the youngest is computed twice."""
    model = _quantised("SCH")
    vocab, generator = model.config.vocab_size, torch.Generator().manual_seed(seed)
    prompts = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in (118, 122, 60)]
    found = []
    for kv_format in ("bf16", "fp8"):
        model.kv_format = kv_format
        engine = Engine(model, 3, 200, num_draft_tokens=1, prefill_chunk=50, num_blocks=3)
        sampling = SamplingParams(max_new_tokens=12, stop_tokens=())
        tokens = {engine.add(prompt, sampling): [] for prompt in prompts}
        preempted, leave = [], engine._preempt_youngest

        def counting(leave=leave, preempted=preempted) -> None:
            preempted.append(True)
            leave()

        engine._preempt_youngest = counting
        while engine.num_requests:
            for output in engine.step():
                tokens[output.request] += output.tokens
        assert preempted
        found.append(tokens)
    assert found[0] == found[1]
    assert [len(new) for new in found[0].values()] == [12] * 3


WIDE = dict(head_dim=128, qk_rope_head_dim=64, index_head_dim=64)  # what FP8 entries can hold


@pytest.mark.parametrize("kinds", ["S", "C", "H"])
@pytest.mark.parametrize("cuts", [[20, 30], [17, *[1] * 33]], ids=["two chunks", "decode"])
def test_steps_see_the_keys_that_one_prefill_sees(kinds: str, cuts: list[int], seed: int) -> None:
    """Rounded ones, wherever a chunk ends. Nothing else is rounded in a plain model in float32."""
    model = random_model(tiny_config(kinds, **WIDE))
    model.kv_format = "fp8"
    ids = ids_away_from_ties(model, 1, 50)
    whole = model(ids)[0]
    rows = (_cut(model, ids, cuts) - whole).norm(dim=-1) / whole.norm(dim=-1)
    # A code of a key next to a rounding edge may tip.
    assert rows.median() < 1e-5 and rows.max() < 0.02, f"{rows.median():.1e}, {rows.max():.1e}"


def test_rows_of_a_plain_model_are_not_rounded(seed: int) -> None:
    """FP8 entries are an option for it, and one that costs accuracy."""
    model = random_model(tiny_config("SH", **WIDE))
    ids = torch.randint(0, model.config.vocab_size, (1, 60))
    exact = model(ids)
    model.kv_format = "fp8"
    rows = (model(ids) - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert 1e-3 < rows.median() < 0.1, f"{rows.median():.1e}"


def test_a_format_that_the_model_cannot_have_is_refused() -> None:
    model = DeepseekV4(tiny_config("S"), device="meta", kv_format="fp8")
    with pytest.raises(ValueError, match="head_dim: got 32"):
        model.new_cache(1, 1, 1)
    model = DeepseekV4(ModelConfig.flash(), device="meta", kv_format="fp32")
    with pytest.raises(ValueError, match="kv_format of a bfloat16 model"):
        model.new_cache(1, 1, 1)
