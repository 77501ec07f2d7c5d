"""Options that name a file to write: wrong ones are refused before the work."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4.cli.main import build_parser, main
from dsv4.cli.output_file import output_file, output_folder

READ = {"--measured", "--flashmla", "--fa3", "--sage"}  # files that commands read


def _file_options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _file_options(inner)
        elif action.metavar == "FILE" or action.type is Path:
            yield action


def test_every_file_that_is_written_is_checked() -> None:
    options = list(_file_options(build_parser()))
    written = [option for option in options if option.type in (output_file, output_folder)]
    assert len(written) >= 6
    for option in options:
        assert option in written or set(option.option_strings) <= READ, option.option_strings


def test_a_path_that_can_be_written_stays_as_it_was(tmp_path: Path) -> None:
    assert output_file(str(tmp_path / "new.json")) == tmp_path / "new.json"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.json").write_text("content")
    assert output_file(str(tmp_path / "old.json")).read_text() == "content"
    assert output_file(os.devnull) == Path(os.devnull)


def test_a_folder_to_write_is_tried(tmp_path: Path) -> None:
    assert output_folder(str(tmp_path)) == tmp_path
    assert output_folder(str(tmp_path / "new")) == tmp_path / "new"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "nowhere" / "x", tmp_path / "n" / ("x" * 300)):
        with pytest.raises(argparse.ArgumentTypeError, match=str(path)[:40]):
            output_folder(str(path))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nowhere/x.json", "nowhere is not a folder"),
        ("", "is a folder"),
        ("a file/x.json", "a file is not a folder"),
        ("n" * 300, "File name too long"),
        ("a\0b", "null"),
        pytest.param(
            "/proc/x.json",
            "/proc",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="needs /proc"),
        ),
    ],
)
def test_a_path_that_cannot_be_written_is_refused(path: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(argparse.ArgumentTypeError, match=reason):
        output_file(str(tmp_path / path))


@pytest.mark.parametrize("option", ["--timeline", "--plot"])
def test_the_simulation_does_not_begin(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["sim", "attention", option, str(tmp_path / "nowhere" / "x.json")])
    assert leaving.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"argument {option}: " in captured.err and "nowhere is not a folder" in captured.err
