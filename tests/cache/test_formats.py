"""Formats of keys: which one a model gets, and what pools of it hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4.cache.formats import KeyPool, KvFormat
from dsv4.cache.model_cache import ModelCache
from dsv4.config.model_config import ModelConfig
from dsv4.kernels.kit.kv_entry import Fp8Entry
from dsv4.ops.pools import Pool
from tests.model.tiny import quantized_config, tiny_config

pytestmark = pytest.mark.stage("cache")

CPU, GPU = torch.device("cpu"), torch.device("cuda")
QUANTIZED, PLAIN = quantized_config("S"), tiny_config("S")


def _format(config: ModelConfig, dtype: torch.dtype = torch.bfloat16, **options) -> KvFormat:
    return KvFormat.of(config, dtype, options.pop("device", CPU), **options)


def test_a_declared_quantisation_means_fp8_entries() -> None:
    assert _format(QUANTIZED).name == "fp8" and _format(QUANTIZED).is_rounded
    assert _format(PLAIN) == KvFormat("bf16", 32, 8, is_rounded=False)
    assert _format(QUANTIZED, name="bf16") == KvFormat("bf16", 128, 64, is_rounded=True)
    # Entries hold rotated channels in bf16: rows keep what a float32 model computes.
    assert _format(QUANTIZED, torch.float32).name == "fp32"
    assert _format(QUANTIZED, torch.float32, name="fp8").name == "fp8"


def test_a_gpu_gets_what_its_kernels_read() -> None:
    """The released sizes have kernels for FP8 entries, the tiny checkpoint's have some for rows."""
    assert _format(ModelConfig.flash(), device=GPU).name == "fp8"
    assert _format(replace(QUANTIZED, num_attention_heads=8), device=GPU).name == "bf16"
    # No kernel serves four heads: torch reads either, entries are smaller.
    assert _format(QUANTIZED, device=GPU).name == "fp8"


@pytest.mark.parametrize(
    "config, dtype, options, named",
    [
        (QUANTIZED, torch.bfloat16, dict(name="fp32"), "kv_format of a bfloat16 model .* 'fp32'"),
        (QUANTIZED, torch.float32, dict(name="bf16"), "kv_format of a float32 model .* 'bf16'"),
        (QUANTIZED, torch.bfloat16, dict(name="e4m3"), "kv_format .* 'e4m3'"),
        (QUANTIZED, torch.float16, {}, "dtype: .* torch.float16"),
        (PLAIN, torch.bfloat16, dict(name="fp8"), "head_dim: got 32"),
        (PLAIN, torch.bfloat16, dict(uniform_scale=True), "uniform_scale: .* no scales"),
    ],
)
def test_impossible_formats_are_refused(
    config: ModelConfig, dtype: torch.dtype, options: dict, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        _format(config, dtype, **options)


def test_a_uniform_scale_is_a_bool() -> None:
    with pytest.raises(TypeError, match="uniform_scale must be a bool, got 1"):
        _format(QUANTIZED, uniform_scale=1)


def _inserted(kv_format: KvFormat, latents: torch.Tensor) -> KeyPool:
    """A pool whose slots 1, 7, 8 ... hold the latents at positions 3, 4 ...; others are poison."""
    count, dim = latents.shape
    pool = KeyPool(kv_format, 4, 7, "cpu")
    pool.data.fill_(255 if kv_format.name == "fp8" else float("nan"))
    angles = torch.outer(torch.arange(40.0), torch.rand(kv_format.rope_dim // 2))
    rope = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.arange(3, 3 + count, dtype=torch.int32)
    slots = torch.tensor([1, *range(7, 6 + count)], dtype=torch.int32)
    pool.insert(latents, torch.rand(dim) + 0.5, 1e-6, rope, positions, slots)
    return pool


def test_formats_of_a_quantised_model_hold_the_same_values(seed: int) -> None:
    latents = torch.randn(9, 128).bfloat16()
    held = []
    for name in ("bf16", "fp8"):
        torch.manual_seed(seed)
        pool = _inserted(_format(QUANTIZED, name=name), latents)
        keys = Pool(pool.data, None if name == "bf16" else Fp8Entry(128)).decoded().data
        held.append(keys.flatten(0, 1))
    written = torch.zeros(28, dtype=torch.bool)
    written[[1, *range(7, 15)]] = True
    assert torch.equal(held[0][written], held[1][written])
    assert held[0][~written].isnan().all() and held[1][~written].isnan().all()
    assert len(held[0][written].unique()) > 500


def test_entries_of_a_uniform_scale_have_one(seed: int) -> None:
    config = replace(QUANTIZED, head_dim=256)
    latents = torch.randn(9, 256) * torch.logspace(-3, 0, 256)
    for uniform in (False, True):
        pool = _inserted(_format(config, uniform_scale=uniform), latents.bfloat16())
        records = 7 * Fp8Entry(256).record_bytes
        scales = pool.data[1].flatten()[records:].view(7, 8)[:, :3]
        assert (scales == scales[:, :1]).all() == uniform


def test_pages_of_entries_lie_as_engines_store_them() -> None:
    cache = ModelCache(ModelConfig.flash(), 2, 3, 1, torch.bfloat16, "cpu", max_tokens=1)
    csa, hca = cache.layers[2].entries, cache.layers[3].entries
    assert csa.data.shape == (3, 32, 584) and csa.data.stride() == (576 * 33, 584, 1)
    assert hca.data.shape == (3, 1, 584) and hca.data.stride(0) == 576 * 2
    window = cache.layers[0].window.data
    assert window.shape == (3, 128, 584) and window.stride(0) % 576 == 0
