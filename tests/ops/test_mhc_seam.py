"""`mhc_seam` on the CPU: the oracle, what a sublayer reads and writes, its operator, its errors."""

from __future__ import annotations

import pytest
import torch

from dsv4.ops import mhc_seam, mhc_seam_runner_id
from dsv4.ops.mhc_seam import MHC_SEAM
from dsv4.reference import mhc
from dsv4.testing.mhc_seam import EPS, Case, Inputs, assert_seam_close, run_op

pytestmark = pytest.mark.stage("mhc")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(
    "case",
    [
        Case(7, 512),
        Case(5, 256, expands=False, quantizes=False),
        Case(5, 128, is_head=True, expands=False),
        Case(4, 384, is_head=True, is_strided=True, padding_rows=1),
        Case(6, 128, spread=30.0),
        Case(3, 200, quantizes=False),
        Case(6, 256, top_k=3, padding_rows=2),
    ],
    ids=str,
)
def test_equals_the_oracle(case, seed) -> None:
    inputs = Inputs.make(case, seed)
    assert_seam_close(inputs, run_op(inputs))


def test_other_numbers_of_streams_and_float32(seed) -> None:
    streams, fn = torch.randn(5, 2, 48), torch.randn(8, 96) / 8
    given = fn, torch.randn(8), torch.rand(3), torch.randn(48)
    found = mhc_seam(streams, *given, eps=EPS, norm_eps=EPS)
    assert found.x.dtype == torch.float32
    assert found.codes is None
    torch.testing.assert_close(found.comb.sum(-2), torch.ones(5, 2), atol=1e-4, rtol=0)
    after = mhc_seam(
        streams, *given, eps=EPS, norm_eps=EPS, y=torch.zeros(5, 48), post=found.post,
        comb=found.comb,
    )  # fmt: skip
    comb = mhc.iterated(found.comb, 10, EPS)
    torch.testing.assert_close(after.streams, comb.mT @ streams)


def test_no_tokens() -> None:
    found = run_op(Inputs.make(Case(0, 256), 0))
    assert {name: tuple(x.shape) for name, x in found.items()} == {
        "x": (0, 256),
        "streams_out": (0, 4, 256),
        "post_out": (0, 4),
        "comb_out": (0, 4, 4),
        "codes": (0, 256),
        "scale_out": (0, 2),
    }


def test_operator_is_sound_for_torch(seed) -> None:
    inputs = Inputs.make(Case(3, 256, quantizes=False), seed)
    tensors = inputs.tensors
    identity = mhc_seam_runner_id(256, 4, False, True, 20, EPS, EPS)
    names = ("streams", "fn", "base", "scale", "norm_weight")
    with torch.inference_mode(False):
        given = [tensors[name].clone() for name in names]
        y, post, comb = (tensors[name].clone() for name in ("y", "post", "comb"))
        x, written = torch.empty_like(y), torch.empty_like(given[0])
        mixes = torch.empty_like(post), torch.empty_like(comb)
        no_rows = (None, None, None)
        arguments = (*given, x, identity, y, post, comb, *no_rows, written, *mixes, None, None)
        torch.library.opcheck(
            MHC_SEAM.overload,
            arguments,
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


NAMES = ("streams", "fn", "base", "scale", "norm_weight", "y", "post", "comb")
BASE = {name: Inputs.make(Case(3, 256, quantizes=False), 0).tensors[name] for name in NAMES}
ROWS = Inputs.make(Case(3, 256, top_k=2), 0).y


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"streams": None}, TypeError, "streams: got None"),
        ({"quantize": torch.ones(2)}, TypeError, "quantize: got a Tensor, needs True or False"),
        ({"streams": BASE["y"]}, ValueError, r"streams: got shape \(3, 256\), needs \[T, n, D\]"),
        ({"fn": BASE["fn"][:7]}, ValueError, r"fn: got shape \(7, 1024\), needs \[24, 1024\]"),
        ({"base": BASE["base"][:4]}, ValueError, r"base: got shape \(4,\), needs \[24\]"),
        ({"scale": BASE["scale"].double()}, TypeError, "scale: got torch.float64, needs"),
        ({"y": BASE["y"].float()}, TypeError, "y: got torch.float32, needs"),
        ({"post": None}, ValueError, "post: got nothing, a seam with y needs it"),
        ({"y": None}, ValueError, "post: got a tensor, a seam without y has none"),
        ({"y": ROWS._replace(ids=None)}, TypeError, "ids: got None, needs a torch.Tensor"),
        ({"y": ROWS._replace(rows=ROWS.rows[:, 1:])}, ValueError, "rows: got shape .*, needs"),
        ({"y": ROWS._replace(ids=ROWS.ids[1:])}, ValueError, "ids: got shape .*, needs"),
        ({"y": ROWS._replace(counts=ROWS.counts[1:])}, ValueError, "counts: got shape .*, needs"),
        ({"eps": 0.0}, ValueError, "eps must be at least 1e-18, got 0.0"),
        ({"sinkhorn_iters": 0}, ValueError, "sinkhorn_iters must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(changes, error, message) -> None:
    options = {**BASE, "eps": EPS, "norm_eps": EPS, **changes}
    names = ("streams", "fn", "base", "scale", "norm_weight")
    given = [options.pop(name) for name in names]
    with pytest.raises(error, match=f"^{message}"):
        mhc_seam(*given, **options)


def test_codes_need_whole_groups() -> None:
    inputs = Inputs.make(Case(3, 200, quantizes=False), 0).tensors
    names = ("streams", "fn", "base", "scale", "norm_weight")
    given = [inputs[name] for name in names]
    options = {name: inputs[name] for name in ("y", "post", "comb")}
    with pytest.raises(ValueError, match=r"^codes: .* multiple of 128 .* got 200"):
        mhc_seam(*given, **options, eps=EPS, norm_eps=EPS, quantize=True)


def test_gradients_are_refused() -> None:
    names = ("streams", "fn", "base", "scale", "norm_weight")
    with torch.inference_mode(False), torch.enable_grad():
        given = [BASE[name].clone() for name in names]
        given[1].requires_grad_()
        with pytest.raises(ValueError, match=r"^fn: requires grad"):
            mhc_seam(*given, eps=EPS, norm_eps=EPS)
