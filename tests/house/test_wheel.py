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
# The checkpoint that `dsv4 demo` takes; what else the demo does needs no wheel.
GENERATE = """
import dsv4
from dsv4.cli.demo import shipped_checkpoint
print(shipped_checkpoint())
model = dsv4.load(str(shipped_checkpoint()), device="cpu")
assert len(model.generate([[0, 17, 42]], max_new_tokens=3).tokens[0]) == 3
"""


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
def test_an_installed_wheel_generates_with_the_shipped_checkpoint(tmp_path: Path) -> None:
    """The wheel, unpacked into a folder as pip does, with nothing of the checkout in reach."""
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout.split("\0")
    for name in filter(None, tracked):
        if name.startswith(("dsv4/", "checkpoints/")) or "/" not in name:
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    build = "import setuptools.build_meta as b; print(b.build_wheel('.'))"
    built = subprocess.run(
        [sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=True
    )
    wheel = source / built.stdout.split()[-1]
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)], check=True)
    result = subprocess.run(
        [sys.executable, "-c", GENERATE],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert str(site / "dsv4" / "checkpoints" / "tiny") in result.stdout
