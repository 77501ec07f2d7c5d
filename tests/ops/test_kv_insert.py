"""`kv_insert` on the CPU: what readers decode is what the reference writes; its errors."""

from __future__ import annotations

import pytest
import torch

from dsv4.kernels.kit.kv_entry import Fp8Entry
from dsv4.ops import kv_insert
from dsv4.ops.pools import Pool
from dsv4.ops.rms_norm_fp8 import rms_norm_rows
from dsv4.reference.cache_entry import pack_pages, unpack_pages
from dsv4.reference.norm import rms_norm
from dsv4.reference.quantize import fake_quantize_e4m3
from dsv4.testing.kv_insert import EPS, FILL, Case, Inputs, frame_of

pytestmark = pytest.mark.stage("rows")


def inserted(inputs: Inputs) -> torch.Tensor:
    case, pool = inputs.case, inputs.pool()
    options = {"is_rounded": case.is_rounded, "uniform_scale": case.uniform_scale}
    kv_insert(*inputs.tensors, pool, eps=EPS, **options)
    return pool


def keys_of(inputs: Inputs, pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys at the valid slots, and which latents these are."""
    config = inputs.case.config
    entry = None
    if config.kv_format == "fp8":
        entry = Fp8Entry(config.dim, config.rope_dim)
    found = Pool(pool, entry)
    valid = (inputs.slots >= 0) & (inputs.slots < found.slots)
    return found.read(inputs.slots[valid].long()).float(), valid


def turned(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """The last channels turned, as complex numbers, in fp64."""
    cos, sin = rotation.double().chunk(2, -1)
    tail = torch.view_as_complex(x[:, -rotation.shape[1] :].double().unflatten(1, (-1, 2)))
    back = torch.view_as_real(tail * torch.complex(cos, sin)).flatten(1)
    return torch.cat((x[:, : -rotation.shape[1]].double(), back), 1)


@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
@pytest.mark.parametrize("dim", [64, 128, 512])
@pytest.mark.parametrize("page", [1, 2, 61])
def test_keys_are_those_of_the_reference(kv_format, dim, page, seed) -> None:
    inputs = Inputs.make(Case(40, dim, kv_format, page=page), seed)
    keys, valid = keys_of(inputs, inserted(inputs))
    norm = rms_norm_rows(inputs.x, inputs.weight, EPS)
    wanted = rms_norm(inputs.x, inputs.weight, EPS).float()
    torch.testing.assert_close(norm.float(), wanted, rtol=2**-7, atol=0)
    rotation = inputs.rope[inputs.positions.clamp(0, len(inputs.rope) - 1)]
    expected = turned(norm, rotation)[valid]
    if dim > 64:
        plain = fake_quantize_e4m3(norm[valid][:, : dim - 64].float(), 64).bfloat16().float()
        assert torch.equal(keys[:, : dim - 64], plain)
    tail = expected[:, dim - 64 :].float()
    torch.testing.assert_close(keys[:, dim - 64 :], tail, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("uniform_scale", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 192, 512])
def test_both_formats_hold_the_same_keys(dim, uniform_scale, seed) -> None:
    options = {"uniform_scale": uniform_scale, "has_special_rows": True}
    keys = []
    for kv_format in ("bf16", "fp8"):
        inputs = Inputs.make(Case(60, dim, kv_format, **options), seed)
        keys.append(keys_of(inputs, inserted(inputs))[0])
    assert torch.equal(keys[0].nan_to_num(7e7), keys[1].nan_to_num(7e7))


def test_uniform_entries_are_what_the_reference_packs(seed) -> None:
    inputs = Inputs.make(Case(64, uniform_scale=True), seed)
    slots = torch.arange(64, dtype=torch.int32)
    rows = torch.zeros(1, 64, 512).bfloat16()
    kv_insert(*inputs.tensors[:4], slots, rows, eps=EPS, is_rounded=False)
    packed = torch.zeros(1, 64, 584, dtype=torch.uint8)
    kv_insert(*inputs.tensors[:4], slots, packed, eps=EPS, uniform_scale=True)
    wanted = pack_pages(rows, uniform_scale=True)[:, : 64 * 584]
    assert torch.equal(packed.flatten(1), wanted)
    scales = wanted[0, 64 * 576 :].view(64, 8)
    assert (scales[:, :7] == scales[:, :1]).all() and (scales[:, 7] == 0).all()
    assert torch.equal(unpack_pages(wanted, 64), Pool(packed, Fp8Entry(512)).decoded().data)


@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_nothing_else_is_written(kv_format, seed) -> None:
    """Other entries, and what lies between pages, keep their bytes; no slot at all is no write."""
    inputs = Inputs.make(Case(30, 512, kv_format, page=7), seed)
    pool, untouched = inserted(inputs), inputs.pool()
    flat = inputs.slots[(inputs.slots >= 0) & (inputs.slots < pool.shape[0] * 7)].long()
    changed = torch.ones(pool.shape[0] * 7, dtype=torch.bool)
    changed[flat] = False
    if kv_format == "bf16":
        same = pool.flatten(0, 1).view(torch.int16)[changed]
        assert torch.equal(same, untouched.flatten(0, 1).view(torch.int16)[changed])
    end = pool.shape[1] * pool.shape[2] * pool.element_size()
    gaps = frame_of(pool).view(pool.shape[0], -1)[:, end:]
    assert gaps.numel() and (gaps == FILL).all()
    kv_insert(*inputs.tensors[:4], torch.full_like(inputs.slots, -1), untouched, eps=EPS)
    assert (frame_of(untouched) == FILL).all()


def test_a_latent_does_not_depend_on_the_batch(seed) -> None:
    inputs = Inputs.make(Case(33), seed)
    keys, valid = keys_of(inputs, inserted(inputs))
    for i, row in enumerate(valid.nonzero().flatten().tolist()):
        one = [t[row : row + 1] for t in (inputs.x, inputs.positions, inputs.slots)]
        alone = Inputs(inputs.case, one[0], inputs.weight, inputs.rope, *one[1:])
        assert torch.equal(keys_of(alone, inserted(alone))[0], keys[i : i + 1])


def test_small_models_and_float32(seed) -> None:
    """Rows of any length, as test models have them, and pools of float32 that nothing rounds."""
    x, weight = torch.randn(5, 20), torch.randn(20)
    rope, pool = torch.randn(9, 8), torch.zeros(3, 4, 20)
    positions, slots = torch.arange(5, dtype=torch.int32), torch.arange(5, dtype=torch.int32)
    kv_insert(x, weight, rope, positions, slots, pool, eps=EPS, is_rounded=False)
    expected = turned(x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS) * weight, rope[:5])
    torch.testing.assert_close(pool.view(12, 20)[:5].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pool": torch.zeros(2, 3, 580, dtype=torch.uint8)}, ValueError, r"pool: got shape"),
        (
            {"pool": torch.zeros(2, 3, 512).half()},
            TypeError,
            "pool: got torch.float16, needs torch.bfloat16 or FP8 entries",
        ),
        ({"slots": torch.zeros(4, dtype=torch.int64)}, TypeError, "slots: got torch.int64"),
        ({"rope": torch.zeros(0, 64)}, ValueError, "rope: got no rows"),
        ({"weight": torch.zeros(512, requires_grad=True)}, ValueError, "weight: requires grad"),
        (
            {"x": torch.zeros(4, 100).bfloat16()},
            ValueError,
            "dim: got 100, FP8 rounding needs 64 n",
        ),
        (
            {"pool": torch.zeros(2, 3, 600, dtype=torch.uint8)[..., :584]},
            ValueError,
            "pool: got strides .* must be contiguous",
        ),
    ],
)
def test_bad_arguments_are_named(changes, error, message, seed) -> None:
    inputs = Inputs.make(Case(4), seed)
    names = ("x", "weight", "rope", "positions", "slots")
    arguments = {**dict(zip(names, inputs.tensors)), "pool": inputs.pool(), **changes}
    with pytest.raises(error, match=message):
        kv_insert(**arguments, eps=EPS)
