"""Stage C: online softmax and normalised output over many tiles, without a window."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

from dsv4.kernels.attention import softmax
from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.sm100 import fmha
from dsv4.testing.attention import Case, Inputs, assert_attention_close, make_inputs
from dsv4.testing.attention_kernel import AttentionKernels, config_of

pytestmark = pytest.mark.stage("C")

CASE = Case(heads=64, head_dim=64, requests=((0, 1),), ragged=False)


def rising(keys: int, seed: int) -> Inputs:
    """Keys whose logits rise by about 60 from first to last: the maximum moves in every tile."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, n, 64, generator=generator) for n in (64, keys))
    q[..., 0], k[..., 0] = 16.0, 30 * torch.linspace(-1, 1, keys)
    case = Case(**{**vars(CASE), "top_k": keys})
    changed = {"q": q.bfloat16(), "compressed_kv": k.bfloat16()}
    return make_inputs(case, seed).replaced(**changed).without_window()


def check(backend: AttentionKernels, kernel, inputs: Inputs, seed: int) -> torch.Tensor:
    result = backend.run_all(kernel, inputs, seed=seed)
    expected_o, expected_lse = inputs.expected()
    # The rising keys are not of unit scale: bounds are relative to the largest value.
    scale = expected_o.abs().max().clamp(min=1)
    o, expected_o = (result.o / scale).bfloat16(), expected_o / scale
    assert_attention_close(o, expected_o, result.lse, expected_lse)
    return result.o


@pytest.mark.parametrize("tiles", [1, 2, 3, 5, 10, 18])
def test_tiles(backend: AttentionKernels, tiles: int, seed: int) -> None:
    """Full tiles; from the third on, pipeline stages and phases wrap."""
    inputs = make_inputs(Case(**{**vars(CASE), "top_k": 64 * tiles}), seed)
    check(backend, backend.compile(config_of(CASE)), inputs.without_window(), seed)


@pytest.mark.parametrize("keys", [1, 63, 65, 200, 333])
def test_ragged_last_tile(backend: AttentionKernels, keys: int, seed: int) -> None:
    inputs = make_inputs(Case(**{**vars(CASE), "top_k": keys}), seed)
    check(backend, backend.compile(config_of(CASE)), inputs.without_window(), seed)


def build_rescaling_always(config: FmhaConfig, options: str):
    """The kernel without the lazy reference: O is rescaled whenever a maximum grows at all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax, "RESCALE_THRESHOLD", 0.0)
        return fmha.build(config, options)


@pytest.mark.parametrize("keys", [64, 256, 640])
def test_rising_maxima(backend: AttentionKernels, keys: int, seed: int) -> None:
    """O is rescaled in every tile, and the lazy reference changes nothing but rounding."""
    inputs = rising(keys, seed)
    lazy, always = (
        check(backend, backend.compile(config_of(CASE), build), inputs, seed)
        for build in (fmha.build, build_rescaling_always)
    )
    torch.testing.assert_close(lazy, always, rtol=1e-2, atol=1e-2)


def test_falling_maxima(backend: AttentionKernels, seed: int) -> None:
    """The first tile holds the maximum: later weights vanish, and nothing is rescaled."""
    inputs = rising(256, seed)
    inputs = inputs.replaced(compressed_kv=inputs.compressed_kv.flip(1).contiguous())
    check(backend, backend.compile(config_of(CASE)), inputs, seed)
