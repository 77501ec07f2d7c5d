"""The table of architectures, and that there is one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4 import arch
from dsv4.ops.runtime.registry import OPS


def test_lookups() -> None:
    assert arch.of_name("sm_90a").capability == (9, 0)
    assert arch.of_capability((10, 3)) is arch.SM_103A
    assert arch.of_capability((8, 0)) is None
    with pytest.raises(
        ValueError, match="arch: got 'sm_80', needs one of sm_90a, sm_100a, sm_103a"
    ):
        arch.of_name("sm_80")


def test_facts() -> None:
    for one in arch.ARCHS.values():
        assert one.smem_per_cta == 232448
        assert one.registers_per_sm == 65536
        assert bool(one.tmem_columns) == ("tcgen05" in one.features) != ("wgmma" in one.features)
    assert arch.SM_100A.features - arch.SM_103A.features == {"tcgen05.int8"}


def test_kernels_are_for_architectures_of_the_table() -> None:
    assert OPS
    for op in OPS.values():
        assert set(op.kernels) <= set(arch.ARCHS), op.name


def test_it_needs_nothing() -> None:
    code = "import sys; sys.argv = ['dsv4']; import dsv4.arch; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "cutlass"}.isdisjoint(done.stdout.split())


def test_there_is_one_table() -> None:
    """Nothing else lists capabilities or the bytes of shared memory. The simulator, which stands
    alone, has its own."""
    copies = re.compile(r"\(9, 0\)|\(10, 0\)|232448|227 \* 1024|REGISTERS_PER_SM = \d|65536 *#")
    package = Path(arch.__file__).parent
    found = [
        f"{path.relative_to(package)}:{number}"
        for path in sorted(package.rglob("*.py"))
        if path.name != "arch.py" and path.relative_to(package).parts[0] != "simulator"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if copies.search(line)
    ]
    assert found == []
