"""`HeadRotation` on the CPU: values, both operators that have it, what takes it up, errors."""

from __future__ import annotations

import pytest
import torch

from dsv4.ops import HeadRotation, fp8_linear, head_squares, merged_linear
from dsv4.ops.head_rotation import norm_factor, takes_heads
from dsv4.reference import linear as oracle
from dsv4.testing.fp8_linear import Case
from dsv4.testing.head_rotation import Inputs, assert_heads_close, make_rotation

pytestmark = [pytest.mark.stage("op"), pytest.mark.stage("projections")]

CASE = Case(7, 512, 384)
HEAD_DIM = 128


def run(inputs: Inputs, **changes) -> torch.Tensor:
    epilogue = inputs.rotation.epilogue._replace(**changes)
    x_scale = inputs.optional_x_scale
    return fp8_linear(inputs.x, inputs.weight, inputs.scale, x_scale=x_scale, epilogue=epilogue)


@pytest.mark.parametrize("x_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("head_dim", [64, 128, 384])
def test_close_to_the_reference(x_dtype, head_dim, seed) -> None:
    inputs = Inputs.make_heads(Case(7, 512, 384, x_dtype), head_dim, seed)
    assert_heads_close(run(inputs), inputs.rotation.squares, inputs)


def test_bits_of_the_output_without_an_epilogue(seed) -> None:
    inputs = Inputs.make_heads(CASE, HEAD_DIM, seed)
    plain = fp8_linear(inputs.x, inputs.weight, inputs.scale)
    y, squares = inputs.applied(plain)
    assert torch.equal(run(inputs), y)
    assert torch.equal(inputs.rotation.squares, squares)
    heads = plain.unflatten(1, (-1, HEAD_DIM))
    assert torch.equal(y.unflatten(1, (-1, HEAD_DIM))[..., :-64], heads[..., :-64])
    assert not torch.equal(y, plain)
    factor = norm_factor(squares, HEAD_DIM, 1e-6)
    expected = (heads.double().square().mean(-1) + 1e-6) ** -0.5
    torch.testing.assert_close(factor.double(), expected, rtol=1e-6, atol=0)


def test_squares_need_not_be_asked_for(seed) -> None:
    inputs = Inputs.make_heads(CASE, HEAD_DIM, seed)
    assert torch.equal(run(inputs, squares=None), run(inputs))


def test_a_weight_of_a_merged_launch(seed) -> None:
    inputs = Inputs.make_heads(CASE, HEAD_DIM, seed)
    other = make_rotation(CASE, 64, seed)
    shared = other.epilogue._replace(rope=inputs.rotation.rope, positions=inputs.rotation.positions)
    plain = torch.randn(8, CASE.in_features).bfloat16()
    weights, scales = [inputs.weight, inputs.weight, plain], [inputs.scale, inputs.scale]
    ys = merged_linear(
        inputs.x, weights, scales, epilogues=[inputs.rotation.epilogue, shared, None]
    )
    squares = inputs.rotation.squares.clone()
    assert torch.equal(ys[0], run(inputs))
    assert torch.equal(inputs.rotation.squares, squares)
    alone = fp8_linear(inputs.x, inputs.weight, inputs.scale)
    wanted = shared._replace(squares=torch.empty_like(other.squares))
    assert torch.equal(ys[1], wanted.apply_(alone))
    assert torch.equal(other.squares, wanted.squares)
    assert torch.equal(ys[2], merged_linear(inputs.x, weights, scales)[2])


@pytest.mark.parametrize(("head_dim", "rope_dim"), [(48, 16), (40, 8), (128, 64)])
def test_any_sizes_by_hand(head_dim, rope_dim, seed) -> None:
    """What models of other sizes do without the operator's epilogue."""
    assert takes_heads(head_dim, rope_dim) == (head_dim == 128)
    angles, positions = torch.rand(9, rope_dim // 2), torch.tensor([0, 5, 8], dtype=torch.int32)
    rope = torch.cat((angles.cos(), angles.sin()), -1)
    squares = head_squares(3, 2, head_dim, "cpu")
    y = torch.randn(3, 2 * head_dim)
    expected, mean = oracle.rotated_heads(y, 2, rope, positions)
    found = HeadRotation(rope, positions, head_dim, squares).apply_(y)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(squares.double().sum(-1) / head_dim, mean, rtol=1e-5, atol=0)


def test_whole_graph_compilation(seed) -> None:
    inputs = Inputs.make_heads(CASE, HEAD_DIM, seed)
    rope, positions = inputs.rotation.rope, inputs.rotation.positions

    def project(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        squares = head_squares(x.shape[0], 3, HEAD_DIM, x.device)
        epilogue = HeadRotation(rope, positions, HEAD_DIM, squares)
        return fp8_linear(x, inputs.weight, inputs.scale, epilogue=epilogue), squares

    with torch.no_grad():
        compiled = torch.compile(project, fullgraph=True, backend="aot_eager")
        for one, other in zip(compiled(inputs.x), project(inputs.x), strict=True):
            assert torch.equal(one, other)


def test_wrong_epilogues_are_named(seed) -> None:
    inputs = Inputs.make_heads(CASE, HEAD_DIM, seed)
    given = inputs.rotation.epilogue
    for changes, error, message in (
        ({"head_dim": 96}, ValueError, r"^epilogue: head_dim must be a multiple of 64"),
        ({"head_dim": 256}, ValueError, r"^epilogue: 384 rows are no whole heads of 256"),
        ({"head_dim": 1.5}, TypeError, r"^epilogue: head_dim: got 1.5, needs an integer"),
        ({"rope": None}, ValueError, r"^rope: got None, the epilogue head_rotation:128 needs it"),
        ({"rope": given.rope[:0]}, ValueError, r"^rope: got no rows"),
        ({"rope": given.rope[:, :32]}, ValueError, r"^rope: got shape \(100, 32\), needs"),
        ({"rope": 3}, TypeError, r"^rope: got a int, needs a torch.Tensor"),
        ({"positions": None}, ValueError, r"^positions: got None"),
        ({"positions": given.positions[:2]}, ValueError, r"^positions: got shape"),
        ({"positions": given.positions.long()}, TypeError, r"^positions: got torch.int64"),
        ({"squares": given.squares[:, :1]}, ValueError, r"^squares: got 1 heads, a weight of 384"),
        ({"squares": given.squares[..., :1]}, ValueError, r"^squares: got shape"),
    ):
        with pytest.raises(error, match=message):
            run(inputs, **changes)
    x, weight, scale = inputs.x, inputs.weight, inputs.scale
    with pytest.raises(TypeError, match=r"^epilogue: got 'norm', needs a dsv4.ops.HeadRotation"):
        fp8_linear(x, weight, scale, epilogue="norm")
    plain = torch.zeros(128, CASE.in_features, dtype=torch.bfloat16)
    other = given._replace(positions=given.positions.clone())
    for weights, epilogues, error, message in (
        ([weight, plain], [None, given], ValueError, r"^epilogues: got one of a plain weight"),
        ([weight, plain], [given], ValueError, r"^epilogues: got 1, 2 weights need as many"),
        ([weight, plain], given, TypeError, r"^epilogues: got .* needs a list"),
        ([weight, weight], [given, other], ValueError, r"^epilogues: got two of positions"),
    ):
        scales = [scale for one in weights if one is weight]
        with pytest.raises(error, match=message):
            merged_linear(x, weights, scales, epilogues=epilogues)
