"""The kernels under compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.stage("H")]

ROOT = Path(__file__).parents[2]

SCRIPT = """
import torch
from dsv4.kernels.attention.sm90.swap_ab import FmhaSwapAB
from dsv4.kernels.attention.sm90.heads_m import FmhaHeadsM
from dsv4.testing.attention import Case, make_inputs
from dsv4.testing.attention_op import check_op

FmhaSwapAB.lanes_per_warp = FmhaHeadsM.lanes_per_warp = {lanes_per_warp}
for heads in (24, 72):
    case = Case.random(3, heads, {head_dim}, 150, 70, 2, 0, ragged=True, padding=1)
    inputs = make_inputs(case, 0, device="cuda")
    for num_splits in (1, 3):
        check_op(inputs, num_splits)
"""

PAGED_SCRIPT = """
import torch
from dsv4.kernels.attention.sm90.paged_codes import PagedCodes
from dsv4.kernels.attention.sm90.swap_ab import FmhaSwapAB
from dsv4.kernels.attention.sm90.heads_m import FmhaHeadsM
from dsv4.ops import sparse_fmha_paged
from dsv4.testing.paged_attention import Case, assert_paged_close, make_inputs

FmhaSwapAB.lanes_per_warp = FmhaHeadsM.lanes_per_warp = {lanes_per_warp}
PagedCodes.lanes_per_warp = {lanes_per_warp}
options = {options}
case = Case(3, 1, window=40, entries=150, entry_page=53, ragged=True, wild=True, padded=True,
            has_rope=True, has_factor=True, **options)
inputs = make_inputs(case, 0)
moved = inputs.to("cuda")
for splits in (1, 3) if case.compute == "bf16" else (1,):
    found = sparse_fmha_paged(
        *moved.tensors, **moved.options, **{{**moved.kernel_options, "num_splits": splits}},
        return_lse=True, return_max_logits=splits == 1,
    )
    o, lse, *most = (x.cpu() for x in found)
    assert_paged_close(inputs, o, lse, *(most or [inputs.expected()[2]]))
"""
# Few heads, more than one head tile, bf16 rows, entries, products of codes; both sink modes.
PAGED = {
    "few heads": {"heads": 8, "head_dim": 64},
    "few heads, entries": {"heads": 16, "kv_format": "fp8", "sink_mode": "swa_gate"},
    "head tiles": {"heads": 72, "form": "mixed"},
    "head tiles, entries": {"heads": 72, "kv_format": "fp8", "form": "table"},
    "head tiles, codes": {"heads": 72, "kv_format": "fp8", "uniform": True, "compute": "fp8x2"},
}

LOWP_SCRIPT = """
import torch
from dsv4.kernels.lowp.attention import Attention
from dsv4.ops import quantized_attention
from dsv4.testing.lowp import Case, Metrics, make_inputs

Attention.lanes_per_warp = {lanes_per_warp}
case = Case(1, 2, 1, 200, 330, {head_dim}, "vbias")
inputs = make_inputs(case, 0)
options = {options}
mask = torch.ones(200, 330, dtype=torch.bool).tril(-60) if {is_masked} else None
wanted = quantized_attention(*inputs, attn_mask=mask, **options)
with torch.inference_mode():
    if mask is not None:
        mask = mask.cuda()
    found = quantized_attention(*(x.cuda() for x in inputs), attn_mask=mask, **options)
assert Metrics.of(found.cpu(), wanted).l1 < 4e-3
"""
# Both widths, every kind of codes and sums, a launch for the maxima of queries, tiles of 64 keys,
# and a mask, whose launch lists the tiles that are seen.
MASKED = "a mask"
LOWP = {
    "default": (64, {}),
    "default, 128 channels, causal": (128, {"is_causal": True, "causal_align": "top_left"}),
    "256 channels": (256, {}),
    "one level, smoothed values": (64, {"pv_accum_dtype": "fp32", "smooth_v": True}),
    "scales of keys": (64, {"qk": "fp8", "qk_quant_gran": "per_row"}),
    "scales of heads": (64, {"qk": "fp8"}),
    "fp16 values": (64, {"pv": "fp16"}),
    "tiles of 64 keys": (64, {"geometry": "sm89", "pv_accum_dtype": "fp32+fp16"}),
    MASKED: (64, {}),
}

# Its own tests compare in fp64 on the GPU, which takes memcheck minutes each.
MOE_SCRIPT = """
import torch
from dsv4 import ops
from dsv4.ops.quantize import quantize_e4m3
from dsv4.testing.moe import Case
from dsv4.testing.moe_layer import SCALING, LayerInputs

