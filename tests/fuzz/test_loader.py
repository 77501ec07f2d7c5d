"""Mutated checkpoint folders: each loads and runs, or is refused by one `CheckpointError`."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dsv4
from dsv4.loader import CheckpointError, save
from dsv4.loader.tokenizer import load_tokenizer
from tests.fuzz.values import any_value, assert_one_line, mutated
from tests.loader.tiny import FORMATS, random_tensors

SECONDS = 20  # of one load and forward, on a machine that does other things too
TOKENIZER = Path(__file__).parents[2] / "checkpoints" / "tiny" / "tokenizer.json"


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("rounds", [90, pytest.param(6_000, marks=pytest.mark.slow)])
def test_every_damaged_folder_runs_or_is_refused(rounds: int, tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    sound = {}
    for name in ("released", "plain"):
        sound[name] = tmp_path / name
        save(sound[name], FORMATS[name], random_tensors(FORMATS[name], seed), shards=2)
    outcomes: Counter[tuple[str, str]] = Counter()
    folder = tmp_path / "damaged"
    number = ran = 0
    # On until a twentieth has run: else the damages are too heavy to say anything.
    while number < rounds or (ran <= rounds // 20 and number < 10 * rounds):
        damage = DAMAGES[number % len(DAMAGES)]
        number += 1
        shutil.copytree(sound[dice.choice(list(sound))], folder)
        damage(dice, folder)
        began = time.monotonic()
        outcome = _outcome(folder)
        assert time.monotonic() - began < SECONDS, damage.__name__
        outcomes[damage.__name__, outcome] += 1
        ran += outcome == "ran"
        shutil.rmtree(folder)
    assert outcomes.total() == number
    assert ran > rounds // 20, outcomes
    for damage in DAMAGES:
        assert outcomes[damage.__name__, "refused"], f"{damage.__name__} was never noticed"


def _outcome(folder: Path) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = dsv4.load(folder, dtype=torch.float32)
    except CheckpointError as error:
        assert_one_line(str(error))
        return "refused"
    model(torch.tensor([[1, 0, 2, 3, 1, 0]]), chunk=5)
    return "ran"


def _config(dice: random.Random, folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(mutated(dice, json.loads(file.read_text()))))


def _index(dice: random.Random, folder: Path) -> None:
    file = folder / "model.safetensors.index.json"
    data = json.loads(file.read_text())
    if dice.random() < 0.3:
        file.write_text(json.dumps(mutated(dice, data)))
        return
    name = dice.choice(list(data["weight_map"]))
    data["weight_map"][name] = any_value(dice)
    file.write_text(json.dumps(data))


def _header(dice: random.Random, folder: Path) -> None:
    """Change one entry of a header: its name, shape, dtype or place."""

    def change(header: dict[str, Any]) -> None:
        name = dice.choice([key for key in header if key != "__metadata__"])
        entry = header[name]
        action = dice.randrange(5)
        if action == 0:
            header[_foreign_name(dice, name)] = header.pop(name)
        elif action == 1:
            entry["shape"] = dice.choice(
                ([10**9, 0, 1], [], [*entry["shape"], 1], [-1], [2**62] * 2)
            )
        elif action == 2:
            entry["dtype"] = dice.choice(("F32", "U8", "BF16", "F4", "BOOL", "I64", "", 3))
        elif action == 3:
            entry["data_offsets"] = [dice.choice((0, -1, 2**63, 2**64)), dice.randrange(10**6)]
        else:
            end = max(e["data_offsets"][1] for k, e in header.items() if k != "__metadata__")
            empty = {"dtype": "BF16", "shape": [dice.choice((10**9, 3)), 0, 1]}
            header[_foreign_name(dice, name)] = empty | {"data_offsets": [end, end]}

    _edit_header(dice, folder, change)


def _edit_header(
    dice: random.Random, folder: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    file = dice.choice(sorted(folder.glob("*.safetensors")))
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def _foreign_name(dice: random.Random, name: str) -> str:
    return dice.choice(
        (
            name + "x",
            "model." + name,
            "a\nb\x1b[31m",
            "n" * 3000,
            "",
            f"layers.{dice.randrange(3)}.ffn.experts.down_proj",
            f"layers.{dice.randrange(10**6)}.ffn.experts.gate_up_proj",
            "mtp.0.embed.weight",
            "layers.١.attn.wq_a.weight",
        )
    )


def _bytes(dice: random.Random, folder: Path) -> None:
    """Flip some bytes near the beginning of a file, or anywhere."""
    file = dice.choice([path for path in sorted(folder.iterdir()) if path.is_file()])
    data = bytearray(file.read_bytes())
    reach = dice.choice((16, 400, len(data)))
    for _ in range(dice.choice((1, 3, 20))):
        data[dice.randrange(min(reach, len(data)))] = dice.randrange(256)
    file.write_bytes(data)


def _length(dice: random.Random, folder: Path) -> None:
    file = dice.choice([path for path in sorted(folder.iterdir()) if path.is_file()])
    data = file.read_bytes()
    size = dice.choice((0, 1, 7, 8, 9, len(data) // 2, len(data) - 1, len(data) + 5))
    file.write_bytes((data + b"\0" * 5)[:size])


def _place(dice: random.Random, folder: Path) -> None:
    """Put something else where a file was."""
    file = dice.choice(sorted(folder.iterdir()))
    file.unlink()
    kind = dice.randrange(5)
    if kind == 0:
        os.mkfifo(file)
    elif kind == 1:
        file.mkdir()
    elif kind == 2:
        file.symlink_to(file.name)  # to itself
    elif kind == 3:
        file.symlink_to("/dev/zero")


DAMAGES = [_config, _index, _header, _bytes, _length, _place]


@pytest.mark.parametrize("rounds", [60, pytest.param(3_000, marks=pytest.mark.slow)])
def test_every_damaged_tokenizer_works_or_is_refused(
    rounds: int, tmp_path: Path, seed: int
) -> None:
    dice, outcomes = random.Random(seed), Counter()
    data = json.loads(TOKENIZER.read_text())
    for _ in range(rounds):
        changed = dict(data)
        part = dice.choice(("", "model", "vocab", "vocab"))
        if part == "vocab":
            vocabulary = dict(data["model"]["vocab"])
            vocabulary[dice.choice(list(vocabulary))] = dice.choice((0, 7, 10**6, 2**32 - 1, -1))
            changed["model"] = data["model"] | {"vocab": vocabulary}
        elif part:
            changed[part] = mutated(dice, data[part])
        else:
            changed = mutated(dice, data)
        (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
        try:
            tokenizer = load_tokenizer(tmp_path)
            ids = tokenizer.encode("The king, 你好")
            stream = tokenizer.stream()
            stream.feed(ids)
            stream.finish()
            outcomes["worked"] += 1
        except CheckpointError as error:
            assert_one_line(str(error))
            outcomes["refused"] += 1
    assert outcomes["worked"] and outcomes["refused"]
    assert outcomes.total() == rounds
