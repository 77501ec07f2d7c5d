"""What Triton hands to its launchers, as parameters of PTX; whole kernels where it is installed."""

import importlib.util
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv4.simulator.frontend.tensor_maps import encode_tiled
from dsv4.simulator.frontend.triton import _flat, _parameter

pytestmark = pytest.mark.stage("simulator")

SCRIPT = """
import torch, triton, triton.language as tl

@triton.jit
def scaled(x, y, factor, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, factor * tl.load(x + at, mask=at < n), mask=at < n)

x = torch.randn(300, device="cuda")
y = torch.zeros_like(x)
scaled[(3,)](x, y, 0.5, 300, BLOCK=128)
assert torch.equal(y, 0.5 * x)
"""


def test_constants_are_left_out_and_tuples_opened():
    types = ("*fp16", "constexpr", ("i32", ("fp32", "constexpr")))
    assert list(_flat(types, ("x", 5, (1, (2.0, None))))) == [
        ("*fp16", "x"), ("i32", 1), ("fp32", 2.0)
    ]  # fmt: skip


def test_values_by_type():
    tensor = torch.zeros(4)
    assert _parameter("*fp32", tensor) is tensor
    assert _parameter("*fp32", None) == 0
    assert _parameter("i1", True) == 1
    assert _parameter("fp16", 0.5) == 0.5
    assert _parameter("bf16", 1.5) == struct.pack("<f", 1.5)[2:]
    assert _parameter("nvTmaDesc", b"map") == b"map"


def test_a_tensor_map_that_the_driver_refuses():
    encode_tiled(6, 0x10000, (64, 8), (128,), (64, 8), swizzle=3)
    with pytest.raises(ValueError, match="no tensor map of type 6 at 0x10008"):
        encode_tiled(6, 0x10008, (64, 8), (128,), (64, 8), swizzle=3)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_an_unmodified_script_runs(tmp_path, arch):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "dsv4", "sim", "run", "--arch", arch, str(script)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1 launches" in done.stdout