case = Case(300, 1024, 512, 64, 6, expert_dtype="{expert_dtype}")
made = LayerInputs.make(case, 0, "cuda")
weights, x = made.weights(is_prepared=True), made.inputs.x
for tokens in (5, 40, 300):
    codes, scale = quantize_e4m3(x[:tokens], 128)
    for given in ({{}}, {{"x_codes": codes, "x_scale": scale}}):
        with torch.inference_mode():
            y = ops.moe(
                x[:tokens], made.gate, *weights, top_k=case.top_k, scaling=SCALING,
                limit=case.limit, form=case.scale_form, **made.choice, **given,
            )
        assert y.isfinite().all()
"""

# Tests of a family whose launches memcheck follows, few and small: file and -k. Races of linears,
# experts and the others below are looked for in the simulator alone: a lane arrives for its warp,
# which racecheck calls a race, and these kernels have no other way.
FAMILIES = {
    "paged_attention": "style_of_flash_mla and not 321 and not 74",
    "paged_fp8": "not_finite",
    "kv_insert": "bytes_of_the_cpu",
    "fp8_linear": "ragged_rows or not_finite",
    "merged_linear": "ragged_rows or not_finite",
    "grouped_linear": "strides or not_finite",
    "plain_linear": "not_finite",
    "linear_argmax": "graph_replay",
    "head_rotation": "not_finite",
    "index_rounding": "not_finite",
    "mhc_seam": "test_equals_the_oracle",
    "latent_rows": "test_decode",
    "index_topk": "equals_the_oracle",
    "quantized_attention": "test_attention_is_torch_s",
}


def sanitize(tool: str, script: str, cache: Path) -> tuple[int, str]:
    """Exit status and output of compute-sanitizer; 9 where it found something."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # A cache of its own: the number of arrivals is no part of a stored kernel's key.
    environment = {**os.environ, "PYTHONPATH": paths, "DSV4_CACHE_DIR": str(cache)}

    def run(*prefix: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*prefix, sys.executable, "-c", script],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=500,
        )

    # Compile first: the compiler asks the driver for things in ways that memcheck reports.
    plain = run()
    assert plain.returncode == 0, plain.stderr
    done = run(sanitizer, "--tool", tool, "--error-exitcode", "9")
    return done.returncode, (done.stdout + done.stderr)[-3000:]


@pytest.mark.parametrize("head_dim", [64, 512])
def test_memory_accesses(head_dim, tmp_path) -> None:
    script = SCRIPT.format(head_dim=head_dim, lanes_per_warp=1)
    status, output = sanitize("memcheck", script, tmp_path)
    assert status == 0, output


@pytest.mark.parametrize("head_dim", [64, 512])
def test_races(head_dim, tmp_path) -> None:
    """With an arrival of every lane, where else one speaks for its warp after a warp sync.

    racecheck follows single threads: it calls a race what one lane writes and another one's arrival
    releases, whatever orders the two lanes. The simulator's checker knows the memory model's rule
    and watches the kernel as it is.
    """
    script = SCRIPT.format(head_dim=head_dim, lanes_per_warp=32)
    status, output = sanitize("racecheck", script, tmp_path)
    assert status == 0, output


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("name", PAGED)
def test_paged_attention(name, tool, tmp_path) -> None:
    """Without splits and, where there are any, with."""
    lanes = 32 if tool == "racecheck" else 1
    script = PAGED_SCRIPT.format(options=PAGED[name], lanes_per_warp=lanes)
    status, output = sanitize(tool, script, tmp_path)
    assert status == 0, output


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("name", LOWP)
def test_quantized_attention(name, tool, tmp_path) -> None:
    """With its quantisers."""
    head_dim, options = LOWP[name]
    lanes = 32 if tool == "racecheck" else 1
    script = LOWP_SCRIPT.format(
        head_dim=head_dim, options=options, is_masked=name == MASKED, lanes_per_warp=lanes
    )
    status, output = sanitize(tool, script, tmp_path)
    assert status == 0, output


def test_racecheck_sees_hand_overs(tmp_path) -> None:
    """Without those arrivals it does report: it looks at the accesses that the barriers order."""
    script = SCRIPT.format(head_dim=64, lanes_per_warp=1)
    status, output = sanitize("racecheck", script, tmp_path)
    assert status == 9, output
    assert "Race reported" in output


@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8", "nvfp4", "bfloat16"])
def test_memory_accesses_of_experts(expert_dtype, tmp_path) -> None:
    """A layer of few tokens, in which launches wait for each other, and of many."""
    script = MOE_SCRIPT.format(expert_dtype=expert_dtype)
    status, output = sanitize("memcheck", script, tmp_path)
    assert status == 0, output


@pytest.mark.parametrize("family", FAMILIES)
def test_memory_accesses_of_a_family(family) -> None:
    """The family's own tests under memcheck, after a plain run that compiles their kernels."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    file = f"tests/gpu/test_{family}.py"
    chosen = ["-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", FAMILIES[family]]
    chosen += ["-m", "not slow"]
    for prefix in ([], [sanitizer, "--tool", "memcheck", "--error-exitcode", "9"]):
        done = subprocess.run(
            [*prefix, sys.executable, *chosen], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
