"""`index_topk` on the CPU: the oracle, formats of keys, its operator, its errors."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from dsv4.kernels.kit.index_entry import INDEX_FORMATS, IndexEntry
from dsv4.ops import index_topk, index_topk_runner_id
from dsv4.ops.index_keys import (
    decode_index,
    encode_index,
    key_views,
    pack_index,
    read_keys,
    round_index,
    write_keys,
)
from dsv4.ops.index_topk import INDEX_TOPK
from dsv4.ops.quantize import e2m1_as_e4m3
from dsv4.testing.index_topk import Case, Inputs, assert_choice, run_op

pytestmark = pytest.mark.stage("indexer")
SMALL = {"heads": 4, "dim": 32, "rope_dim": 8, "page": 6}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(
    "case",
    [
        Case((70, 330, 5, 64, 0, 130), topk=64, gives_slots=True, padding_rows=1),
        Case((40, 33, 6, 7), topk=7, tokens_per_request=2, **SMALL),
        Case((50, 50), topk=11, levels=2, gives_slots=True, **SMALL),
        Case((70, 330), topk=64, gives_slots=True, key_format="fp4"),
        Case((40, 33, 6, 7), topk=7, tokens_per_request=2, key_format="fp4", **SMALL),
        Case((90, -3), topk=11, columns=3, **SMALL),
    ],
    ids=str,
)
def test_equals_the_oracle(case, seed) -> None:
    inputs = Inputs.make(case, seed)
    assert_choice(inputs, run_op(inputs))


def test_codes_hold_what_fp4_holds(seed) -> None:
    """Of magnitudes up to 2^14 apart within a row, zeros and signed zeros among them."""
    x = torch.randn(200, 128)
    x *= torch.exp2(torch.randint(-7, 7, (200, 128)).float())
    x[3], x[5, :64] = 0, 0
    codes, scales = encode_index(x.bfloat16())
    assert (scales.log2() == scales.log2().round()).all()
    assert torch.equal(decode_index(codes, scales), round_index(x.bfloat16()).float())


def test_packed_codes_hold_what_fp4_holds(seed) -> None:
    x = torch.randn(200, 128) * torch.exp2(torch.randint(-7, 7, (200, 128)).float())
    x[3], x[5, :64] = 0, 0
    codes, scales = pack_index(x.bfloat16())
    assert codes.shape == (200, 64) and scales.shape == (200, 4)
    values, scale = e2m1_as_e4m3(codes, scales)
    wanted, wanted_scale = encode_index(x.bfloat16())
    assert torch.equal(values.float(), wanted.float()) and torch.equal(scale, wanted_scale)
    assert torch.equal(decode_index(values, scale), round_index(x.bfloat16()).float())


@pytest.mark.parametrize("far", [0, 30])
def test_formats_of_keys_give_the_same_bits(far, seed) -> None:
    """Groups of a key that FP8 keys hold without loss, and too far apart for that."""
    case = Case((90, 41), topk=9, far=far, heads=4, dim=64, rope_dim=8, page=6)
    first, second = (
        run_op(Inputs.make(replace(case, key_format=each), seed)) for each in INDEX_FORMATS
    )
    assert torch.equal(first["indices"], second["indices"])
    assert torch.equal(first["scores"][0, :90], second["scores"][0, :90])


@pytest.mark.parametrize("key_format", INDEX_FORMATS)
def test_keys_are_written_where_they_are_read(key_format, seed) -> None:
    """Into pages that lie apart; what has no slot is dropped."""
    keys, size = torch.randn(7, 64).bfloat16(), 3
    row = IndexEntry(64, key_format).bytes
    frame = torch.full((4 * 512,), 0x55, dtype=torch.uint8)
    pool = frame.as_strided((4, size, row), (512, row, 1))
    slots = torch.tensor([11, 0, -1, 4, 12, 7, 2], dtype=torch.int32)
    write_keys(keys, slots, pool, is_rounded=True)
    is_kept = (slots >= 0) & (slots < 4 * size)
    kept = slots[is_kept].long()
    found = read_keys(pool, 64, kept // size, kept % size)
    assert torch.equal(found, round_index(keys[is_kept]).float())
    changed = (frame.view(4, 512) != 0x55).nonzero()
    assert changed[:, 1].max() < size * row
    assert set(changed[:, 0].tolist()) == set((kept // size).tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_keys_give_what_their_codes_give(dtype, seed) -> None:
    inputs = Inputs.make(Case((90, 41), topk=9, **SMALL), seed)
    tensors = dict(inputs.tensors)
    codes, scales = key_views(tensors["keys"])
    tensors["keys"] = decode_index(codes, scales).to(dtype)
    tensors["q"], tensors["weights"] = tensors["q"].to(dtype), tensors["weights"].to(dtype)
    options = {"topk": 9, "weight_scale": inputs.config.weight_scale}
    if dtype == torch.bfloat16:
        assert torch.equal(index_topk(**tensors, **options), run_op(inputs)["indices"])
    scores = torch.empty(2, 96)
    found = index_topk(**tensors, **options, rank="fp32", scores_out=scores)
    for token, count in enumerate((90, 41)):
        wanted = scores[token, :count].topk(9).indices.sort().values
        assert torch.equal(found[token], wanted.int())


def test_parts_and_bounds_change_nothing(seed, monkeypatch) -> None:
    inputs = Inputs.make(Case((90, 41, 77, 12), topk=9, **SMALL), seed)
    options = {"topk": 9, "weight_scale": inputs.config.weight_scale}
    whole = index_topk(**inputs.tensors, **options)
    module = sys.modules["dsv4.ops.index_topk"]
    monkeypatch.setattr(module, "MAX_SCORES", 200)
    assert torch.equal(index_topk(**inputs.tensors, **options), whole)
    assert torch.equal(index_topk(**inputs.tensors, **options, max_entries=90), whole)
    few = index_topk(**inputs.tensors, **options, max_entries=16)
    assert few.max() < 16


def test_no_tokens() -> None:
    inputs = Inputs.make(Case((5,)), 0).rows(0, 0)
    assert run_op(inputs)["indices"].shape == (0, 512)


def test_operator_is_sound_for_torch(seed) -> None:
    inputs = Inputs.make(Case((90, 41), topk=9, **SMALL), seed)
    identity = index_topk_runner_id(4, 32, 8, 9, 6, inputs.config.weight_scale)
    with torch.inference_mode(False):
        given = [
            x.clone() if name != "keys" else inputs.clone().tensors["keys"]
            for name, x in inputs.tensors.items()
        ]
        outputs = torch.zeros(2, 9, dtype=torch.int32), torch.zeros(2, 96).bfloat16()
        torch.library.opcheck(
            INDEX_TOPK.overload,
            (*given, *outputs, identity, None),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


BASE = Inputs.make(Case((90, 41), topk=9, **SMALL), 0).tensors


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": None}, TypeError, "q: got None"),
        ({"q": BASE["q"][:, :64]}, ValueError, "dim: index keys need a multiple of 32, got 16"),
        ({"weights": BASE["weights"][:1]}, ValueError, r"weights: got shape \(1, 4\), needs"),
        ({"lens": BASE["lens"].long()}, TypeError, "lens: got torch.int64, needs"),
        ({"keys": BASE["keys"][..., :35]}, ValueError, "keys: got shape"),
        ({"rope": BASE["rope"][:0]}, ValueError, "rope: got no rows"),
        ({"topk": 0}, ValueError, "topk must be at least 1, got 0"),
        ({"topk": 10_000}, ValueError, "topk must be at most 8192, got 10000"),
        ({"rank": "fp16"}, ValueError, r"rank must be one of \('bf16', 'fp32'\), got 'fp16'"),
        ({"out": torch.zeros(2, 9)}, TypeError, r"indices \(out\): got torch.float32, needs"),
    ],
)
def test_wrong_arguments_are_named(changes, error, message) -> None:
    options = {**BASE, "topk": 9, "weight_scale": 0.1, **changes}
    with pytest.raises(error, match=f"^{message}"):
        index_topk(**options)


def test_gradients_are_refused() -> None:
    with torch.inference_mode(False), torch.enable_grad():
        given = {name: x.clone() for name, x in BASE.items() if name != "keys"}
        given["q"].requires_grad_()
        with pytest.raises(ValueError, match=r"^q: requires grad"):
            index_topk(**given, keys=BASE["keys"], topk=9, weight_scale=0.1)
