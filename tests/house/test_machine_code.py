"""`scripts/machine_code`: what it reads from disassembled kernels."""

from __future__ import annotations

import struct
import sys

import pytest

from scripts.tools import machine_code
from scripts.tools.machine_code import cubins, kernels, read
from tests.house.scripts import load_script

SERIALISED = """\
.text.kernel_cutlass_kernel_dsv4kernelsgemmsm90streamingStreamingLinear_object_at_0:
        /*0000*/                   ACQBULK ;
        /*0010*/                   LDG.E.64 R2, desc[UR10][R2.64] ;
        /*0020*/                   IMAD R4, R2, 0x10, R17 ;
        /*0030*/                   LDG.E.128 R8, desc[UR10][R6.64] ;
        /*0040*/               @P0 BRA `(.L_x_1) ;
        /*0050*/                   LDG.E R12, desc[UR10][R10.64] ;
.L_x_1:
        /*0060*/                   QGMMA.64x8x32.F32.E4M3.E4M3 R24, gdesc[UR8], RZ, !UPT, gsb0 ;
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0080*/                   QGMMA.64x8x32.F32.E4M3.E4M3 R24, gdesc[UR24], R24, gsb0 ;
        /*0090*/                   QGMMA.64x8x32.F32.E4M3.E4M3 R24, gdesc[UR20], R24, gsb0 ;
        /*00a0*/                   QGMMA.64x8x32.F32.E4M3.E4M3 R24, gdesc[UR16], R24, gsb0 ;
        /*00b0*/                   EXIT ;
"""
CHAINED = """\
.text.kernel_cutlass_kernel_dsv4kernelsmoesm90productGroupedProduct_object_at_1:
        /*0000*/                   ACQBULK ;
        /*0010*/                   LDG.E.64 R2, desc[UR10][R2.64] ;
        /*0020*/                   LDG.E.128 R8, desc[UR10][R6.64] ;
        /*0030*/                   IMAD R4, R2, 0x10, R17 ;
        /*0040*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5+0x35568], R25 ;
        /*0050*/                   LDG.E R12, desc[UR10][R8.64] ;
        /*0060*/                   STL.64 [R1+0x30], R12 ;
        /*0070*/                   QGMMA.64x8x32.F32.E4M3.E4M3 R24, gdesc[UR8], RZ, !UPT ;
        /*0080*/                   QGMMA.64x8x32.F32.E4M3.E4M3 R24, gdesc[UR24], R24 ;
        /*0090*/                   QGMMA.64x8x32.F32.E4M3.E4M3 R24, gdesc[UR20], R24 ;
        /*00a0*/                   QGMMA.64x8x32.F32.E4M3.E4M3 R24, gdesc[UR16], R24, gsb0 ;
        /*00b0*/               @P1 LDL R15, [R1+0x4c] ;
        /*00c0*/                   EXIT ;
"""


def test_kernels_are_told_apart() -> None:
    found = dict(kernels(".target sm_90a\n" + SERIALISED + CHAINED))
    assert [machine_code.short(name) for name in found] == [
        "gemmsm90streamingStreamingLinear",
        "moesm90productGroupedProduct",
    ]
    serialised, chained = (read(text) for text in found.values())
    assert (serialised.instructions, chained.instructions) == (12, 13)
    assert (serialised.products, serialised.waited, serialised.is_serialised) == (4, 4, True)
    assert (chained.products, chained.waited, chained.is_serialised) == (4, 1, False)
    assert (serialised.local, chained.local) == (0, 2)


def test_a_load_behind_what_another_one_brings_is_a_trip_of_its_own() -> None:
    """Loads beside each other are one; what stands behind the first barrier does not count."""
    assert read(SERIALISED).trips == 3
    assert read(CHAINED).trips == 1
    assert read(CHAINED.replace("ACQBULK", "NOP")).trips == 0


def elf(machine: int, content: bytes) -> bytes:
    """An ELF file whose section table, of one entry, ends it."""
    header = bytearray(64)
    header[:4] = machine_code.ELF
    struct.pack_into("<H", header, 18, machine)
    struct.pack_into("<QQ", header, 32, 0, 64 + len(content))
    struct.pack_into("<HHHH", header, 54, 56, 0, 64, 1)
    return bytes(header) + content + bytes(64)


def test_cubins_are_cut_out_of_an_object() -> None:
    inside = [elf(machine_code.CUDA, b"one"), elf(machine_code.CUDA, b"the other")]
    assert list(cubins(elf(62, b"".join(inside)) + b"behind")) == inside


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing in the cache; first dsv4 compile --arch sm_90a"),
        (["--arch", "sm_1"], "arch: got 'sm_1', needs one of"),
        (["--only", "("], "--only: "),
        (["--what"], "unrecognized arguments: --what"),
    ],
    ids=str,
)
def test_wrong_usage_is_one_line(arguments, message, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(machine_code, "find_nvdisasm", lambda: "nvdisasm")
    check_refused(arguments, message, monkeypatch, tmp_path, capsys)


def test_a_missing_disassembler_is_said(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(machine_code, "find_nvdisasm", lambda: None)
    check_refused([], "no nvdisasm on the path", monkeypatch, tmp_path, capsys)


@pytest.mark.parametrize("program", ["/nowhere", "/bin/false"])
def test_a_disassembler_that_does_not_work_is_named(program, monkeypatch, tmp_path, capsys) -> None:
    file = tmp_path / "kernel.o"
    file.write_bytes(elf(machine_code.CUDA, b"code"))
    monkeypatch.setattr(machine_code.RUNNERS, "path", lambda key: file)
    arguments = ["--nvdisasm", program, "--only", "wo_b"]
    check_refused(arguments, program, monkeypatch, tmp_path, capsys)


def check_refused(arguments, message: str, monkeypatch, tmp_path, capsys) -> None:
    """Exit status 2, and one line that says why."""
    monkeypatch.setenv("DSV4_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["machine_code", *arguments])
    try:
        status = load_script("machine_code").main("usage")
    except SystemExit as error:
        status = error.code
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2 and line.startswith("machine_code: ") and message in line
