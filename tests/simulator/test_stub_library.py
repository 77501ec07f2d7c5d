"""The stub of the CUDA runtime: what compiles it, where it is kept, and what can go wrong."""

from __future__ import annotations

import ctypes
import errno
import json
import shutil
import stat
import sys
from pathlib import Path

import pytest

from dsv4.cli.main import main
from dsv4.simulator import SimulatorError
from dsv4.simulator.frontend import stub_library as stub

pytestmark = [
    pytest.mark.stage("simulator"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that does not exist yet, and no choice of a compiler."""
    monkeypatch.setenv("DSV4_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "cache"


def _loads(path: str) -> bool:
    return hasattr(ctypes.CDLL(path), "dsv4sim_configure")


@pytest.mark.parametrize("compiler", ["", "cc -m64", " cc  -O0 '-DA=b c' "])
def test_compiled_once_and_kept(
    compiler: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    path = stub.stub_library()
    assert _loads(path)
    assert list(folder.rglob("*")) == [folder / "simulator", Path(path)]
    monkeypatch.setattr(stub.subprocess, "run", None)
    assert stub.stub_library() == path


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("/nonexistent/cc", "CC: got '/nonexistent/cc', there is no such program"),
        ("/nonexistent/cc -m64", "CC: got '/nonexistent/cc -m64', there is no such program"),
        ("cc '-m64", r"CC: got \"cc '-m64\", needs a command \(No closing quotation\)"),
        ("false -x", "`false -x -shared"),
    ],
)
def test_wrong_compiler(
    compiler: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(SimulatorError, match=message):
        stub.stub_library()
    assert not folder.exists()


def test_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stub.shutil, "which", lambda name: None)
    with pytest.raises(SimulatorError, match="needs a C compiler"):
        stub.stub_library()


def test_what_the_compiler_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler removes what it could not finish: nothing of ours may fail on that first."""
    script = tmp_path / "failing"
    script.write_text('#!/bin/sh\nrm -f "$5"\necho "no space left" >&2\nexit 1\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(script))
    with pytest.raises(SimulatorError, match="failed: no space left"):
        stub.stub_library()


@pytest.mark.parametrize(
    "chosen",
    [
        "a file",
        pytest.param(
            "/proc/nope", marks=pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
        ),
    ],
)
def test_folder_that_cannot_be_written(
    chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for compiled kernels: a warning that names the variable, and on it goes."""
    (tmp_path / "a file").touch()
    monkeypatch.setenv("DSV4_CACHE_DIR", str(tmp_path / chosen))
    with pytest.warns(RuntimeWarning, match="set DSV4_CACHE_DIR to a folder you can write"):
        path = stub.stub_library()
    assert _loads(path)
    assert not Path(path).is_relative_to(tmp_path)


def test_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stub.shutil, "copy", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        path = stub.stub_library()
    assert _loads(path)
    assert list(folder.rglob("*")) == [folder / "simulator"]


@pytest.mark.parametrize(
    ("compiler", "status", "detail"),
    [
        ("cc -m64", "ok", "C compiler cc -m64"),
        ("/nonexistent/cc", "broken", "CC: got '/nonexistent/cc'"),
    ],
)
def test_doctor_looks_at_the_chosen_compiler(
    compiler: str, status: str, detail: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    pytest.importorskip("cutlass", reason="needs the kernel compiler nvidia-cutlass-dsl")
    monkeypatch.setenv("CC", compiler)
    assert main(["doctor", "--json"]) == 0
    findings = {found["name"]: found for found in json.loads(capsys.readouterr().out)}
    found = findings["backend sim"]
    assert found["status"] == status and detail in found["detail"]
    assert ("CC" in found["remedy"]) == (status == "broken")
