"""The shipped checkpoint: what it is made of, what it has learnt, what its parts are worth.

`metrics.json` holds what was measured when it was made; nothing here trusts it without measuring.
"""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dsv4
from dsv4.cli import demo_checks
from dsv4.cli.attention_watch import AttentionWatch
from dsv4.config.layer_schedule import LayerKind, layer_schedule
from dsv4.kernels.kit.kv_entry import ROPE_DIM
from dsv4.loader import inventory, load_tensors
from dsv4.loader.tokenizer import load_tokenizer
from dsv4.ops.attention import paged_torch, torch_path
from dsv4.reference.model import ReferenceModel
from scripts.tools.tiny_evaluate import PHASES, Task, recall, window_losses

pytestmark = pytest.mark.stage("checkpoint")

FOLDER = Path(__file__).parents[2] / "checkpoints" / "tiny"
METRICS = json.loads((FOLDER / "metrics.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model():
    return dsv4.load(FOLDER, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def task() -> Task:
    """Four windows and four exercises, one of each phase: a subset that takes seconds."""
    return Task.of(FOLDER, windows=4, exercises=4)


@torch.no_grad()
def _logits(model, rows: Tensor, *, blind: bool = False) -> Tensor:
    if not blind:
        return model(rows)
    with AttentionWatch(drop_compressed=True):
        return model(rows)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_it_has_every_part_of_the_architecture_in_the_released_layout() -> None:
    config, tensors = load_tensors(FOLDER)
    layers = layer_schedule(config)
    assert {layer.kind for layer in layers} == {LayerKind.SWA, LayerKind.CSA, LayerKind.HCA}
    assert {layer.ratio for layer in layers} == {0, 4, 128}
    main = [layer for layer in layers if not layer.is_mtp]
    assert {layer.hash_routed for layer in main} == {True, False}
    assert [layer.is_mtp for layer in layers].count(True) == 1
    assert (config.linear_scheme, config.expert_scheme) == ("fp8", "fp4")
    assert (config.head_dim, config.qk_rope_head_dim, config.sliding_window) == (128, 64, 128)
    assert config.num_attention_heads % 8 == 0
    for name, spec in inventory(config).items():
        assert (tensors[name].dtype, tuple(tensors[name].shape)) == (spec.dtype, spec.shape), name
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 6e6


def test_every_weight_was_trained() -> None:
    """No tensor is constant, except biases and scales that are single numbers."""
    _, tensors = load_tensors(FOLDER)
    for name, tensor in tensors.items():
        values = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        if tensor.numel() > 4 and not name.endswith(".scale"):
            assert values.unique().numel() > 1, name


def test_the_tokenizer_round_trips_the_held_out_text() -> None:
    tokenizer = load_tokenizer(FOLDER)
    text = (FOLDER / "held_out.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == 1024 and len(ids) < len(text) / 2.5
    assert tokenizer.encode("<｜begin▁of▁sentence｜><｜end▁of▁sentence｜>") == [0, 1]


def test_logits_follow_the_oracle_with_every_rounding(model, task: Task) -> None:
    """A value beside a rounding edge may flip and reach all later tokens: close, rarely equal.

    Before the first flip tokens agree to fp32 precision, so the first of many short rows do.
    """
    oracle = ReferenceModel(*load_tensors(FOLDER))
    rows = task.windows[:1].view(64, 8)
    with torch.no_grad():
        expected, actual = oracle.forward(rows).logits, model(rows)
        error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
        equal = (error < 1e-5).float().mean().item()
        assert equal > 0.85, f"{equal:.0%} of the tokens agree; median error {error.median():.1e}"
        long = task.windows[:1]
        expected, actual = oracle.forward(long).logits, model(long)
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.median() < 0.04, f"median error {error.median():.1e}"
    (there,), (here,) = window_losses(expected, long), window_losses(actual, long)
    assert here == pytest.approx(there, abs=0.02)


def test_it_predicts_far_better_than_a_unigram_model(model, task: Task) -> None:
    losses = window_losses(_logits(model, task.windows), task.windows)
    recorded = METRICS["losses"][: len(losses)]
    assert losses == pytest.approx(recorded, abs=0.03), "metrics.json is not of this checkpoint"
    assert mean(losses) < 0.65 * task.unigram_loss()
    # These windows alone are a noisy sample of the 3 % that holds for the whole text.
    original = METRICS["original_losses"][: len(losses)]
    assert math.exp(mean(losses) - mean(original)) < 1.05


def test_the_format_of_the_cache_changes_no_bit(task: Task) -> None:
    """Values are rounded either way. Keys of 128 channels have one group of codes, so that scales
    are uniform anyway."""
    rows, found = task.windows[:1, :170], []
    for kv_format, uniform in (("bf16", False), ("fp8", True), (None, False)):
        model = dsv4.load(FOLDER, device="cpu", kv_format=kv_format, uniform_scale=uniform)
        with torch.no_grad():
            logits = torch.cat((model(rows), model(rows, chunk=77)))
        prompts = rows[:, :140].tolist()
        tokens = model.generate(prompts, max_new_tokens=4, num_draft_tokens=1).tokens
        found.append((logits, tokens))
    cache = model.new_cache(1, 1, 1)
    assert cache.kv_format.name == "fp8" and cache.layers[1].entries.data.dtype == torch.uint8
    for logits, tokens in found[1:]:
        assert torch.equal(logits, found[0][0]) and tokens == found[0][1]


def attend_codes(terms: int, q: Tensor, keys, round_p: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`torch_path.attend` with the roundings of products of FP8 codes: queries and weights are sums
    of e4m3 terms, but for the rotated channels."""

    def rounded(x: Tensor) -> Tensor:
        # A power of two, as kernels take one: codes then reach at least half of the largest.
        scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1, keepdim=True) / 448)))
        scale = scale.nan_to_num(1.0).clamp(min=2.0**-120)
        rest, found = x / scale, torch.zeros_like(x)
        for _ in range(terms):
            term = rest.to(torch.float8_e4m3fn).float()
            rest, found = rest - term, found + term
        return found * scale

    codes = q.shape[-1] - ROPE_DIM
    if keys.hi == 0:
        return torch_path.attend(q, keys, round_p)
    values, mask = keys.tile(0, keys.hi)
    logits = torch.cat((rounded(q[..., :codes]), q[..., codes:]), -1) @ values.mT
    logits = logits.masked_fill(~mask, -torch.inf)
    largest = logits.amax(-1, keepdim=True)
    weights = (logits - largest.nan_to_num(neginf=0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    o = rounded(weights) @ values[..., :codes]
    o = torch.cat((o, weights.bfloat16().float() @ values[..., codes:]), -1)
    o = (o / total).nan_to_num(0.0)
    return o, (largest + total.log()).squeeze(-1), largest.squeeze(-1)


@pytest.mark.slow
def test_products_of_fp8_codes_cost_little_loss(task: Task, monkeypatch) -> None:
    """The operator's `compute`: kernels round queries and weights so, and serve 512 channels."""
    model = dsv4.load(FOLDER, device="cpu", kv_format="fp8", uniform_scale=True)
    rows, losses = task.windows[:2], {}
    for terms in (0, 1, 2):
        if terms:
            monkeypatch.setattr(paged_torch, "attend", partial(attend_codes, terms))
        with torch.no_grad():
            losses[terms] = mean(window_losses(model(rows), rows))
    assert losses[1] != losses[0] and losses[2] != losses[0]
    for terms in (1, 2):
        assert losses[terms] == pytest.approx(losses[0], rel=0.005), terms


def test_loss_and_recall_over_a_cache_of_fp8_entries(task: Task) -> None:
    part = Task(task.windows[:2], task.exercises[:2], task.answers[:2], task.fillers[:2])
    scores = part.measure_cached(FOLDER, "fp8")
    recorded = METRICS["losses"][:2]
    assert scores.losses == pytest.approx(recorded, abs=0.04)
    assert mean(scores.recalled) >= 0.8, scores.recalled


def test_recall_past_the_window_needs_the_compressed_branch(model, task: Task) -> None:
    full = recall(_logits(model, task.exercises), task.exercises, task.answers)
    blind = recall(_logits(model, task.exercises, blind=True), task.exercises, task.answers)
    assert min(full) >= 0.8, f"{full} by phase"
    assert mean(blind) < 0.25, f"{blind} without compressed entries"


def test_text_needs_the_compressed_branch(model, task: Task) -> None:
    rows = task.windows[:2]
    full = window_losses(_logits(model, rows), rows)
    blind = window_losses(_logits(model, rows, blind=True), rows)
    assert mean(blind) > mean(full) + 0.02


def test_mtp_drafts_are_often_right_and_change_nothing(model) -> None:
    tokenizer = load_tokenizer(FOLDER)
    prompt = tokenizer.encode("And the LORD spake unto Moses, saying,")
    plain = model.generate([prompt], max_new_tokens=24)
    drafted = model.generate([prompt], max_new_tokens=24, num_draft_tokens=1)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.drafts_accepted > 0.3 * drafted.stats.drafts_proposed > 0


def test_the_demo_notices_tokens_that_the_model_would_not_choose(model) -> None:
    prompt = load_tokenizer(FOLDER).encode("And the LORD spake unto Moses, saying,")
    new = model.generate([prompt], max_new_tokens=8).tokens[0]
    assert demo_checks.predicts(model, prompt, new)[0]
    for place in range(len(new)):
        wrong = [*new[:place], new[place] ^ 1, *new[place + 1 :]]
        assert not demo_checks.predicts(model, prompt, wrong)[0]


def test_the_demo_gives_the_kernel_what_the_model_saw(model) -> None:
    """A call whose keys lie side by side is the same attention, before the output is rotated."""
    prompt = load_tokenizer(FOLDER).encode("And the LORD spake unto Moses, saying,")
    with AttentionWatch(keep=4) as watch:
        model.generate([prompt], max_new_tokens=2)
    assert len(watch.kept) == 4, "a call of each layer"
    for call in watch.kept:
        alike = call.gathered().expected()[0]
        torch.testing.assert_close(alike, call.expected(rope=None), rtol=1e-5, atol=1e-5)


def test_generated_text_is_made_of_words(model) -> None:
    tokenizer = load_tokenizer(FOLDER)
    known = set((FOLDER / "held_out.txt").read_text(encoding="utf-8").split())
    prompt = tokenizer.encode("And it came to pass in those days, that")
    result = model.generate([prompt], max_new_tokens=60, temperature=0.6, seed=3)
    words = tokenizer.decode(result.tokens[0]).split()[:-1]
    share = mean([word in known for word in words])
    assert len(words) > 20 and share > 0.6, f"{share:.0%} of {words} are words of the held-out text"


@pytest.mark.slow
def test_metrics_are_reproduced_in_full(model) -> None:
    """All windows and exercises through the model, against the numbers quoted for it."""
    task = Task.of(FOLDER)
    losses, blind, right, right_blind = [], [], [], []
    for rows in task.windows.split(4):
        losses += window_losses(_logits(model, rows), rows)
        blind += window_losses(_logits(model, rows, blind=True), rows)
    for rows, answers in zip(task.exercises.split(4), task.answers.split(4)):
        right += recall(_logits(model, rows), rows, answers)
        right_blind += recall(_logits(model, rows, blind=True), rows, answers)
    assert task.unigram_loss() == pytest.approx(METRICS["unigram_loss"], abs=1e-6)
    assert mean(losses) == pytest.approx(METRICS["loss"], abs=0.005)
    assert mean(losses) < 0.55 * task.unigram_loss()
    assert math.exp(mean(losses) - METRICS["original_loss"]) < 1.03
    assert METRICS["original_loss"] == pytest.approx(mean(METRICS["original_losses"]), abs=1e-9)
    assert mean(blind) == pytest.approx(METRICS["loss_without_compressed"], abs=0.01)
    assert mean(blind) > mean(losses) + 0.02
    assert mean(right) == pytest.approx(METRICS["recall"], abs=0.05)
    assert mean(right) >= 0.8 and mean(right) > 5 * mean(right_blind)
    phases = [mean(right[phase::PHASES]) for phase in range(PHASES)]
    assert phases == pytest.approx([*METRICS["recall_by_phase"].values()], abs=0.1)
    assert min(phases) >= 0.8
