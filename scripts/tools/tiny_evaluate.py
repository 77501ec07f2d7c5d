"""What the tiny checkpoint is judged by: `python -m scripts.tools.tiny_evaluate` measures it again.

Loss on the held-out text that ships with the checkpoint; recall: exercises whose filler is longer
than the sliding window, made from that text with a fixed seed (`tiny_corpus`), at every phase of a
compressor's blocks; drafts of the MTP block, as predictions of the text and as accepted in
generation. The reference model rounds key-value vectors as an FP8 cache does; the package's model
is measured over such a cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy

import dsv4
from dsv4.loader import load_tensors
from dsv4.reference.model import ReferenceModel
from scripts.tools import tiny_corpus

LENGTH = 512
FILLERS = (160, 420)
EXERCISES = 32
SEED = 4
#: Bands of filler length that recall is reported for.
BANDS = (160, 240, 330, 421)
#: Places of a statement against a block of four tokens, which CSA layers compress.
PHASES = 4
#: Prompts of the generation that counts accepted drafts: their number, length and continuation.
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 64, 48
#: Formats of the cache that the package's model is measured over.
CACHES = {
    "cache of bf16 rows": ("bf16", False),
    "cache of FP8 entries": ("fp8", False),
    "of FP8, uniform scales": ("fp8", True),
}


@dataclass(frozen=True)
class Scores:
    """What one model scored.

    Attributes:
        losses: mean loss of each window of held-out text, nats a token.
        recalled: for each exercise the share of its answers that are the likeliest token.
        drafts: share of tokens for which the MTP block's likeliest token is the main model's.
    """

    losses: list[float]
    recalled: list[float]
    drafts: float


@dataclass(frozen=True)
class Task:
    """The held-out windows and exercises of a checkpoint folder.

    Attributes:
        windows: [W, 512] int64, consecutive pieces of the held-out text.
        exercises: [E, 512] int64, of each phase in turn; answers: [E, 8] int64, their positions.
        fillers: tokens of text between the statements and the questions of each exercise.
    """

    windows: Tensor
    exercises: Tensor
    answers: Tensor
    fillers: list[int]

    @classmethod
    def of(cls, folder: Path, windows: int | None = None, exercises: int | None = None) -> Task:
        """Read the folder's tokenizer and held-out text; by default all windows and exercises."""
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        stream = held_out_tokens(folder, tokenizer)
        rows = torch.from_numpy(stream[: stream.size // LENGTH * LENGTH]).view(-1, LENGTH)
        made = tiny_corpus.exercise_rows(
            tokenizer,
            stream,
            EXERCISES,
            np.random.default_rng(SEED),
            fillers=FILLERS,
            row=LENGTH,
        )
        ids, answers = torch.from_numpy(made["ids"]).long(), torch.from_numpy(made["answers"])
        # An exercise is its opening, statements of four tokens, a newline, filler, questions.
        shortest = tiny_corpus.ExerciseWriter(tokenizer, np.random.default_rng(0))
        around = len(shortest.opening) + 4 * tiny_corpus.PAIRS + 1 + len(shortest.recall) + 2
        fillers = (answers.amin(1) - around)[:exercises].tolist()
        ids, answers = in_phases(ids, answers)
        return cls(rows[:windows], ids[:exercises], answers[:exercises], fillers)

    def unigram_loss(self) -> float:
        """Entropy of the windows' own token frequencies: no unigram model can do better on them."""
        counts = Counter(self.windows.flatten().tolist())
        total = self.windows.numel()
        return -sum(n / total * math.log(n / total) for n in counts.values())

    @torch.no_grad()
    def measure(self, model: ReferenceModel) -> Scores:
        """Score a reference model, a few rows at a time."""
        losses: list[float] = []
        agreed = total = 0
        for rows in self.windows.split(4):
            output = model.forward(rows)
            losses += window_losses(output.logits, rows)
            best, drafts = output.logits.argmax(-1), output.mtp_logits[0].argmax(-1)
            agreed += int((drafts == best[:, 1:]).sum())
            total += drafts.numel()
        recalled = [
            share
            for rows, answers in zip(self.exercises.split(4), self.answers.split(4))
            for share in recall(model.forward(rows).logits, rows, answers)
        ]
        return Scores(losses, recalled, agreed / total if total else math.nan)

    @torch.no_grad()
    def measure_cached(self, folder: Path, kv_format: str, uniform_scale: bool = False) -> Scores:
        """Score the package's model in bfloat16 over a cache of a format; without drafts."""
        model = dsv4.load(
            str(folder), device="cpu", kv_format=kv_format, uniform_scale=uniform_scale
        )
        losses = [x for rows in self.windows.split(4) for x in window_losses(model(rows), rows)]
        recalled = [
            share
            for rows, answers in zip(self.exercises.split(4), self.answers.split(4))
            for share in recall(model(rows), rows, answers)
        ]
        return Scores(losses, recalled, math.nan)


def in_phases(ids: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [E, row] and answers [E, A] of exercises, moved by 0, 1, 2, 3, 0, ... tokens.

    The text at the end of a row comes to its beginning. Compressors pool blocks of four tokens, or
    of a multiple.
    """
    moved = torch.arange(len(ids)) % PHASES
    rows = [row.roll(by) for row, by in zip(ids, moved.tolist())]
    return torch.stack(rows), answers + moved[:, None]


def held_out_tokens(folder: Path, tokenizer: Tokenizer) -> np.ndarray:
    """Tokens of the folder's held-out text."""
    return np.array(tokenizer.encode((folder / "held_out.txt").read_text(encoding="utf-8")).ids)


def window_losses(logits: Tensor, rows: Tensor) -> list[float]:
    """Mean next-token loss of each row: logits [B, S, vocab], rows [B, S]."""
    each = cross_entropy(logits[:, :-1].transpose(1, 2), rows[:, 1:], reduction="none")
    return each.mean(1).tolist()


def recall(logits: Tensor, rows: Tensor, answers: Tensor) -> list[float]:
    """Share of right answers of each row: logits [B, S, vocab], rows [B, S], answers [B, A]."""
    guesses = logits.argmax(-1).gather(1, answers - 1)
    return (guesses == rows.gather(1, answers)).float().mean(1).tolist()


@torch.no_grad()
def acceptance(folder: Path, windows: Tensor) -> float:
    """Share of MTP drafts that greedy generation from the heads of held-out windows accepts."""
    model = dsv4.load(str(folder), device="cpu", dtype=torch.float32)
    prompts = windows[:PROMPTS, :PROMPT_TOKENS].tolist()
    stats = model.generate(prompts, max_new_tokens=NEW_TOKENS, num_draft_tokens=1).stats
    return stats.drafts_accepted / stats.drafts_proposed


def by_filler(task: Task, recalled: list[float]) -> dict[str, float]:
    """Share of recalled answers in bands of filler length, "160-239": 0.9 and so on."""
    bands: dict[str, list[float]] = {}
    for low, high in itertools.pairwise(BANDS):
        inside = [share for share, n in zip(recalled, task.fillers) if low <= n < high]
        if inside:
            bands[f"{low}-{high - 1}"] = inside
    return {name: mean(shares) for name, shares in bands.items()}


def summary(
    task: Task, *, original: Scores, rounded: Scores, blind: Scores, accepted: float
) -> dict[str, Any]:
    """The contents of `metrics.json`: means, and the parts they are means of.

    Args:
        original: the FP32 weights; rounded: the checkpoint, quantisation simulated; blind: the
            checkpoint with every compressed branch off; accepted: see `acceptance`.
    """
    return {
        "unigram_loss": task.unigram_loss(),
        "original_loss": mean(original.losses),
        "loss": mean(rounded.losses),
        "loss_without_compressed": mean(blind.losses),
        "perplexity_ratio": math.exp(mean(rounded.losses) - mean(original.losses)),
        "original_recall": mean(original.recalled),
        "recall": mean(rounded.recalled),
        "recall_without_compressed": mean(blind.recalled),
        "recall_by_filler": by_filler(task, rounded.recalled),
        "recall_by_phase": {
            str(phase): mean(rounded.recalled[phase::PHASES]) for phase in range(PHASES)
        },
        "draft_agreement": rounded.drafts,
        "draft_acceptance": accepted,
        "original_losses": original.losses,
        "losses": rounded.losses,
        "losses_without_compressed": blind.losses,
    }


def mean(values: list[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


def main() -> None:
    """Measure a checkpoint and print the result beside its `metrics.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("checkpoints/tiny"))
    parser.add_argument("--windows", type=int, default=None, help="only so many windows of text")
    parser.add_argument("--exercises", type=int, default=None, help="only so many exercises")
    args = parser.parse_args()
    task = Task.of(args.folder, args.windows, args.exercises)
    config, tensors = load_tensors(args.folder)
    full = task.measure(ReferenceModel(config, tensors))
    blind = task.measure(ReferenceModel(config, tensors, compressed_branch=False))
    recorded = json.loads((args.folder / "metrics.json").read_text(encoding="utf-8"))
    losses = recorded["original_losses"][: len(task.windows)]
    original = Scores(losses, [recorded["original_recall"]], math.nan)
    accepted = acceptance(args.folder, task.windows)
    measured = summary(task, original=original, rounded=full, blind=blind, accepted=accepted)
    for name, value in measured.items():
        if isinstance(value, float):
            print(f"{name:28} {value:8.4f}   recorded {recorded[name]:8.4f}")
    for by in ("filler", "phase"):
        for part, value in measured[f"recall_by_{by}"].items():
            there = recorded[f"recall_by_{by}"][part]
            print(f"recall, {by} {part:13} {value:8.4f}   recorded {there:8.4f}")
    for name, cache in CACHES.items():
        scores = task.measure_cached(args.folder, *cache)
        print(f"{name:28} loss {mean(scores.losses):.4f}, recall {mean(scores.recalled):.4f}")


if __name__ == "__main__":
    main()
