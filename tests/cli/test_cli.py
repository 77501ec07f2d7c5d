"""The `dsv4` command as a user meets it: reports, one-line errors, exit statuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dsv4.cli import doctor
from dsv4.cli.main import build_parser, main


def test_every_command_has_help(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["--help"])
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    for command in ("demo", "generate", "doctor", "compile", "sim", "sage", "bench"):
        assert command in text


def test_doctor_json_names_the_backends(capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = {f["name"]: f for f in json.loads(capsys.readouterr().out)}
    assert findings["backend cpu"]["status"] == "ok"
    assert findings["torch"]["detail"].startswith("2.")
    assert "backend cuda" in findings or "gpu 0" in findings


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("a file", "is not a folder"),
        ("a file/below", "is not a folder"),
        pytest.param(
            "/proc/nope", "/proc", marks=pytest.mark.skipif(sys.platform != "linux", reason="/proc")
        ),
    ],
)
def test_doctor_tries_the_cache_folder(
    folder: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permissions alone say nothing: root may write everywhere, and yet not into /proc."""
    (tmp_path / "a file").touch()
    monkeypatch.setenv("DSV4_CACHE_DIR", str(tmp_path / folder))
    (finding,) = doctor._compile_cache()
    assert finding.status == "broken"
    assert reason in finding.detail
    assert "DSV4_CACHE_DIR" in finding.remedy
    monkeypatch.setenv("DSV4_CACHE_DIR", str(tmp_path / "new" / "folder"))
    (finding,) = doctor._compile_cache()
    assert (finding.status, finding.remedy) == ("ok", "")
    assert not (tmp_path / "new").exists()


def test_doctor_survives_a_broken_probe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def explode() -> list[doctor.Finding]:
        raise RuntimeError("driver is confused")

    monkeypatch.setattr(doctor, "_gpus", explode)
    main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)
    broken = [f for f in findings if f["status"] == "broken"]
    assert any("driver is confused" in f["detail"] for f in broken)


def test_doctor_fails_when_a_requirement_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda n: None if n == "safetensors" else real(n))
    assert main(["doctor"]) == 1
    assert "pip install safetensors" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["generate", "--checkpoint", "/nowhere", "--prompt", "x"], "/nowhere"),
        (["demo", "--checkpoint", "/nowhere"], "/nowhere"),
    ],
)
def test_errors_are_one_line(argv: list[str], expected: str, capsys: pytest.CaptureFixture) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("dsv4: error: ")
    assert expected in captured.err
    assert "Traceback" not in captured.err


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture) -> None:
    assert main(["demo", "--checkpoint", "/nowhere", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_an_unexpected_error_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def explode(args: object) -> int:
        raise KeyError("a bug")

    monkeypatch.setattr(doctor, "run", explode)
    assert main(["doctor"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "internal error: KeyError" in err


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as leaving:
        build_parser().parse_args(["fly"])
    assert leaving.value.code == 2
    assert "fly" in capsys.readouterr().err


def test_module_entry_point(tmp_path: Path) -> None:
    import subprocess

    command = [sys.executable, "-m", "dsv4", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("dsv4 ")
