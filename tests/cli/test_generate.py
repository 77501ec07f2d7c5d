"""`dsv4 generate` at its doors: prompts, streams and arguments, each refused in one sentence."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from dsv4.cli.main import main

TINY = str(Path(__file__).parents[2] / "checkpoints" / "tiny")


def _generate(*argv: str) -> int:
    return main(["generate", "--checkpoint", TINY, "--max-new-tokens", "3", *argv])


def _error(capsys: pytest.CaptureFixture) -> str:
    text = capsys.readouterr().err
    assert text.startswith("dsv4: error: ") and text.count("\n") == 1
    return text.removeprefix("dsv4: error: ").rstrip()


class _Input:
    """Standard input with some bytes."""

    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--prompt", "\udcff"], "prompt is not valid UTF-8"),
        (["--prompt", ""], "prompt: it encodes to no tokens; give some text"),
        (["--prompt", "a", "--device", "meta"], "device: got 'meta', which holds no data"),
        (["--prompt", "a", "--temperature", "1e300"], "temperature must be in 0 .. 1e+06"),
        (["--prompt", "a", "--temperature", "nan"], "temperature must be in 0 .. 1e+06"),
        (
            ["--prompt", "a", "--draft-tokens", "5000"],
            "num_draft_tokens must be at most 64, got 5000",
        ),
        (["--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens must be at least 1, got 0"),
        (
            ["--prompt", "a", "--kv-format", "fp32"],
            "kv_format of a bfloat16 model must be 'bf16' or 'fp8', got 'fp32'",
        ),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_refusals(argv: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert _generate(*argv) == 2
    assert message in _error(capsys)


def test_a_missing_folder_is_named_as_by_load(capsys: pytest.CaptureFixture) -> None:
    assert main(["generate", "--checkpoint", "/nope", "--prompt", "x"]) == 2
    assert _error(capsys) == "checkpoint /nope: no such folder"


@pytest.mark.parametrize(
    "stdin, message",
    [
        (None, "standard input is closed"),
        (_Input(b"\xff\xfe"), "standard input is not valid UTF-8"),
    ],
    ids=["closed", "bytes"],
)
def test_standard_input_that_is_no_prompt(
    stdin: object, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    assert _generate("--prompt", "-") == 2
    assert _error(capsys) == f"prompt: {message}"


def test_a_prompt_on_standard_input_and_in_another_locale(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stdin", _Input("café".encode()))
    assert _generate("--prompt", "-") == 0
    from_input = capsys.readouterr().out
    # What Python makes of the bytes of "café" in the C locale.
    assert _generate("--prompt", "caf\udcc3\udca9") == 0
    assert capsys.readouterr().out == from_input


def test_closed_streams(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        assert _generate("--prompt", "The king") == 0
        sys.stderr.close()
    assert capsys.readouterr().out.strip()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert _generate("--prompt", "The king") == 2
    assert _error(capsys) == "standard output is closed"


def test_text_that_the_terminal_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    assert _generate("--prompt", "a", "--temperature", "100", "--seed", "3") == 0
    narrow.write("\N{REPLACEMENT CHARACTER}")
    narrow.flush()
    assert narrow.buffer.getvalue().endswith(b"?")


@pytest.mark.slow
def test_a_full_disk_is_one_error(tmp_path: Path) -> None:
    import subprocess

    command = [sys.executable, "-m", "dsv4", "generate", "--checkpoint", TINY, "--prompt", "a"]
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*command, "--max-new-tokens", "1"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert result.returncode == 2
    assert result.stderr.startswith("dsv4: error: [Errno 28]") and result.stderr.count("\n") == 1


def test_errors_cannot_command_a_terminal(capsys: pytest.CaptureFixture) -> None:
    assert main(["generate", "--checkpoint", "/no\x1b[31m", "--prompt", "x"]) == 2
    assert r"/no\x1b[31m" in _error(capsys)
