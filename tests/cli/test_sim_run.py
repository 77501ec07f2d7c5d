"""`dsv4 sim run` and `dsv4 sim ptx`: what they say of right and wrong kernels, and how they end."""

import importlib.util
import json
import os

import numpy as np
import pytest

from dsv4.cli.main import main

pytestmark = pytest.mark.stage("simulator")

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="compiles kernels: needs CuTeDSL"
)

# Threads reverse 128 numbers through shared memory; the barrier is left out on request.
SCRIPT = """
import sys

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack

SYNC, BEHIND = "--sync" in sys.argv, "--behind" in sys.argv


@cute.kernel
def reverse(x: cute.Tensor, y: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    buffer = cutlass.memory.SmemAllocator().allocate_tensor(
        cutlass.Float32, cute.make_layout(128), 16
    )
    buffer[t] = x[t]
    if cutlass.const_expr(SYNC):
        cute.arch.sync_threads()
    y[t + BEHIND] = buffer[127 - t]


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor):
    reverse(x, y).launch(grid=[1, 1, 1], block=[128, 1, 1])


x, y = torch.randn(128, device="cuda"), torch.zeros(128, device="cuda")
launch(from_dlpack(x), from_dlpack(y))
if SYNC:
    assert torch.equal(y.cpu(), x.cpu().flip(0))
print("the script has ended")
"""
STORE_LINE = SCRIPT.split("\n").index("    buffer[t] = x[t]") + 1


def run_script(tmp_path, *arguments: str) -> int:
    """The status of `dsv4 sim run` in a process of its own: a script's GPU stays a CPU."""
    import subprocess
    import sys

    script = tmp_path / "reverse.py"
    script.write_text(SCRIPT)
    options = ["--json", str(tmp_path / "o.json"), "--sarif", str(tmp_path / "o.sarif")]
    command = [sys.executable, "-m", "dsv4", "sim", "run", *options, str(script), *arguments]
    return subprocess.run(command, check=False, capture_output=True).returncode


@needs_compiler
def test_a_right_script_is_clean(tmp_path):
    assert run_script(tmp_path, "--sync") == 0
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["findings"] == [] and found["synchronisation_never_reached"] == {}
    assert [launch["block"] for launch in found["launches"]] == [[128, 1, 1]]


@needs_compiler
def test_a_script_without_its_barrier_is_named_by_line(tmp_path):
    assert run_script(tmp_path) == 1
    found = json.loads((tmp_path / "o.json").read_text())["findings"]
    races = [f for f in found if f["kind"] == "read-write race"]
    assert len(races) == 1  # one cause, whatever thread comes first
    lines = {line["line"] for place in races[0]["places"] for line in place["lines"]}
    assert STORE_LINE in lines
    sarif = json.loads((tmp_path / "o.sarif").read_text())
    results = sarif["runs"][0]["results"]
    assert {r["ruleId"] for r in results} == {"read-write-race", "uninitialised-read"}
    place = results[0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"].endswith("reverse.py")


@needs_compiler
def test_a_store_behind_the_end_of_a_tensor_is_a_fault(tmp_path):
    """Within the alignment of its allocation, too."""
    assert run_script(tmp_path, "--sync", "--behind") == 1
    (found,) = json.loads((tmp_path / "o.json").read_text())["findings"]
    assert found["kind"] == "kernel fault" and "reverse.py" in found["message"]


PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry scale(.param .u64 out, .param .f32 factor) .reqntid 64, 1, 1
{
.reg .pred %p<2>; .reg .f32 %f<4>; .reg .b32 %r<4>; .reg .b64 %rd<4>;
ld.param.u64 %rd1, [out];
ld.param.f32 %f1, [factor];
mov.u32 %r1, %tid.x;
SHIFT
mul.wide.u32 %rd2, %r1, 4;
add.s64 %rd3, %rd1, %rd2;
ld.global.f32 %f2, [%rd3];
mul.rn.f32 %f3, %f2, %f1;
st.global.f32 [%rd3], %f3;
WAIT
ret;
}
"""


def run_ptx(tmp_path, shift: str, wait: str, *options: str) -> int:
    file = tmp_path / "scale.ptx"
    file.write_text(PTX.replace("SHIFT", shift).replace("WAIT", wait))
    params = ["--param", "float32[64]=arange", "--param", "float32=2.5"]
    return main(["sim", "ptx", str(file), *params, *options])


def test_ptx_of_an_older_family_runs(tmp_path, capsys):
    assert run_ptx(tmp_path, "", "", "--schedules", "all", "--save", str(tmp_path)) == 0
    assert "3 launches" in capsys.readouterr().out
    np.testing.assert_array_equal(np.load(tmp_path / "param0.npy"), 2.5 * np.arange(64))


@pytest.mark.parametrize(
    ("shift", "wait", "status", "said"),
    [
        ("shr.u32 %r1, %r1, 1;", "", 1, "read-write race"),
        ("add.u32 %r1, %r1, 1;", "", 1, "kernel fault"),
        ("", "setp.gt.u32 %p1, %r1, 100;\n@%p1 bar.sync 0;", 2, "synchronisation never reached"),
        ("", "setp.lt.u32 %p1, %r1, 32;\n@%p1 bar.sync 1, 64;", 1, "deadlock"),
    ],
)
def test_exit_status_says_what_is_wrong(tmp_path, capsys, shift, wait, status, said):
    assert run_ptx(tmp_path, shift, wait) == status
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spec", "said"), [("int33=1", "int33"), ("float32", "float32"), ("float32[4", "float32")]
)
def test_a_bad_parameter_is_named(tmp_path, capsys, spec, said):
    (tmp_path / "scale.ptx").write_text(PTX.replace("SHIFT", "").replace("WAIT", ""))
    assert main(["sim", "ptx", str(tmp_path / "scale.ptx"), "--param", spec]) == 2
    error = capsys.readouterr().err
    assert "--param" in error and said in error


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.write_bytes(b"\xff\xfe"), "is not text"),
        (lambda path: path.touch(), "FILE: no kernel in"),
        (lambda path: path.mkdir(), "FILE: no file"),
        (os.mkfifo, "FILE: no file"),
    ],
    ids=["bytes", "empty", "folder", "pipe"],
)
def test_what_is_no_ptx_is_named(tmp_path, capsys, make, said):
    make(tmp_path / "x.ptx")
    assert main(["sim", "ptx", str(tmp_path / "x.ptx")]) == 2
    error = capsys.readouterr().err
    assert said in error and str(tmp_path) in error and error.count("\n") == 1
