"""An object compiled where there is no GPU runs where there is no compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv4.arch import of_capability
from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.lowp.config import QuantizedAttentionConfig, QuantizeKvConfig
from dsv4.ops.attention.sparse_fmha import SPARSE_FMHA
from dsv4.ops.quantized_attention.op import QUANTIZED_ATTENTION
from dsv4.ops.quantized_attention.quantize_kv import QUANTIZE_KV
from dsv4.ops.runtime.precompile import precompile

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.stage("H")]

ROOT = Path(__file__).parents[2]

# Whatever compiles, assembles or links fails.
RUN = """
import torch
from cutlass import cute

def refuse(*args, **options):
    raise AssertionError("this process has no compiler")

cute.compile = refuse
{use}
print("right")
"""
ATTENTION = """
from dsv4.testing.attention import Case, make_inputs
from dsv4.testing.attention_op import check_op
case = Case.random(5, 64, 512, 200, 100, 2, 0, ragged=True, sliding_window=100)
check_op(make_inputs(case, 0, device="cuda"), num_splits=2)
"""
QUANTIZED = """
from dsv4.ops import quantized_attention
from dsv4.testing.lowp import Case, Metrics, make_inputs
inputs = make_inputs(Case(1, 4, 2, 200, 330, 64), 0)
with torch.inference_mode():
    found = quantized_attention(*(x.cuda() for x in inputs), return_lse=True)
wanted = quantized_attention(*inputs, return_lse=True)
assert Metrics.of(found[0].cpu(), wanted[0]).l1 < 4e-3
torch.testing.assert_close(found[1].cpu(), wanted[1], atol=1e-5, rtol=1e-5)
"""
# What is run, and its operators and configurations.
USES = {
    "attention": (
        ATTENTION,
        [(SPARSE_FMHA, FmhaConfig(512, 64, 100, 256, sink_mode="softmax", num_splits=2))],
    ),
    "quantised attention": (
        QUANTIZED,
        [(QUANTIZE_KV, QuantizeKvConfig(64)), (QUANTIZED_ATTENTION, QuantizedAttentionConfig(64))],
    ),
}


@pytest.mark.parametrize("use", USES)
def test_a_stored_object_needs_no_compiler(use, seed, tmp_path, monkeypatch) -> None:
    pytest.importorskip("cutlass", reason="needs the kernel compiler")
    arch = of_capability(torch.cuda.get_device_capability()).name
    script, configs = USES[use]
    keys = [(op.name, op.compile_key(config, arch)) for op, config in configs]
    monkeypatch.setenv("DSV4_CACHE_DIR", str(tmp_path))

    def run() -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PATH": "", "PYTHONPATH": paths}
        command = [sys.executable, "-c", RUN.format(use=script)]
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)

    empty = run()
    assert "this process has no compiler" in empty.stderr, "nothing would have been compiled"
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        outcomes = precompile(keys, jobs=1, report=False)
    assert not [outcome.error for outcome in outcomes if outcome.error]
    done = run()
    assert done.returncode == 0, done.stderr
    assert done.stdout == "right\n"
