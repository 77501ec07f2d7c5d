"""Loads of shared memory under way at arrivals, in machine code: of small listings, and of kernels,
where each has a reason why nothing overwrites what it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4.simulator.races.loads_in_flight import HandOver, loads_in_flight
from dsv4.simulator.races.machine_code import (
    MachineFunction,
    MachineInstruction,
    disassemble,
    read_listing,
)
from tests.simulator.helpers.places import function_of

pytestmark = pytest.mark.stage("simulator")

ARRIVAL = "@!P1 SYNCS.ARRIVE.TRANS64.ART0 RZ, [UR22+0x38a28], R15"
REMOTE = "@!P0 SYNCS.ARRIVE.TRANS64.RED.ART0 RZ, [R3+URZ], R0"
LOAD = ("LDS.64 R16, [R94+UR13+0x38140]", 0)
EXIT = "EXIT"


def function(*lines: object) -> MachineFunction:
    """A kernel of a listing: labels end in a colon, instructions are a text, or a text, the
    scoreboard that counts it and the ones it waits for."""
    out = ['\t.section\t.text.kernel,"ax",@progbits', "kernel:"]
    for k, line in enumerate(lines):
        if isinstance(line, str) and line.endswith(":"):
            out.append(line)
            continue
        text, scoreboard, *waits = (line, 7) if isinstance(line, str) else line
        high = scoreboard << 46 | sum(1 << 52 + wait for wait in waits)
        out.append(f"        /*{16 * k:04x}*/   {text} ;   /* 0x0000000000000000 */")
        out.append(f"                              /* 0x{high:016x} */")
    out.append('\t.section\t.debug_frame,"",@progbits')
    (found,) = read_listing("\n".join(out))
    return found


def loads_of(found: list[HandOver]) -> list[tuple[str, list[str]]]:
    return [(at.arrival.text, [load.text for load in at.loads]) for at in found]


def test_a_load_that_nothing_waited_for_is_under_way() -> None:
    found = loads_in_flight(function(LOAD, "FFMA R1, R2, R3, R4", ARRIVAL, EXIT))
    assert loads_of(found) == [(ARRIVAL, [LOAD[0]])]
    assert not found[0].is_remote


@pytest.mark.parametrize(
    ("between", "is_under_way"),
    [
        (("FFMA R1, R16, R3, R4", 7, 0), False),
        (("FFMA R1, R16, R3, R4", 7, 1, 2), True),
        ("DEPBAR.LE SB0, 0x0", False),
        ("DEPBAR.LE SB0, 0x1", True),
        ("DEPBAR.LE SB1, 0x0", True),
        ("MEMBAR.ALL.CTA", False),
        ("FENCE.VIEW.ASYNC.S", False),
    ],
)
def test_what_completes_a_load(between: object, is_under_way: bool) -> None:
    assert bool(loads_in_flight(function(LOAD, between, ARRIVAL, EXIT))) is is_under_way


def test_the_arrival_itself_may_wait() -> None:
    assert loads_in_flight(function(LOAD, (ARRIVAL, 7, 0), EXIT)) == []


def test_every_load_of_a_scoreboard_is_waited_for_at_once() -> None:
    other = ("LDSM.16.M88.4 R60, [R29]", 0)
    third = ("LDS R3, [R4]", 3)
    used = ("FFMA R1, R16, R3, R4", 7, 0)
    found = loads_in_flight(function(LOAD, other, third, used, ARRIVAL, EXIT))
    assert loads_of(found) == [(ARRIVAL, [third[0]])]


@pytest.mark.parametrize("arrival", [REMOTE, "UCGABAR_ARV"])
def test_arrivals_in_another_cta(arrival: str) -> None:
    (found,) = loads_in_flight(function(LOAD, arrival, EXIT))
    assert found.is_remote


def test_a_load_of_the_turn_before() -> None:
    code = function(".L_x_0:", ARRIVAL, LOAD, "@P0 BRA `(.L_x_0)", EXIT)
    assert loads_of(loads_in_flight(code)) == [(ARRIVAL, [LOAD[0]])]


def test_paths_that_do_not_exist() -> None:
    """Behind a branch without a guard, and from an exit on."""
    for leaves in ("BRA `(.L_x_0)", EXIT):
        code = function("@P0 BRA `(.L_x_1)", LOAD, leaves, ".L_x_1:", ARRIVAL, ".L_x_0:", EXIT)
        assert loads_in_flight(code) == []


@pytest.mark.parametrize(
    "branch", ["@P0 BRA `(.L_x_0)", "BRA.U UP0, `(.L_x_0)", "BRA.DIV UR4, `(.L_x_0)", "@!P2 EXIT"]
)
def test_a_guarded_branch_may_fall_through(branch: str) -> None:
    code = function(LOAD, branch, ARRIVAL, ".L_x_0:", EXIT)
    assert [load for _, load in loads_of(loads_in_flight(code))] == [[LOAD[0]]]


def test_threads_that_meet() -> None:
    """BSYNC goes on where BSSY of its barrier says."""
    code = function(
        "BSSY B0, `(.L_x_2)", "@P0 BRA `(.L_x_1)", LOAD, "BSYNC B0", ".L_x_1:",
        ("FFMA R1, R16, R3, R4", 7, 0), "BSYNC B0", ".L_x_2:", ARRIVAL, EXIT,
    )  # fmt: skip
    assert loads_of(loads_in_flight(code)) == [(ARRIVAL, [LOAD[0]])]


def test_a_barrier_of_convergence_is_used_again() -> None:
    """BSYNC does not go on where another use of its barrier meets."""
    code = function(
        "BSSY B0, `(.L_x_0)", LOAD, "BSYNC B0", ".L_x_0:", ("FFMA R1, R16, R3, R4", 7, 0),
        "BSSY B0, `(.L_x_1)", "BSYNC B0", ".L_x_1:", ARRIVAL, EXIT,
    )  # fmt: skip
    assert loads_in_flight(code) == []


def test_the_place_of_an_instruction() -> None:
    listing = (
        '\t.section\t.text.one,"ax",@progbits\n\t//## File "/a/b.py", line 17\n'
        '        /*0000*/   EXIT ;   /* 0x0 */\n\t.section\t.text.two,"ax",@progbits\n'
    ).replace("0x0 ", f"0x{0:016x} ")
    one, two = read_listing(listing)
    assert [ins.source for ins in one.instructions] == [("/a/b.py", 17)]
    assert (one.name, two.name, two.instructions) == ("one", "two", [])


TENSOR_MEMORY = ("kit/tcgen05.py", "start")
# Loads that may be under way at an arrival in their CTA, by the function that they stand in, and
# why: what they read is written by nobody but threads of the CTA, whose stores come behind them.
# Which of them are depends on the compiler: these are of CUDA 12's and of CUDA 13's.
OWN_STORES = {
    ("attention/key_span.py", "load"): "a span's words, by the warp that finds keys",
    ("attention/sm100/paged_context.py", "receive"): "words about a tile, by the load warps",
    TENSOR_MEMORY: "the address of Tensor Memory, written once",
    ("attention/sm90/heads_m_output.py", "_load_p"): "P, by the softmax warps",
    (
        "attention/sm90/heads_m_output.py",
        "_multiply_tiles",
    ): "factors of rows, by the softmax warps",
    ("attention/sm90/heads_m_output.py", "output"): "factors of rows, by the softmax warps",
    (
        "attention/sm90/paged_score.py",
        "_sinks",
    ): "by copies of the warp itself, which come behind in its queue",
    ("attention/sm90/paged_score.py", "_tile_info"): "words about a tile, by the gather warps",
    ("attention/sm90/codes_context.py", "allocate"): "a span's words: lines are not exact",
    ("attention/sm90/codes_softmax.py", "key_scales"): "scales of keys, by the gather warps",
    ("attention/sm90/codes_output.py", "_store"): "factors of rows, by the softmax warps",
    ("indexer/tile_scores.py", "score_run"): "factors of heads, written once or by consumers",
    ("indexer/one_launch.py", "vector"): "order keys, by the consumers",
    ("gemm/sm90/wide.py", "_merge"): "the thread's own sums",
    ("gemm/sm90/wide.py", "_factors"): "factors of tokens, by the scale warp",
    ("gemm/sm90/consumers.py", "_factors"): "scales of tokens, by the activation warps",
    ("moe/sm90/consumers.py", "_promote"): "scales of tokens, by the activation warps",
    ("moe/sm90/consumers.py", "_weight_scales"): "scales of FP8 blocks, by the activation warps",
    ("gemm/sm90/best_rows.py", "take"): "the warp's own keys",
    ("moe/sm90/joint_products.py", "_read"): "the board, by the scheduler warp",
    ("lowp/work.py", "load"): "the work tile's words, by the load warp",
}
HOPPER = {
    "sparse_fmha_with_swa": ("128 heads, ring", "8 heads, ring"),
    "sparse_fmha_paged": (
        "64 heads, bf16", "64 heads, fp8", "16 heads, fp8", "128 heads, fp8, fp8x2 products",
    ),
    "rms_norm_fp8": ("Flash hidden, 4096",),
    "compress": ("CSA, fp8", "HCA, fp8", "indexer, fp4"),
    "fp8_linear": ("Flash wq_a, 1024 x 4096", "Flash wq_b, 32768 x 1024, codes"),
    "grouped_linear": ("Flash wo_a", "Flash wo_a, codes"),
    "plain_linear": ("Flash head",),
    "linear_argmax": ("Flash head",),
    "merged_linear": ("Flash CSA x", "Flash shared x"),
    "mhc_seam": ("Flash, seam", "Flash, seam of experts"),
    "latent_rows": ("Flash CSA, fp8",),
    "index_topk": ("Flash, fp8", "Flash, fp4"),
    "moe": (
        "Flash, scores", "Flash, scores, row by row", "Flash-Base, scores", "Flash-NVFP4, scores",
    ),
    "quantize_kv": ("INT8 keys, FP8 values, d 128",),
    "quantized_attention": ("INT8 and FP8, d 128", "FP8 and FP8, d 64, causal"),
    "sample_tokens": ("top_p, top_k, min_p",),
}  # fmt: skip
BLACKWELL = {
    "sparse_fmha_paged": ("128 heads, bf16", "64 heads, bf16"),
    "fp8_linear": ("Flash wq_a, 1024 x 4096",),
    "grouped_linear": ("Flash wo_a, codes",),
    "merged_linear": ("Flash CSA latent",),
    "quantized_attention": ("FP8 and FP8, d 128", "FP4, smoothed queries, d 128"),
}
KERNELS = [
    (arch, op, label)
    for arch, ops in (("sm_90a", HOPPER), ("sm_100a", BLACKWELL))
    for op, labels in ops.items()
    for label in labels
]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "op", "label"), KERNELS)
def test_nothing_overwrites_what_is_being_loaded(
    arch: str, op: str, label: str, tmp_path: Path
) -> None:
    """An H200 gave wrong sums where another CTA's copies did."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    from dsv4.ops.runtime import registry

    declared = registry.OPS[op]
    key = declared.compile_key(declared.aot_for(arch)[label], arch)
    options = f"--gpu-arch {arch} --keep-cubin --generate-line-info --dump-dir {tmp_path}"
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(registry.build(key, options).artifacts.CUBIN)
    kernels = disassemble(cubin)
    assert any(kernel.instructions for kernel in kernels)
    found = [hand_over for kernel in kernels for hand_over in loads_in_flight(kernel)]
    remote = [load for at in found if at.is_remote for load in at.loads]
    assert [load for load in remote if _place(load) != TENSOR_MEMORY] == []
    places = {_place(load) for at in found for load in at.loads}
    assert places - set(OWN_STORES) == set()


def _place(ins: MachineInstruction) -> tuple[str, str]:
    """File, within the package of kernels, and function."""
    path, line = ins.source
    return path.rpartition("/dsv4/kernels/")[2], function_of(path, line)
