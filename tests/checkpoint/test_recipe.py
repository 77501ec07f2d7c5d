"""How the tiny checkpoint is made: text, exercises, one training step, the released layout."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from dsv4.config.model_config import ModelConfig
from dsv4.loader import load_tensors, save
from dsv4.reference.model import IndexTrace, ReferenceModel, RouteTrace, Traces
from scripts.tools import tiny_corpus, train_tiny
from scripts.tools.export_tiny import released_tensors
from scripts.tools.tiny_batches import Batches, RecallKind
from scripts.tools.tiny_model import TrainedModel
from scripts.tools.tiny_rounding import rounded

pytestmark = pytest.mark.stage("checkpoint")

FOLDER = Path(__file__).parents[2] / "checkpoints" / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_exercises_ask_for_what_they_stated(tokenizer: Tokenizer, seed: int) -> None:
    stream = np.array(tokenizer.encode((FOLDER / "held_out.txt").read_text()).ids)
    rows = tiny_corpus.exercise_rows(
        tokenizer, stream, 3, np.random.default_rng(seed), fillers=(150, 300), row=512
    )
    assert rows["ids"].shape == (3, 512) and rows["answers"].shape == (3, tiny_corpus.PAIRS)
    for ids, kinds, answers in zip(rows["ids"], rows["kinds"], rows["answers"]):
        stated = {ids[p - 1]: ids[p] for p in np.flatnonzero(kinds == 0)}
        assert {ids[p - 1]: ids[p] for p in answers} == stated
        assert set(answers) == set(np.flatnonzero(kinds == 1))
        assert len(stated) == len(set(stated.values())) == tiny_corpus.PAIRS
        assert answers.min() - np.flatnonzero(kinds == 0).max() > 150
        text = tokenizer.decode(ids[: answers.max() + 2].tolist(), skip_special_tokens=False)
        assert tokenizer.encode(text).ids == ids[: answers.max() + 2].tolist()


def test_verses_are_gathered_into_chapters_and_other_files_refused(tmp_path: Path) -> None:
    file = tmp_path / "text"
    verses = [f"1Ki{c}:{v} verse {v} of {c}." for c in range(1, 1001) for v in (1, 2)]
    file.write_text("\n".join(verses))
    chapters = tiny_corpus.read_chapters(file)
    assert len(chapters) == 1000 and chapters[4] == "verse 1 of 5.\nverse 2 of 5."
    train, held_out = tiny_corpus.split_chapters(chapters)
    assert len(train) + len(held_out) == 1000 and not set(train) & set(held_out)
    file.write_text("something else")
    with pytest.raises(ValueError, match="found 0"):
        tiny_corpus.read_chapters(file)


def make_batch(tokenizer: Tokenizer, seed: int, **options: float) -> Batches:
    """Eight short rows: four of text, four of recall."""
    writer = tiny_corpus.ExerciseWriter(tokenizer, np.random.default_rng(seed))
    stream = tokenizer.encode((FOLDER / "held_out.txt").read_text()).ids
    kinds = (
        RecallKind(share=0.25, pairs=4, rounds=3, gap=(0, 20)),
        RecallKind(share=0.25, pairs=5, rounds=1, gap=(60, 100)),
    )
    data = {"train": torch.tensor(stream), **tiny_corpus.exercise_tokens(writer)}
    size = {"batch": 8, "length": 160}
    cpu = torch.device("cpu")
    made = Batches(data, kinds, **size, form_weight=0.25, device=cpu, **options)
    made.draw(seed)
    return made


@pytest.fixture
def batch(tokenizer: Tokenizer, seed: int) -> Batches:
    """Rows whose statements all begin at one place."""
    return make_batch(tokenizer, seed)


def trainable() -> dict[str, Tensor]:
    tensors = train_tiny.initial_tensors(train_tiny.CONFIG, torch.device("cpu"))
    for name, tensor in tensors.items():
        tensor.requires_grad_(not name.endswith(("tid2eid", "gate.bias")))
    return tensors


def stored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return rounded(tensors, train_tiny.master_specs(train_tiny.CONFIG))


def model_of(config: ModelConfig, length: int) -> TrainedModel:
    return TrainedModel(config, length=length, device=torch.device("cpu"))


def test_recall_rows_ask_for_what_they_stated(tokenizer: Tokenizer, batch: Batches) -> None:
    assert batch.is_text.tolist() == [True] * 4 + [False] * 4
    assert not batch.asks[:4].any() and (batch.weights[:4] == 1).all()
    for row, ids in enumerate(batch.ids[4:], 4):
        pairs, rounds = (4, 3) if row < 6 else (5, 1)
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        assert text.startswith(tiny_corpus.BOS + "Remember:") and text.count("Recall:") == rounds
        start = len(batch.opening)
        stated = ids[start : start + 4 * pairs].view(pairs, 4)
        goods = dict(zip(stated[:, 1].tolist(), stated[:, 2].tolist()))
        assert len(set(goods.values())) == len(goods) == pairs
        answers = (batch.asks[row].nonzero().flatten() + 1).tolist()
        assert len(answers) == pairs * rounds
        for i in range(rounds):
            asked = answers[i * pairs : (i + 1) * pairs]
            assert {ids[p - 1].item(): ids[p].item() for p in asked} == goods
        if row >= 6:
            assert 60 <= min(answers) - (start + 4 * pairs) <= 100 + len(batch.recall) + 3
        assert (batch.weights[row, 1:][batch.asks[row]] == batch.answer_weight).all()
        assert (batch.weights[row] > 0).sum() == 4 * pairs * rounds


@pytest.mark.parametrize("bare", [0.0, 1.0])
def test_recall_rows_state_at_every_phase(tokenizer: Tokenizer, seed: int, bare: float) -> None:
    batch = make_batch(tokenizer, seed, lead=15, bare=bare)
    assert torch.equal(batch.ids, make_batch(tokenizer, seed, lead=15, bare=bare).ids)
    starts = []
    for draw in range(40):
        batch.draw(draw)
        for row in (4, 7):
            ids, pairs = batch.ids[row], (4, 5)[row == 7]
            asked = ids[batch.asks[row].nonzero().flatten() + 1].tolist()
            (start,) = (
                s
                for s in range(len(batch.opening), len(batch.opening) + 16)
                if set(ids[s : s + 4 * pairs][::4].tolist()) == {batch.unto}
                and set(ids[s + 2 : s + 4 * pairs : 4].tolist()) == set(asked)
            )
            starts.append(start - len(batch.opening))
            opens = torch.equal(ids[start - len(batch.opening) : start], batch.opening)
            assert opens == (bare == 0)
            assert ids[start + 4 * pairs] == batch.newline
    assert set(starts) <= set(range(16)) and {start % 4 for start in starts} == {0, 1, 2, 3}


def test_stages_follow_each_other() -> None:
    ends = [0]
    for stage in train_tiny.STAGES:
        assert stage.first == ends[-1] <= stage.sparse_from < stage.last <= stage.decay[1]
        assert train_tiny.stage_of(stage.first) is train_tiny.stage_of(stage.last - 1) is stage
        rates = [train_tiny.learning_rate(stage, s, 10**6) for s in range(stage.first, stage.last)]
        assert rates[0] == stage.peak_rate and rates == sorted(rates, reverse=True)
        ends.append(stage.last)
    assert rates[-1] < 1e-3 * stage.peak_rate, "the last stage ends at no rate"
    assert train_tiny.stage_of(ends[-1]) is None


def test_a_later_stage_begins_with_what_would_be_stored() -> None:
    tensors = trainable()
    expected = {name: tensor.detach().clone() for name, tensor in stored(tensors).items()}
    train_tiny.store(tensors)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    train_tiny.store(tensors)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def test_text_and_answers_weigh_the_same_and_a_seed_repeats_a_batch(batch: Batches) -> None:
    answers = batch.weights[:, 1:][batch.asks].sum()
    assert answers.item() == pytest.approx(batch.crops * (batch.ids.shape[1] - 1))
    batch.draw(5)
    first = batch.ids.clone()
    batch.draw(6)
    assert not torch.equal(batch.ids, first)
    batch.draw(5)
    assert torch.equal(batch.ids, first)


def reference_losses(model: ReferenceModel, ids: Tensor) -> tuple[Tensor, Tensor, Traces]:
    """Losses of the next token and of the one after, and what the layers traced."""
    traces: Traces = []
    output = model.forward(ids, traces=traces)
    main, drafts = (
        cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, shift:], reduction="none")
        for logits, shift in ((output.logits, 1), (output.mtp_logits[0], 2))
    )
    return main, drafts, traces


@pytest.mark.parametrize("length", [128, 300], ids=["one-window", "windows-and-rest"])
def test_the_trained_model_is_the_reference(length: int, seed: int) -> None:
    tensors = train_tiny.initial_tensors(train_tiny.CONFIG, torch.device("cpu"))
    ids = torch.randint(0, 1024, (2, length + 1))
    config = dataclasses.replace(train_tiny.PLAIN, index_topk=512)
    for name in ("layers.1.attn.attn_sink", "layers.3.ffn.gate.bias"):
        tensors[name].normal_()
    with torch.no_grad():
        out = model_of(config, length).forward(tensors, ids, torch.zeros(2), torch.tensor(False))
        main, drafts, traces = reference_losses(ReferenceModel(config, tensors), ids)
    torch.testing.assert_close(out.main, main, rtol=0, atol=2e-5)
    torch.testing.assert_close(out.drafts, drafts, rtol=0, atol=2e-5)
    indexers = [trace for trace in traces if isinstance(trace, IndexTrace)]
    assert len(out.indexed) == len(indexers) == 2
    for ours, theirs in zip(out.indexed, indexers):
        torch.testing.assert_close(ours.scores, theirs.scores[:, :length], rtol=0, atol=2e-4)
        there = torch.where(ours.visible, theirs.attention[:, :length], 0.0)
        here = torch.where(ours.visible, ours.attention, 0.0)
        torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-5)
    for trace in traces:
        if isinstance(trace, RouteTrace) and trace.prefix == "layers.1.ffn.":
            load = one_hot(trace.ids[:, :length], 8).sum((0, 1, 2)).float()
            assert torch.equal(out.loads[trace.prefix], load)


def test_roundings_and_the_choice_of_entries_are_the_reference_s(seed: int) -> None:
    """Rounding turns noise into steps that later tokens inherit: the first tokens are compared."""
    config = dataclasses.replace(train_tiny.CONFIG, index_topk=3)
    tensors = stored(train_tiny.initial_tensors(config, torch.device("cpu")))
    ids = torch.randint(0, 1024, (16, 133))
    with torch.no_grad():
        out = model_of(config, 132).forward(tensors, ids, torch.zeros(16), torch.tensor(True))
        main, _, traces = reference_losses(ReferenceModel(config, tensors), ids)
    error = (out.main - main).abs()
    assert (error[:, :12] < 1e-4).float().mean() > 0.8
    assert error.median() < 0.02
    (first, *_) = (trace for trace in traces if isinstance(trace, IndexTrace))
    close = (out.indexed[0].scores - first.scores[:, :132]).abs() < 1e-4
    assert close.float().mean() > 0.9


def test_a_step_lowers_the_loss_and_moves_biases_against_the_load(batch: Batches) -> None:
    tensors = trainable()
    model, dense = model_of(train_tiny.CONFIG, 160), torch.tensor(False)

    def loss() -> tuple[train_tiny.Losses, dict[str, Tensor]]:
        return train_tiny.training_loss(model, stored(tensors), batch, dense, 0.1)

    losses, loads = loss()
    for part in (losses.text, losses.answers):
        assert part.item() == pytest.approx(math.log(1024), abs=0.5), "a new model knows nothing"
    losses.total.backward()
    train_tiny.balance_experts(tensors, loads)
    biases = [tensors[n] for n in tensors if n.endswith("gate.bias")]
    assert len(biases) == 4 and all(0 < b.abs().max() <= train_tiny.BIAS_STEP for b in biases)
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.requires_grad:
                assert tensor.grad is not None and tensor.grad.any(), name
                tensor -= 0.02 * tensor.grad
    assert loss()[0].total < losses.total


def test_what_is_trained_is_what_will_be_stored(tmp_path: Path, seed: int) -> None:
    """The weights that training rounds to are those of the exported checkpoint, to the bit."""
    config, tensors = train_tiny.CONFIG, trainable()
    save(tmp_path, config, released_tensors(tensors, config))
    checkpoint = ReferenceModel(*load_tensors(tmp_path))
    for name, tensor in stored(tensors).items():
        if ".experts." in name:
            prefix, matrix, _ = name.rsplit(".", 2)
            there = torch.stack([checkpoint.weight(f"{prefix}.{e}.{matrix}") for e in range(8)])
        elif name.endswith(".weight"):
            there = checkpoint.weight(name.removesuffix(".weight"))
        else:
            there = checkpoint.tensors[name]
        assert torch.equal(tensor, there), name


def test_dropout_spares_recall_rows(batch: Batches) -> None:
    tensors, model = stored(trainable()), model_of(train_tiny.PLAIN, 160)
    dense = torch.tensor(False)
    with torch.no_grad():
        plain = model.forward(tensors, batch.ids, torch.zeros(8), dense).main
        dropped = model.forward(tensors, batch.ids, 0.5 * batch.is_text, dense).main
    torch.testing.assert_close(plain[4:], dropped[4:])
    assert ((plain[:4] - dropped[:4]).abs() > 1e-3).float().mean() > 0.9


def test_training_goes_on_where_a_piece_stopped(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    first, tensors = train_tiny.start(tmp_path, cpu, seed=3)
    assert first == 0
    train_tiny.save_state(tmp_path, tensors, 70)
    assert (tmp_path / "state.pt").stat().st_size < 11e6
    first, again = train_tiny.start(tmp_path, cpu, seed=4)
    assert first == 70 and again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype
        assert again[name].requires_grad == tensor.requires_grad
        torch.testing.assert_close(again[name], tensor, rtol=2**-8, atol=0)


def test_what_is_written_is_the_nearest_value_of_each_format(tmp_path: Path, seed: int) -> None:
    tensors = train_tiny.initial_tensors(train_tiny.CONFIG, torch.device("cpu"))
    save(tmp_path, train_tiny.CONFIG, released_tensors(tensors, train_tiny.CONFIG))
    config, written = load_tensors(tmp_path)
    assert config == train_tiny.CONFIG
    model = ReferenceModel(config, written)
    for name, bound in (("layers.1.attn.wq_b", 2**-4), ("layers.2.ffn.shared_experts.w2", 2**-4)):
        original = tensors[f"{name}.weight"]
        assert (model.weight(name) - original).norm() < bound * original.norm()
    expert = tensors["mtp.0.ffn.experts.w3.weight"][5]
    decoded = model.weight("mtp.0.ffn.experts.5.w3")
    assert 0.01 < (decoded - expert).norm() / expert.norm() < 0.2
    assert torch.equal(written["layers.0.ffn.gate.tid2eid"], tensors["layers.0.ffn.gate.tid2eid"])
