"""`dsv4 sage`: cases, comparisons, dumps that are read back, and the environment's knobs."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv4.cli.main import main
from dsv4.kernels.lowp.config import LOG2E
from dsv4.ops import dshb_to_bhsd, quantized_attention
from dsv4.ops.quantized_attention import dump, knobs
from dsv4.testing.lowp import Case, make_inputs

pytestmark = pytest.mark.stage("lowp")
SMALL = ["--heads", "2", "--kv-heads", "1"]
STAGES = {
    *("q", "k", "v", "k_codes", "k_scale", "v_codes", "v_scale", "km", "q_codes", "q_scale"),
    *("q_pad", "k_pad", "v_pad", "v_tp", "s_raw", "s", "p", "p_codes", "m", "d", "o_tile"),
    *("o_sum", "o", "lse"),
}
OUTPUTS = {"sage_quant", "flash"}  # of the command, beside the stages


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    """Sets knobs as if they had been there when the process began."""

    def set_(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        knobs.overrides.cache_clear()
        knobs.warn_once.cache_clear()

    yield set_
    monkeypatch.undo()
    knobs.overrides.cache_clear()
    knobs.warn_once.cache_clear()


@pytest.mark.parametrize("compare", ["sage", "flash"])
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--granularity", "per_warp", "--pv-accum", "fp32+fp16", "--no-smooth-k"],
        ["--pv-accum", "fp32", "--smooth-v"],
        ["--qk", "fp8"],
    ],
    ids=str,
)
def test_cases_are_within_their_bounds(compare, options, capsys) -> None:
    assert main(["sage", "--compare", compare, *SMALL, *options]) == 0
    assert re.search(rf"{compare}: cosine (0\.99|1\.0)", capsys.readouterr().out)


def test_calls_of_the_operator_are_compared(monkeypatch, capsys) -> None:
    """With its stages, and with each other."""
    assert main(["sage", *SMALL, "--iters", "3"]) == 0
    assert "operator on cpu, 3 calls: 0 with other bits, cosine 1.0" in capsys.readouterr().out
    real, calls = quantized_attention, itertools.count()
    monkeypatch.setattr(
        "dsv4.ops.quantized_attention", lambda *x, **given: real(*x, **given) + next(calls)
    )
    assert main(["sage", *SMALL, "--iters", "2"]) == 1
    assert "2 calls: 1 with other bits" in capsys.readouterr().out
    assert main(["sage", *SMALL, "--iters", "0"]) == 2


@pytest.mark.parametrize("option", [("--iters", "0"), ("--device", "cuda")], ids=str)
def test_a_refused_call_writes_no_dump(option, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    prefix = tmp_path / "folder" / "x"
    assert main(["sage", *SMALL, *option, "--dump", str(prefix)]) == 2
    assert option[0] in capsys.readouterr().err and not prefix.parent.exists()


def test_a_dump_is_read_back_without_a_difference(tmp_path, capsys) -> None:
    prefix = str(tmp_path / "folder" / "x")
    case = ["--case", "b2_full_seq70_d64"]
    options = ["--granularity", "per_warp", "--pv-accum", "fp32+fp16"]
    assert main(["sage", *case, *SMALL, *options, "--dump", prefix]) == 0
    arrays, meta = dump.read(prefix)
    assert set(arrays) == STAGES | OUTPUTS
    assert meta["config"]["qk_quant_gran"] == "per_warp" and meta["options"]["smooth_k"] is True
    capsys.readouterr()
    assert main(["sage", "--case", "b1_full_seq8_d64", "--load", prefix]) == 0
    printed = capsys.readouterr().out
    assert printed.count("max diff: 0, rms: 0") == len(STAGES | OUTPUTS) - 3
    # Another seed's output under the same description: refused; with its own: a difference.
    path = Path(f"{prefix}.o.bin")
    path.write_bytes(bytes(path.stat().st_size))
    assert main(["sage", "--load", prefix]) == 2
    assert "got other bytes than its description was written for" in capsys.readouterr().err
    dump.write(prefix, arrays | {"o": arrays["o"] + 1}, {"options": meta["options"]})
    assert main(["sage", "--case", "b1_full_seq8_d64", "--load", prefix]) == 1
    assert "o: max diff: 1, rms: 1" in capsys.readouterr().out


def test_a_dump_of_another_order_is_refused(tmp_path) -> None:
    """[d, S, H, B] holds as many bytes: read as [B, H, S, d] it is off by 0.39 rms, no error."""
    x = torch.randn(2, 3, 5, 7)
    prefix = tmp_path / "x"
    dump.write(prefix, {"q": x}, {})
    assert torch.equal(dump.read(prefix)[0]["q"], x)
    meta = json.loads((tmp_path / "x.meta").read_text())
    meta["arrays"]["q"]["order"] = "DSHB"
    (tmp_path / "x.meta").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="got order 'DSHB', needs 'BHSd'"):
        dump.read(prefix)
    buffer = x.permute(3, 2, 1, 0).contiguous()
    (tmp_path / "raw.bin").write_bytes(buffer.numpy().tobytes())
    with pytest.raises(ValueError, match=r"got strides \(1, 2, 6, 30\), BHSd of"):
        dump.load_buffer(tmp_path / "raw.bin", tuple(x.shape), (1, 2, 6, 30))
    phantom = dump.load_buffer(tmp_path / "raw.bin", tuple(x.shape))
    assert (phantom - x).square().mean().sqrt() > 0.39
    assert torch.equal(dshb_to_bhsd(buffer, tuple(x.shape)), x)
    with pytest.raises(ValueError, match="x: got 210 elements"):
        dshb_to_bhsd(buffer, (2, 3, 5, 8))


def test_stages_follow_from_each_other(environment, tmp_path) -> None:
    """Every stage of a dump, from the ones before it; inputs as rows come with heads before."""
    q, k, v = make_inputs(Case(1, 2, 1, 30, 170, 40), 0)
    environment(DSV4_SAGE_DUMP=f"{tmp_path}/x")
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    options = {"qk_quant_gran": "per_warp", "smooth_q": True, "tensor_layout": "NHD"}
    quantized_attention(*turned, **options)
    found, _ = dump.read(tmp_path / "x")
    assert set(found) == STAGES | {"q_mean", "delta_s", "k_smooth"}
    assert all(torch.equal(found[name], x) for name, x in zip("qkv", (q, k, v)))
    assert found["q_pad"].shape == (1, 2, 64, 64) and not found["q_pad"][..., 30:, :].any()
    assert torch.equal(found["v_pad"][..., :170, :40], v) and not found["v_pad"][..., 40:].any()
    of_codes = found["v_codes"].transpose(2, 3).flatten(3).float() * found["v_scale"][..., None]
    assert (of_codes - found["v_tp"].float()).abs().max() < 0.07 * v.abs().max()
    product = found["q_codes"].int() @ found["k_codes"].int().transpose(2, 3)
    assert found["s_raw"].dtype == torch.int32 and torch.equal(found["s_raw"], product)
    scale = found["q_scale"].flatten(2).repeat_interleave(16, 2)[..., :30, None] * 40**-0.5
    per_key = found["k_scale"].flatten(2).repeat_interleave(128, 2)[:, :, None, :170]
    scores = product * (scale * LOG2E) * per_key + found["delta_s"]
    torch.testing.assert_close(found["s"][..., :170], scores)
    for tile, keys in enumerate((slice(0, 128), slice(128, 256))):
        weights = torch.exp2(found["s"][..., keys] - found["m"][..., tile, None])
        torch.testing.assert_close(found["p"][..., keys], weights)
    torch.testing.assert_close(found["p_codes"], found["p"].to(torch.float8_e4m3fn).float())
    fade = torch.exp2(found["m"][..., :1] - found["m"][..., 1:])
    total = found["o_tile"][:, :, 0] * fade + found["o_tile"][:, :, 1]
    torch.testing.assert_close(found["o_sum"], total)
    out = (total / found["d"][..., 1:] * found["v_scale"].unsqueeze(2))[..., :40]
    torch.testing.assert_close(found["o"].float(), out, rtol=2**-8, atol=1e-6)


def test_buffers_of_other_programs(tmp_path, capsys) -> None:
    """Without a description: float32, heads first. An old one's output is channels first; one that
    is not is the 0.39 rms that say nothing of the attention."""
    case = Case(1, 2, 1, 64, 64, 64, dtype=torch.float16)
    q, k, v = make_inputs(case, 0)
    v *= 8
    out = quantized_attention(q, k, v).float()
    command = ["sage", "--case", "b1_full_seq64_d64", *SMALL, "--load", str(tmp_path / "x")]

    def write(**buffers: torch.Tensor) -> None:
        for name, x in buffers.items():
            (tmp_path / f"x.{name}.bin").write_bytes(x.float().contiguous().numpy().tobytes())

    write(q=q, k=k, v=v, sage=out.permute(3, 2, 1, 0))
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "has no .sage_quant.bin" in printed and rms_of(printed) < 1e-3
    write(sage=out)  # heads first
    assert main(command) == 0 and rms_of(capsys.readouterr().out) > 0.39
    write(sage_quant=out)
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "warning" not in printed and rms_of(printed) < 1e-3
    write(sage_quant=out + 0.01)
    assert main(command) == 1


def rms_of(printed: str) -> float:
    return float(re.search(r"of the dump: rms: (\S+) \(", printed)[1])


def test_the_environment_overrides_calls_and_says_so_once(environment, caplog, tmp_path) -> None:
    q, k, v = make_inputs(Case(1, 2, 1, 30, 70, 64), 0)
    wanted = quantized_attention(q, k, v, qk_quant_gran="per_warp", smooth_k=False)
    plain = quantized_attention(q, k, v)
    environment(
        DSV4_SAGE_GRANULARITY="per_warp", GGML_SAGE_SMOOTH_K="0", DSV4_SAGE_DUMP=f"{tmp_path}/a",
        DSV4_SAGE_DUMP_OUT=f"{tmp_path}/b", DSV4_SAGE_DUMP_QKV=f"{tmp_path}/c",
        DSV4_SAGE_DUMP_QK_INT8=f"{tmp_path}/d",
    )  # fmt: skip
    for _ in range(2):
        out = quantized_attention(q, k, v)
    assert torch.equal(out, wanted) and not torch.equal(out, plain)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(set(said)) == 6
    assert "GGML_SAGE_SMOOTH_K=0 overrides smooth_k in every call" in said
    arrays, meta = dump.read(tmp_path / "a")
    assert set(arrays) == STAGES - {"km"}
    assert torch.equal(arrays["o"], out) and meta["overrides"]["qk_quant_gran"] == "per_warp"
    names = {p: set(dump.read(tmp_path / p)[0]) for p in "bcd"}
    assert names["b"] == {"o", "lse"} and names["c"] == {"q", "k", "v"}
    assert names["d"] == {"q_codes", "q_scale", "k_codes", "k_scale"}


def test_a_sample_has_the_stages_of_a_block_of_queries(environment, monkeypatch, tmp_path) -> None:
    q, k, v = make_inputs(Case(2, 4, 2, 100, 70, 64), 0)
    monkeypatch.setattr(dump, "_samples", itertools.count())
    environment(
        DSV4_SAGE_SAMPLE_PREFIX=f"{tmp_path}/x", DSV4_SAGE_SAMPLE_HEAD="3",
        GGML_SAGE_SAMPLE_BLOCK="1", DSV4_SAGE_DUMP=f"{tmp_path}/a",
    )  # fmt: skip
    out = quantized_attention(q, k, v)
    quantized_attention(q + 1, k, v)  # beyond the limit
    arrays, meta = dump.read(tmp_path / "x")
    assert (meta["head"], meta["first_query"]) == (3, 64)
    assert torch.equal(arrays["o"], out[:, 3, 64:]) and torch.equal(arrays["k"], k[:, 1])
    assert set(arrays) == set(dump.read(tmp_path / "a")[0])
    environment(DSV4_SAGE_SAMPLE_HEAD="x")
    with pytest.raises(ValueError, match="DSV4_SAGE_SAMPLE_HEAD: got 'x', needs a number"):
        quantized_attention(q, k, v)


def test_a_sample_of_a_warp_and_what_it_needs(environment, monkeypatch, caplog, tmp_path) -> None:
    q, k, v = make_inputs(Case(1, 2, 2, 100, 70, 64), 0)
    environment(DSV4_SAGE_SAMPLE_WARP="2", DSV4_SAGE_KERNEL_PRINT_LIMIT="3")
    for _ in range(2):
        quantized_attention(q, k, v)
    said = [record.getMessage() for record in caplog.records]
    assert said[2:] == [
        "DSV4_SAGE_SAMPLE_WARP is ignored: it needs DSV4_SAGE_SAMPLE_PREFIX or "
        "DSV4_SAGE_DEBUG_KERNEL_ITERS",
        "DSV4_SAGE_KERNEL_PRINT_LIMIT is ignored: it needs DSV4_SAGE_DEBUG_KERNEL_ITERS",
    ]
    monkeypatch.setattr(dump, "_samples", itertools.count())
    environment(DSV4_SAGE_SAMPLE_PREFIX=f"{tmp_path}/x")
    out = quantized_attention(q, k, v)
    arrays, meta = dump.read(tmp_path / "x")
    assert meta["first_query"] == 32 and torch.equal(arrays["o"], out[:, 0, 32:48])
    environment(DSV4_SAGE_SAMPLE_WARP="4")
    monkeypatch.setattr(dump, "_samples", itertools.count())
    with pytest.raises(ValueError, match="_WARP: got 0, 0 and 4, there are none"):
        quantized_attention(q, k, v)


def test_tiles_are_reported_up_to_a_limit(environment, monkeypatch, caplog) -> None:
    """Maxima rise and are those of the stages; the limit is of all calls together."""
    q, k, v = make_inputs(Case(1, 2, 2, 100, 300, 64), 0)
    monkeypatch.setattr(dump, "_lines", itertools.count())
    environment(
        DSV4_SAGE_DEBUG_KERNEL_ITERS="2",
        DSV4_SAGE_KERNEL_PRINT_LIMIT="3",
        GGML_SAGE_SAMPLE_HEAD="1",
    )
    out = quantized_attention(q, k, v)
    quantized_attention(q, k, v)
    pattern = r"head 1, queries from 0, tile (\d): m (\S+) to (\S+), d (\S+) to (\S+)"
    found = [re.fullmatch(pattern, record.getMessage()) for record in caplog.records[3:]]
    assert [int(match[1]) for match in found] == [0, 1, 0]
    assert float(found[0][2]) <= float(found[1][2]) and float(found[0][3]) <= float(found[1][3])
    assert [float(x) for x in found[0].groups()] == [float(x) for x in found[2].groups()]
    environment(DSV4_SAGE_DEBUG_KERNEL_ITERS="0")
    assert torch.equal(quantized_attention(q, k, v), out)
    assert not any(re.fullmatch(pattern, r.getMessage()) for r in caplog.records[6:])


def test_packed_sequences_have_no_stages_and_say_so_once(environment, caplog, tmp_path) -> None:
    q, k, v = (x[0].transpose(0, 1) for x in make_inputs(Case(1, 2, 2, 70, 70, 64), 0))
    ends = torch.tensor([0, 30, 70], dtype=torch.int32)
    environment(DSV4_SAGE_DUMP=f"{tmp_path}/x", DSV4_SAGE_DEBUG_KERNEL_ITERS="1")
    for _ in range(2):
        quantized_attention(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends)
    assert set(dump.read(tmp_path / "x")[0]) == {"q", "k", "v", "o"}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3 and said[2].startswith("packed sequences: dumps have inputs and outputs")


@pytest.mark.parametrize("is_packed", [False, True], ids=["batch", "packed"])
def test_one_head_after_the_other_has_the_same_bits(is_packed, environment) -> None:
    q, k, v = make_inputs(Case(1, 4, 2, 70, 70, 64, "kbias"), 0)
    options = {"return_lse": True, "pv_accum_dtype": "fp32", "smooth_v": True}
    if is_packed:
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        ends = torch.tensor([0, 30, 70], dtype=torch.int32)
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    else:
        options["attn_mask"] = torch.randn(1, 4, 70, 70)
    wanted = quantized_attention(q, k, v, **options)
    environment(DSV4_SAGE_Q_SERIAL="1")
    found = quantized_attention(q, k, v, **options)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted))


def test_scales_are_reported_by_device(environment, caplog) -> None:
    q, k, v = make_inputs(Case(1, 2, 1, 30, 70, 64), 0)
    environment(DSV4_SAGE_DEBUG_QUANT_DEV="1")
    quantized_attention(q, k, v)
    assert len(caplog.records) == 1
    environment(DSV4_SAGE_DEBUG_QUANT_HOST="1")
    quantized_attention(q, k, v)
    assert [r.getMessage()[:7] for r in caplog.records[3:]] == ["k_scale", "v_scale"]


def test_every_knob_of_the_table_is_documented() -> None:
    page = Path(__file__).parents[2].joinpath("docs/design/lowp.md").read_text()
    for knob in knobs.KNOBS:
        assert re.search(rf"`(DSV4_SAGE)?_{knob.variable}`", page), knob.variable


def test_toggles_change_who_computes_and_no_bit(environment, caplog) -> None:
    """On the CPU both are the torch code; on a GPU tests/gpu has them."""
    q, k, v = make_inputs(Case(1, 2, 1, 30, 70, 64, "zeros"), 0)
    wanted, wanted_lse = quantized_attention(q, k, v, return_lse=True)
    environment(
        DSV4_SAGE_FORCE_HOST_QK="1", DSV4_SAGE_FORCE_SIMPLE_QK="1", DSV4_SAGE_DEBUG_QUANT="1"
    )
    out, lse = quantized_attention(q, k, v, return_lse=True)
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    said = [record.getMessage() for record in caplog.records]
    assert any(text.startswith("v_scale: 0 to ") and "21 of 64 are 0" in text for text in said), (
        said
    )


def test_what_does_not_fit_is_reported_once(environment, caplog) -> None:
    q, k, v = make_inputs(Case(1, 2, 1, 30, 70, 64), 0)
    plain = quantized_attention(q, k, v)
    environment(DSV4_SAGE_PV_ACCUM="fp16")
    for _ in range(2):
        assert torch.equal(quantized_attention(q, k, v, smooth_v=True), plain)
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(" ")[0] for text in said] == [
        "DSV4_SAGE_PV_ACCUM=fp16", "pv_accum_dtype", "smooth_v",
    ]  # fmt: skip
    environment(DSV4_SAGE_PV_ACCUM="fp64")
    with pytest.raises(ValueError, match="DSV4_SAGE_PV_ACCUM: got 'fp64', needs one of"):
        quantized_attention(q, k, v)


@pytest.mark.slow
def test_a_process_takes_its_knobs_from_the_environment(tmp_path) -> None:
    command = [sys.executable, "-m", "dsv4", "sage", *SMALL, "--dump", f"{tmp_path}/x"]
    knob = {"DSV4_SAGE_PV_ACCUM": "fp32+fp16"}
    done = subprocess.run(command, env=os.environ | knob, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "DSV4_SAGE_PV_ACCUM=fp32+fp16 overrides pv_accum_dtype" in done.stderr
    assert dump.read(tmp_path / "x")[1]["config"]["pv_accum_dtype"] == "fp32+fp16"


def test_wrong_cases_are_refused(capsys) -> None:
    assert main(["sage", "--case", "b1_seq128"]) == 2
    assert "--case: got 'b1_seq128', needs bB_causal_seqL_dD" in capsys.readouterr().err
    assert main(["sage", "--granularity", "per_row", *SMALL]) == 2
    assert "qk_quant_gran: got 'per_row'" in capsys.readouterr().err
