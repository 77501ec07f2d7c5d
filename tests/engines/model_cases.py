"""Prompts for which vLLM's CPU build is asked, and what of its answers is kept."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.loader import save
from tests.engines.checkpoint import ENGINE, random_ids, random_tensors
from tests.engines.vllm_process import ask_model

# Within the window; past it; a step of several tiles; more entries than are selected.
PROMPTS = (37, 150, 600, 2600)
# Rows of prompts that are kept: all, or every so many.
EVERY = {37: 1, 150: 8, 600: 16, 2600: 32}
NEW = 24  # greedy tokens
BEST = 64  # candidates of a row


class Answer(NamedTuple):
    """What an engine said about a prompt and what it continued it with.

    Attributes:
        positions: [R], of the tokens before those that the rows predict.
        decoded: number of rows, the last ones, that decode steps made.
        best: [R, 64] ids of the likeliest tokens.
        logprobs: [R, 64] of them.
        tokens: [24], the continuation.
    """

    positions: Tensor
    decoded: int
    best: Tensor
    logprobs: Tensor
    tokens: Tensor


@cache
def tensors() -> dict[str, Tensor]:
    """Of the checkpoint that all prompts are asked with.

    Its compressed entries are larger than those of other random ones, its sinks heavier, and so is
    the attention paid to them: what is left out shows far above the noise of bfloat16.
    """
    found = random_tensors(ENGINE, 0, 0.6)
    for name in found:
        if name.endswith("attn.compressor.norm.weight"):
            found[name] = (1.5 * found[name].float()).to(found[name].dtype)
        elif name.endswith("attn_sink"):
            found[name] = found[name] + 1
    return found


def prompt(length: int) -> Tensor:
    return random_ids(ENGINE, length, length)


def ask(folder: Path, lengths: tuple[int, ...] = PROMPTS) -> dict[str, Tensor]:
    """The answers, flattened to "length/field"."""
    save(folder / "checkpoint", ENGINE, tensors())
    prompts = [prompt(length) for length in lengths]
    said = ask_model(folder / "checkpoint", prompts, NEW, folder)
    found: dict[str, Tensor] = {}
    for number, length in enumerate(lengths):
        rows = torch.cat((said[f"{number}/prompt"], said[f"{number}/new"]))
        # The last row of a prompt comes with the first new token.
        kept = [*range(0, length - 1, EVERY[length]), *range(length - 1, len(rows))]
        best = rows[kept].topk(BEST)
        found |= {
            f"{length}/positions": torch.tensor(kept),
            f"{length}/best": best.indices.to(torch.int16),
            f"{length}/logprobs": best.values,
            f"{length}/tokens": said[f"{number}/tokens"],
        }
    return found


def answer(found: dict[str, Tensor], length: int) -> Answer:
    """The answer to one prompt."""
    positions, best, logprobs, tokens = (
        found[f"{length}/{field}"] for field in ("positions", "best", "logprobs", "tokens")
    )
    return Answer(positions, NEW - 1, best.long(), logprobs, tokens)


def divergences(said: Answer, logits: Tensor) -> Tensor:
    """KL divergence of rows of our logits [S, vocab] from the answer, [R].

    Over 65 outcomes: its 64 likeliest tokens, and any other. That is at most the whole divergence,
    and as sharp beside one that is taken the same way.
    """
    rows = logits[said.positions].double().log_softmax(-1)
    ours = _with_rest(rows.gather(1, said.best))
    theirs = _with_rest(said.logprobs.double())
    return (theirs.exp() * (theirs - ours)).sum(-1)


def _with_rest(logprobs: Tensor) -> Tensor:
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=1e-9)
    return torch.cat((logprobs, rest.log()), -1)


def as_answer(said: Answer, logits: Tensor) -> Answer:
    """Our own logits about the same candidates, to compare others with."""
    rows = logits[said.positions].double().log_softmax(-1)
    return said._replace(logprobs=rows.gather(1, said.best))
