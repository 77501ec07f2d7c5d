"""How the tiny checkpoint is made: text, exercises, one training step, the released layout."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from dsv4.loader import load_tensors, save
from dsv4.reference.model import ReferenceModel
from scripts.tools import tiny_corpus, train_tiny
from scripts.tools.export_tiny import released_tensors

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
        stated = {ids[p - 2]: ids[p] for p in np.flatnonzero(kinds == 0)}
        assert {ids[p - 2]: ids[p] for p in answers} == stated
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


def test_a_step_lowers_the_loss_and_moves_biases_against_the_load(seed: int) -> None:
    tensors = train_tiny.initial_tensors(train_tiny.CONFIG, torch.device("cpu"))
    for name, tensor in tensors.items():
        tensor.requires_grad_(not name.endswith(("tid2eid", "gate.bias")))
    ids, weights = torch.randint(0, 1024, (2, 41)), torch.ones(2, 41)
    model = ReferenceModel(train_tiny.PLAIN, tensors)
    loss, main, traces = train_tiny.training_loss(model, ids, weights)
    assert main.item() == pytest.approx(math.log(1024), abs=0.3), "a new model knows nothing"
    loss.backward()
    train_tiny.balance_experts(tensors, traces)
    biases = [tensors[n] for n in tensors if n.endswith("gate.bias")]
    assert len(biases) == 4 and all(0 < b.abs().max() <= train_tiny.BIAS_STEP for b in biases)
    with torch.no_grad():
        for tensor in tensors.values():
            if tensor.grad is not None:
                tensor -= 0.05 * tensor.grad
        again, _, _ = train_tiny.training_loss(model, ids, weights)
    assert again < loss


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
