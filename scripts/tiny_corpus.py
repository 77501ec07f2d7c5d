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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
VOCAB_SIZE = 1024
HELD_OUT_EVERY = 80

NAMES = (
    "Abraham Isaac Jacob Joseph Moses Aaron Joshua Samuel Saul David Solomon Daniel "
    "Esther Ruth Noah Adam Mary Peter Paul John James Israel Judah Benjamin"
).split()
GOODS = (
    "gold silver bread wine oil water fire stone wood blood sword corn "
    "salt milk honey iron brass linen sheep oxen flour fish camels wheat"
).split()
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
    words = " " + " ".join(NAMES + GOODS)
    tokenizer.train_from_iterator([*chapters, *[words] * 1000], trainer)
    for word in NAMES + GOODS:
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
        answers: positions of the goods in the second list.
    """

    ids: list[int]
    stated: list[int]
    answers: list[int]


def make_exercise(
    tokenizer: Tokenizer, filler: Sequence[int], rng: np.random.Generator
) -> Exercise:
    """`Remember: David hath bread; ...`, the filler tokens, `Recall: ...` in another order."""
    names = rng.choice(NAMES, PAIRS, replace=False)
    goods = rng.choice(GOODS, PAIRS, replace=False)
    ids = tokenizer.encode(BOS + "Remember:").ids

    def state(order: np.ndarray) -> list[int]:
        places = []
        for i in order:
            ids.extend(tokenizer.encode(f" {names[i]} hath {goods[i]};").ids)
            places.append(len(ids) - 2)
        return places

    stated = state(np.arange(PAIRS))
    ids += [*tokenizer.encode("\n").ids, *filler, *tokenizer.encode("\nRecall:").ids]
    return Exercise(ids, stated, state(rng.permutation(PAIRS)))


def exercises(
    tokenizer: Tokenizer,
    stream: np.ndarray,
    count: int,
    rng: np.random.Generator,
    lengths: tuple[int, int],
) -> Iterator[Exercise]:
    """Exercises whose filler is cut from a token stream, of a random length within `lengths`."""
    for _ in range(count):
        length = int(rng.integers(*lengths, endpoint=True))
        start = int(rng.integers(0, len(stream) - length, endpoint=True))
        yield make_exercise(tokenizer, stream[start : start + length].tolist(), rng)
