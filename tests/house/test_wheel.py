"""What an installed package brings along: modules, C sources, and the demo's checkpoint."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = ROOT / "checkpoints" / "tiny"


def test_the_build_carries_the_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setuptools = pytest.importorskip("setuptools")
    declared: dict = {}
    monkeypatch.setattr(setuptools, "setup", lambda **options: declared.update(options))
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"))
    distribution = setuptools.Distribution({"cmdclass": declared["cmdclass"], "packages": []})
    command = distribution.get_command_obj("build_py")
    command.build_lib = str(tmp_path)
    command.ensure_finalized()
    command.run()
    for file in TINY.iterdir():
        built = tmp_path / "dsv4" / "checkpoints" / "tiny" / file.name
        assert str(built) in command.get_outputs()
        assert built.read_bytes() == file.read_bytes()


@pytest.mark.slow
def test_the_demo_of_an_installed_wheel_passes(tmp_path: Path) -> None:
    """Installed by pip into a folder, with nothing of the checkout in reach."""
    pytest.importorskip("setuptools")
    pytest.importorskip("pip")
    source, site = tmp_path / "source", tmp_path / "site"
    tracked = _run(["git", "ls-files", "-z"], ROOT).split("\0")
    for name in filter(None, tracked):
        if name.startswith(("dsv4/", "checkpoints/")) or "/" not in name:
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    build = "import setuptools.build_meta as b; print(b.build_wheel('.'))"
    wheel = source / _run([sys.executable, "-c", build], source).split()[-1]
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site]
    _run([sys.executable, *install, wheel], tmp_path)
    printed = _run([site / "bin" / "dsv4", "demo"], tmp_path, PYTHONPATH=str(site))
    # Lines are as wide as a terminal.
    assert str(site / "dsv4" / "checkpoints" / "tiny") in printed.replace("\n", "")
    assert "held-out loss" in printed


def _run(command: list, folder: Path, **environment: str) -> str:
    """What a command prints; AssertionError with all of it where it fails."""
    result = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
