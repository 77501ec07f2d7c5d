"""The table of architectures, and that there is one."""

from __future__ import annotations

import subprocess
import sys

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
