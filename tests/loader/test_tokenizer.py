"""The tokenizer of a checkpoint folder, and chat prompts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from dsv4.loader import CheckpointError
from dsv4.loader.tokenizer import Tokenizer, load_tokenizer

CHAT = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
]


def _tokenizer(folder: Path, special: list[str]) -> Tokenizer:
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet)
    raw.train_from_iterator(["hello world"] * 3, trainer)
    raw.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def test_text_round_trip(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path, CHAT)
    text = "hello wörld, 你好\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids) < tokenizer.vocab_size
    assert len(tokenizer.encode("hello")) == 1


def test_special_tokens_are_one_id_each_and_skipped_in_text(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path, CHAT)
    ids = tokenizer.encode(f"{CHAT[0]}hello{CHAT[1]}")
    assert (ids[0], ids[-1]) == (0, 1)
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{CHAT[0]}hello{CHAT[1]}"


@pytest.mark.parametrize("thinking, end", [(False, "</think>"), (True, "<think>")])
def test_chat_prompt(thinking: bool, end: str, tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path, CHAT)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say {}"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "Again"},
    ]
    assert tokenizer.chat_prompt(messages, thinking=thinking) == (
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Say {}<｜Assistant｜></think>hi"
        f"<｜end▁of▁sentence｜><｜User｜>Again<｜Assistant｜>{end}"
    )


def test_chat_prompt_needs_its_tokens_and_roles(tmp_path: Path) -> None:
    question = {"role": "user", "content": "?"}
    with pytest.raises(ValueError, match="no chat tokens"):
        _tokenizer(tmp_path, CHAT[:2]).chat_prompt([question])
    tokenizer = _tokenizer(tmp_path, CHAT)
    with pytest.raises(ValueError, match=r"role must be one of .* got 'tool'"):
        tokenizer.chat_prompt([{"role": "tool", "content": "x"}, question])
    for messages in ([], [question, {"role": "assistant", "content": "!"}]):
        with pytest.raises(ValueError, match="last message must have role 'user'"):
            tokenizer.chat_prompt(messages)


def test_a_stream_gives_the_text_of_all_tokens(tmp_path: Path, seed: int) -> None:
    """Bytes of broken characters included: what comes out is what decoding at once gives."""
    tokenizer = _tokenizer(tmp_path, CHAT)
    dice = random.Random(seed)
    ids = tokenizer.encode("hello wörld, 你好 🎉") + [dice.randrange(-2, 300) for _ in range(200)]
    ids += [10**12]  # no id of any tokenizer
    stream = tokenizer.stream()
    pieces = [stream.feed([token]) for token in ids] + [stream.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "你" in "".join(pieces) and "\N{REPLACEMENT CHARACTER}" not in "".join(pieces[:20])


def test_a_stream_does_not_decode_what_it_has_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = _tokenizer(tmp_path, CHAT)
    monkeypatch.setattr(Tokenizer, "decode", lambda *_: pytest.fail("decoded everything again"))
    stream = tokenizer.stream()
    assert (
        "".join(stream.feed([token]) for token in tokenizer.encode("hello " * 40)) == "hello " * 40
    )


@pytest.mark.parametrize(
    "text, error, message",
    [
        (b"bytes", TypeError, "text must be a str, got bytes"),
        (None, TypeError, "text must be a str, got NoneType"),
        ("\udcff", ValueError, "text is not valid Unicode"),
    ],
)
def test_text_that_is_none(text: object, error: type, message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        _tokenizer(tmp_path, CHAT).encode(text)


@pytest.mark.parametrize("ids", [3, [1.5], ["a"], None])
def test_ids_that_are_none(ids: object, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="ids must be a list of integers, got "):
        _tokenizer(tmp_path, CHAT).decode(ids)


@pytest.mark.parametrize(
    "message", [{"role": "user"}, {"role": "user", "content": 3}, "user", None]
)
def test_messages_that_are_none(message: object, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"messages\[0\] must have a role and a content, both str"):
        _tokenizer(tmp_path, CHAT).chat_prompt([message])


def test_a_vocabulary_that_cannot_express_the_text(tmp_path: Path) -> None:
    model = {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": []}))
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json cannot encode this text: "
    ) as caught:
        load_tokenizer(tmp_path).encode("b")
    assert "\n" not in str(caught.value)


def test_no_folder_is_said_as_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        load_tokenizer(tmp_path / "nope")


def test_missing_or_bad_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path)
