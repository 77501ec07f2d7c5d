"""Hostile values of every option of every command: each is refused in one printable line."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dsv4.cli.main import build_parser, main
from dsv4.quoting import LINE
from tests.fuzz.values import assert_one_line

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="values that a benchmark takes would be measured"
)
TINY = str(Path(__file__).resolve().parents[2] / "checkpoints" / "tiny")
TEXTS = ("", "x" * 10_000, "\x1b[31m\n" * 3000, "[/]\udcff", "/nope\x1b[31m\nx/" + "y" * 5000)
# What makes each command fail after its arguments are read, before it works for minutes.
FAILING = {
    "demo": {"--max-new-tokens": "0"},
    "generate": {"--checkpoint": TINY, "--prompt": "x", "--max-new-tokens": "0"},
    "compile": {"--arch": "sm_90a", "--jobs": "0"},
    "sage": {"--case": "b0_full_seq1_d64"},
    "sim run": {"script": "/nope"},
    "sim ptx": {"file": "/nope"},
}
SIMULATED = {"--tokens": "0"}


def _commands(
    parser: argparse.ArgumentParser, name: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command without subcommands, by its words."""
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    for action in below:
        for word, child in action.choices.items():
            yield from _commands(child, f"{name} {word}".strip())
    if not below:
        yield name, parser


COMMANDS = dict(_commands(build_parser()))


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Options and arguments that take a value."""
    for action in parser._actions:
        if action.nargs != 0 and action.nargs != argparse.REMAINDER:
            yield action.option_strings[-1] if action.option_strings else action.dest


def _failing(command: str) -> dict[str, str]:
    chosen = FAILING.get(command, {})
    options = set(_options(COMMANDS[command]))
    return chosen or {name: value for name, value in SIMULATED.items() if name in options}


@pytest.fixture(autouse=True)
def one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making the parser takes longer than what is tried with it."""
    monkeypatch.setattr(sys.modules["dsv4.cli.main"], "build_parser", _parser)


_parser = functools.cache(build_parser)


@pytest.mark.parametrize("command", COMMANDS)
def test_values_are_refused_in_one_line(command: str, capsys: pytest.CaptureFixture) -> None:
    tried = 0
    for option in _options(COMMANDS[command]):
        for text in TEXTS:
            given = _failing(command) | {option: text}
            words = [f"{name}={value}" for name, value in given.items() if name[0] == "-"]
            words += [value for name, value in given.items() if name[0] != "-"]
            _assert_refused([*command.split(), *words], capsys)
            tried += 1
    assert tried or command == "doctor"


@pytest.mark.parametrize("text", TEXTS[1:])
@pytest.mark.parametrize("command", ["", "doctor", "bench", "sim ptx /nope"])
def test_words_that_no_command_has(command: str, text: str, capsys: pytest.CaptureFixture) -> None:
    _assert_refused([*command.split(), f"--{text}"], capsys)
    _assert_refused([*command.split(), text, text], capsys)


def _assert_refused(words: list[str], capsys: pytest.CaptureFixture) -> None:
    try:
        status = main(words)
    except SystemExit as leaving:
        status = leaving.code
    printed = capsys.readouterr()
    assert status == 2, (words, printed)
    # Before the error argparse prints the usage, which repeats nothing.
    usage, _, message = printed.err.rpartition("error: ")
    assert "internal" not in usage and message.endswith("\n")
    assert_one_line(message.removesuffix("\n"))
    assert all(len(line) < LINE for line in usage.splitlines()), usage


@pytest.mark.parametrize("command", ["demo", "generate"])
def test_no_text_is_no_default(command: str, capsys: pytest.CaptureFixture) -> None:
    """What an unset variable of the shell's leaves is neither the default nor this folder."""
    _assert_refused([command, "--prompt=", f"--checkpoint={TINY}"], capsys)
    _assert_refused([command, "--prompt=x", "--checkpoint="], capsys)
