"""`dsv4 sim loads`: what it says of machine code, its exit status, and files it cannot read."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4.cli.main import main

pytestmark = pytest.mark.stage("simulator")

ARRIVAL = "SYNCS.ARRIVE.TRANS64.ART0 RZ, [R3+URZ], R0"


def listing(arrival: str) -> str:
    """A kernel that loads, and arrives."""
    code = (("LDS R1, [R2]", 0), (arrival, 7), ("EXIT", 7))
    lines = [
        f"        /*{16 * k:04x}*/   {text} ;   /* 0x{0:016x} */\n/* 0x{scoreboard << 46:016x} */\n"
        for k, (text, scoreboard) in enumerate(code)
    ]
    return '\t.section\t.text.kernel,"ax",@progbits\n' + "".join(lines)


@pytest.fixture
def nvdisasm(tmp_path, monkeypatch):
    """Makes a program of that name which does what a line of shell says."""

    def make(line: str) -> None:
        program = tmp_path / "bin" / "nvdisasm"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")

    return make


def run(path: Path) -> int:
    return main(["sim", "loads", str(path)])


@pytest.mark.parametrize("is_remote", [False, True])
def test_loads_under_way_are_listed(is_remote: bool, tmp_path, nvdisasm, capsys) -> None:
    arrival = ARRIVAL.replace("TRANS64", "TRANS64.RED") if is_remote else ARRIVAL
    file = tmp_path / "kernel.cubin"
    file.write_text(listing(arrival))
    nvdisasm('cat "$3"')
    assert run(file) == is_remote
    first, second = capsys.readouterr().out.splitlines()
    assert first == "kernel: 1 arrivals with loads under way"
    remote = "remote " if is_remote else ""
    assert second == f"  1 x load at `LDS R1, [R2]`, {remote}arrival at `{arrival}`"


def test_a_file_that_nvdisasm_refuses(tmp_path, nvdisasm, capsys) -> None:
    file = tmp_path / "kernel.cubin"
    file.write_text("no machine code")
    nvdisasm("echo nvdisasm fatal: not an Elf file >&2; exit 1")
    assert run(file) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "kernel.cubin: nvdisasm cannot read it" in line and "not an Elf file" in line
