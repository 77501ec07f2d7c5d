"""`IndexRounding` on the CPU: codes, both operators that have it, what takes it up, errors."""

from __future__ import annotations

import pytest
import torch

from dsv4.kernels.gemm.config import Fp8LinearConfig
from dsv4.kernels.gemm.merged_config import MergedLinearConfig
from dsv4.ops import IndexRounding, fp8_linear, index_scales, merged_linear
from dsv4.ops.index_keys import decode_index, round_index
from dsv4.ops.index_rounding import takes_index_heads
from dsv4.ops.kv_insert import rotate_rows_
from dsv4.reference import linear as oracle
from dsv4.testing.fp8_linear import Case
from dsv4.testing.index_rounding import Inputs, MergedInputs
from dsv4.testing.merged_linear import Case as MergedCase

pytestmark = [pytest.mark.stage("op"), pytest.mark.stage("projections")]

CASE = Case(7, 512, 384)
HEADS = 3


def run(inputs: Inputs, **changes) -> tuple[torch.Tensor, torch.Tensor]:
    epilogue = inputs.epilogue._replace(**changes)
    given = inputs.x, inputs.weight, inputs.scale
    y = fp8_linear(*given, x_scale=inputs.x_scale, epilogue=epilogue)
    return y, epilogue.scales


def plain(inputs: Inputs) -> torch.Tensor:
    return fp8_linear(inputs.x, inputs.weight, inputs.scale, x_scale=inputs.x_scale)


def test_values_of_the_output_without_an_epilogue(seed) -> None:
    inputs = Inputs.make_heads(CASE, seed)
    codes, scales = run(inputs)
    assert codes.dtype == torch.float8_e4m3fn
    assert torch.equal(scales, torch.exp2(scales.log2().round()))
    heads = plain(inputs).unflatten(1, (HEADS, 128)).clone()
    rotation = inputs.rope[inputs.positions.clamp(0, len(inputs.rope) - 1)]
    rotate_rows_(heads, rotation[:, None])
    found = decode_index(codes.unflatten(1, (HEADS, 128)), scales)
    assert torch.equal(found, round_index(heads).float())
    # Orthogonal: what is lost is what FP4 loses.
    sums = inputs.expected()
    turned, _ = oracle.rotated_heads(sums, HEADS, inputs.rope, inputs.positions)
    norms = turned.unflatten(1, (HEADS, 128)).norm(dim=-1)
    torch.testing.assert_close(found.double().norm(dim=-1), norms, rtol=0.05, atol=0)


def test_a_weight_of_a_merged_launch(seed) -> None:
    weights = "256 float8_e8m0fnu bfloat16, 128 float8_e8m0fnu bfloat16"
    case = MergedCase(7, 512, weights, has_codes=True)
    inputs = MergedInputs.make_heads(case, 128, seed)
    index, rotation = inputs.index, inputs.rotation.epilogue
    epilogue = index.epilogue._replace(rope=rotation.rope, positions=rotation.positions)
    given = [part.weight for part in inputs.linears], [part.scale for part in inputs.linears]
    epilogues = [rotation, epilogue]
    ys = merged_linear(inputs.x, *given, **inputs.codes, epilogues=epilogues)
    wanted, scales = run(index)
    assert torch.equal(ys[1].view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(epilogue.scales, scales)
    alone = merged_linear(inputs.x, *given, **inputs.codes, epilogues=[rotation, None])
    assert torch.equal(ys[0], alone[0]) and alone[1].dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"^weights: epilogue: index_rounding needs x in float8"):
        merged_linear(inputs.x, *given, epilogues=epilogues)


def test_which_heads_have_it() -> None:
    assert takes_index_heads(128, 64)
    assert not takes_index_heads(64, 64) and not takes_index_heads(128, 32)


def test_whole_graph_compilation(seed) -> None:
    inputs = Inputs.make_heads(CASE, seed)

    def project(x: torch.Tensor, x_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = index_scales(x.shape[0], HEADS, x.device)
        epilogue = IndexRounding(inputs.rope, inputs.positions, scales)
        y = fp8_linear(x, inputs.weight, inputs.scale, x_scale=x_scale, epilogue=epilogue)
        return y.view(torch.uint8) * 1, scales * 2

    with torch.no_grad():
        compiled = torch.compile(project, fullgraph=True, backend="aot_eager")
        given = inputs.x, inputs.x_scale
        for one, other in zip(compiled(*given), project(*given), strict=True):
            assert torch.equal(one, other)


def test_wrong_arguments_are_named(seed) -> None:
    inputs = Inputs.make_heads(CASE, seed)
    given = inputs.epilogue
    for changes, error, message in (
        ({"rope": None}, ValueError, r"^rope: got None, the epilogue index_rounding needs it"),
        ({"rope": given.rope[:0]}, ValueError, r"^rope: got no rows"),
        ({"positions": None}, ValueError, r"^positions: got None"),
        ({"positions": given.positions[:2]}, ValueError, r"^positions: got shape"),
        ({"scales": None}, ValueError, r"^head_scales: got None, the epilogue index_rounding"),
        ({"scales": given.scales[:, :1]}, ValueError, r"^head_scales: got 1 heads, a weight of"),
        ({"scales": given.scales[:2]}, ValueError, r"^head_scales: got shape"),
        ({"scales": given.scales.double()}, TypeError, r"^head_scales: got torch.float64"),
        ({"scales": 3}, TypeError, r"^head_scales: got a int, needs a torch.Tensor"),
    ):
        with pytest.raises(error, match=message):
            run(inputs, **changes)
    wide = torch.zeros(7, 512, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^epilogue: index_rounding needs x in float8_e4m3fn"):
        fp8_linear(wide, inputs.weight, inputs.scale, epilogue=given)
    with pytest.raises(ValueError, match=r"^epilogue: .*72 rows are no whole heads of 128"):
        fp8_linear(
            inputs.x, inputs.weight[:72], inputs.scale[:1], x_scale=inputs.x_scale, epilogue=given
        )
    with pytest.raises(ValueError, match=r"^out_dtype must be one of \('float8_e4m3fn',\)"):
        Fp8LinearConfig(512, 128, "float8_e4m3fn", epilogue="index_rounding")
    with pytest.raises(ValueError, match=r"^out_dtype must be one of \('bfloat16', 'float32'\)"):
        Fp8LinearConfig(512, 128, out_dtype="float8_e4m3fn")
    with pytest.raises(ValueError, match=r"^weights: outputs must be one of \('float8_e4m3fn',\)"):
        MergedLinearConfig(512, "128 float8_e8m0fnu bfloat16 index_rounding", True)
