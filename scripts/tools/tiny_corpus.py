"""Text, tokenizer and recall exercises of the tiny checkpoint.

The text is the King James Version of the Bible (1611, public domain), as the Debian packages
`bible-kjv` and `bible-kjv-text` print it:

    bible -f gen1:1-rev22:21 > build/corpus/kjv.txt

Mixed with it are recall exercises: a list of statements, filler text, and the statements again in
another order. Once the filler is longer than the sliding window, the second half of a repeated
statement can only come through the compressed entries.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
VOCAB_SIZE = 1024
HELD_OUT_EVERY = 80

# fmt: off
NAMES = (
    "Abraham", "Isaac", "Jacob", "Joseph", "Moses", "Aaron", "Joshua", "Samuel",
    "Saul", "David", "Solomon", "Daniel", "Esther", "Ruth", "Noah", "Adam",
    "Mary", "Peter", "Paul", "John", "James", "Israel", "Judah", "Benjamin",
)
GOODS = (
    "gold", "silver", "bread", "wine", "oil", "water", "fire", "stone",
    "wood", "blood", "sword", "corn", "salt", "milk", "honey", "iron",
    "brass", "linen", "sheep", "oxen", "flour", "fish", "camels", "wheat",
)
# fmt: on
PAIRS = 8


def read_chapters(path: Path) -> list[str]:
    """Chapters of the text, one verse a line, verse numbers removed.

    Raises:
        ValueError: the file does not look like the output of `bible -f`.
    """
    chapters: dict[str, list[str]] = {}
    for line in path.read_text(encoding="latin-1").splitlines():
        match = re.match(r"^(\d?[A-Za-z]+\d+):\d+ (.+)$", line)
        if match:
            chapters.setdefault(match[1], []).append(match[2].strip())
    if len(chapters) < 1000:
        raise ValueError(f"{path}: expected 1189 chapters of `bible -f`, found {len(chapters)}")
    return ["\n".join(verses) for verses in chapters.values()]


def split_chapters(chapters: Sequence[str]) -> tuple[list[str], list[str]]:
    """Training chapters and held-out chapters."""
    held_out = set(range(HELD_OUT_EVERY // 2, len(chapters), HELD_OUT_EVERY))
    train = [c for i, c in enumerate(chapters) if i not in held_out]
    return train, [chapters[i] for i in sorted(held_out)]


def train_tokenizer(chapters: Sequence[str]) -> Tokenizer:
    """Byte-level BPE in which every name and every good is one token after a space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = " " + " ".join((*NAMES, *GOODS))
    tokenizer.train_from_iterator([*chapters, *[words] * 1000], trainer)
    for word in (*NAMES, *GOODS):
        if len(tokenizer.encode(" " + word).ids) != 1:
            raise ValueError(f"{word!r} did not become one token; repeat it more often")
    return tokenizer


def encode_chapters(tokenizer: Tokenizer, chapters: Sequence[str]) -> np.ndarray:
    """One int16 stream: beginning of sentence, chapter, end of sentence, and so on."""
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    rows = [[bos, *tokenizer.encode(text).ids, eos] for text in chapters]
    return np.array([i for row in rows for i in row], dtype=np.int16)


@dataclass(frozen=True)
class Exercise:
    """A recall exercise.

    Attributes:
        ids: token ids.
        stated: positions of the goods in the first list; nobody can predict those.
        answers: positions of the goods in the lists after the filler.
    """

    ids: list[int]
    stated: list[int]
    answers: list[int]


class ExerciseWriter:
    """Writes `Remember: unto David bread; unto Ruth gold; ...`, filler, `Recall: ...` reordered."""

    def __init__(self, tokenizer: Tokenizer, rng: np.random.Generator) -> None:
        self.rng = rng
        encode = lambda text: tokenizer.encode(text).ids
        self.opening, self.recall = encode(BOS + "Remember:"), encode("\nRecall:")
        self.newline, self.unto, self.end = encode("\n"), encode(" unto"), encode(";")
        self.names = [encode(" " + word) for word in NAMES]
        self.goods = [encode(" " + word) for word in GOODS]

    def write(self, names: Sequence[int], filler: Sequence[int], rounds: int = 1) -> Exercise:
        """An exercise about so many `names` (indices into NAMES), asked `rounds` times over."""
        goods = self.rng.choice(len(GOODS), len(names), replace=False)
        ids = list(self.opening)

        def state(order: np.ndarray) -> list[int]:
            places = []
            for i in order:
                ids.extend((*self.unto, *self.names[names[i]], *self.goods[goods[i]], *self.end))
                places.append(len(ids) - 2)
            return places

        stated, answers = state(np.arange(len(names))), []
        ids += [*self.newline, *filler]
        for _ in range(rounds):
            ids += self.recall
            answers += state(self.rng.permutation(len(names)))
        return Exercise(ids, stated, answers)


def exercise_tokens(writer: ExerciseWriter) -> dict[str, Tensor]:
    """Parts of an exercise: opening, recall [n]; names, goods [24]; unto, end, newline [1]."""
    parts = {
        "opening": writer.opening,
        "recall": writer.recall,
        "names": [token for (token,) in writer.names],
        "goods": [token for (token,) in writer.goods],
        "unto": writer.unto,
        "end": writer.end,
        "newline": writer.newline,
    }
    return {name: torch.tensor(tokens) for name, tokens in parts.items()}


def exercise_rows(
    tokenizer: Tokenizer,
    stream: np.ndarray,
    count: int,
    rng: np.random.Generator,
    *,
    fillers: tuple[int, int],
    row: int,
    exercises: int = 1,
    rounds: int = 1,
) -> dict[str, np.ndarray]:
    """Rows of equal length, each of so many exercises about different names, filled up with text.

    Args:
        stream: tokens that fillers are cut from.
        fillers: least and largest length of a filler.
        row: tokens a row.

    Returns:
        ids [count, row] int16; kinds [count, row] uint8, 0 = stated goods, 1 = answers, 2 = the
        rest; answers [count, exercises * rounds * PAIRS] int64, positions of the answers.
    """
    writer = ExerciseWriter(tokenizer, rng)
    ids = np.zeros((count, row), dtype=np.int16)
    kinds = np.full((count, row), 2, dtype=np.uint8)
    answers = np.zeros((count, exercises * rounds * PAIRS), dtype=np.int64)
    for i in range(count):
        tokens: list[int] = []
        places: list[int] = []
        names = rng.permutation(len(NAMES)).reshape(-1, PAIRS)
        for about in names[:exercises]:
            length = int(rng.integers(*fillers, endpoint=True))
            start = int(rng.integers(0, len(stream) - length, endpoint=True))
            exercise = writer.write(about, stream[start : start + length].tolist(), rounds)
            kinds[i, [len(tokens) + p for p in exercise.stated]] = 0
            places += [len(tokens) + p for p in exercise.answers]
            tokens += exercise.ids
        start = int(rng.integers(0, len(stream) - row))
        ids[i] = [*tokens, *stream[start : start + row - len(tokens)]]
        kinds[i, places] = 1
        answers[i] = places
    return {"ids": ids, "kinds": kinds, "answers": answers}
