"""`compress` on the CPU: the oracle over cut sequences, its operator, its errors."""

from __future__ import annotations

import pytest
import torch

from dsv4.ops import compress, compress_runner_id
from dsv4.ops.compress import COMPRESS
from dsv4.reference import compressor as oracle
from dsv4.testing.compress import EPS, Case, Inputs, assert_step, decoded

pytestmark = pytest.mark.stage("compressor")
SMALL = {"dim": 32, "rope_dim": 8, "kv_format": "bf16", "is_rounded": False, "page": 4}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("cuts", [(45,), (1,) * 45, (3, 1, 20, 5, 16), (2, 2, 2, 39)], ids=str)
@pytest.mark.parametrize("overlap, ratio", [(True, 4), (False, 16), (True, 8), (False, 4)])
def test_entries_equal_the_oracle_however_tokens_are_cut(overlap, ratio, cuts, seed) -> None:
    """Means as rows without norm's weight and rotation; a NaN in the ring reaches none."""
    dim, tokens = 16, 45
    width = dim * (1 + overlap)
    x, wkv, wgate = torch.randn(tokens, 24), torch.randn(width, 24), torch.randn(width, 24)
    ape, blocks = torch.randn(ratio, width), tokens // ratio
    terms = ratio * (1 + overlap)
    state = torch.full((3, terms + 3, 2, width), torch.nan)
    pool = torch.zeros(1, blocks + 1, dim)
    rope = torch.cat((torch.ones(tokens, 4), torch.zeros(tokens, 4)), 1)
    start = 0
    for cut in cuts:
        part = x[start : start + cut]
        first = start // ratio
        numbers = first + torch.arange(-(-cut // ratio))
        slots = torch.where((numbers + 1) * ratio <= start + cut, numbers, -1).int()
        compress(
            (part @ wkv.T)[None], (part @ wgate.T)[None], ape, state, torch.ones(dim), rope,
            *(torch.tensor([n], dtype=torch.int32) for n in (1, start, cut)), slots[None], pool,
            eps=EPS, dtype=torch.float32, is_rounded=False,
        )  # fmt: skip
        start += cut
    means = oracle.compress(x, wkv, wgate, ape, overlap=overlap)
    wanted = means * torch.rsqrt(means.square().mean(-1, keepdim=True) + EPS)
    torch.testing.assert_close(pool[0, :blocks], wanted, rtol=1e-4, atol=1e-4)
    assert not pool[0, blocks].any()
    assert state[[0, 2]].isnan().all()


@pytest.mark.parametrize("is_index", [False, True])
def test_a_request_is_the_same_alone_and_in_any_batch(is_index, seed) -> None:
    case = Case((3, 7, 0, 10), (6, 5, 6, 1), 6, 128, kv_format="fp8", is_index=is_index)
    inputs = Inputs.make(case, seed)
    whole = inputs.expected()
    assert_step(inputs, whole)
    for index in range(4):
        alone = inputs.rows([index])
        found = alone.expected()
        row = int(inputs.tensors["state_rows"][index])
        assert torch.equal(found["state"][row].nan_to_num(), whole["state"][row].nan_to_num())
        slots = alone.tensors["slots"].flatten()
        slots = slots[slots >= 0].long()
        pools = (decoded(case, pool).flatten(0, 1) for pool in (found["pool"], whole["pool"]))
        inside = slots[slots < decoded(case, found["pool"]).flatten(0, 1).shape[0]]
        one, other = (pool[inside] for pool in pools)
        assert torch.equal(one, other)


def test_operator_is_sound_for_torch(seed) -> None:
    inputs = Inputs.make(Case((3, 5), (2, 3), 3, **SMALL), seed)
    identity = compress_runner_id(32, 4, True, EPS, "bf16", "bf16", False, False, False, 8)
    with torch.inference_mode(False):
        given = [x.clone().nan_to_num() for name, x in inputs.arguments.items() if name != "pool"]
        pool = torch.zeros(3, 4, 32).bfloat16()
        torch.library.opcheck(
            COMPRESS.overload,
            (*given, pool, identity),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


BASE = Inputs.make(Case((3, 5), (2, 3), 3, **SMALL), 0).arguments


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"values": None}, TypeError, "values: got None"),
        (
            {"scores": BASE["scores"][..., :32]},
            ValueError,
            r"scores: got shape \(2, 3, 32\), needs",
        ),
        ({"state": BASE["state"][:, :7]}, ValueError, "state: got rings of 7 tokens, a mean of 8"),
        ({"rope": BASE["rope"][:0]}, ValueError, "rope: got no rows"),
        ({"lens": BASE["lens"].long()}, TypeError, "lens: got torch.int64, needs"),
        ({"pool": BASE["pool"][..., :16]}, ValueError, "pool: got shape"),
        ({"eps": 0.0}, ValueError, "eps must be at least 1e-18, got 0.0"),
        ({"dtype": torch.float16}, ValueError, "dtype: got torch.float16, needs"),
    ],
)
def test_wrong_arguments_are_named(changes, error, message) -> None:
    options = {**BASE, "eps": EPS, "is_rounded": False, **changes}
    with pytest.raises(error, match=f"^{message}"):
        compress(**options)


def test_gradients_are_refused() -> None:
    with torch.inference_mode(False), torch.enable_grad():
        given = {name: x.clone() for name, x in BASE.items()}
        given["ape"].requires_grad_()
        with pytest.raises(ValueError, match=r"^ape: requires grad"):
            compress(**given, eps=EPS, is_rounded=False)
