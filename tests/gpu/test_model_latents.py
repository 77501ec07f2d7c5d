"""Random models with the released latents, 512 channels, on a GPU: what the CPU computes, from
FP8 entries and from rows, decoding and in chunks of thousands of tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4.cache.formats import KvFormat
from dsv4.config.model_config import ModelConfig
from dsv4.model.model import DeepseekV4
from dsv4.ops.attention.sparse_fmha_paged import SPARSE_FMHA_PAGED
from dsv4.ops.kv_insert import KV_INSERT
from tests.gpu.test_model_cuda import LENGTH, assert_same_cache, teacher_forced
from tests.model.tiny import quantized_config, random_model, tiny_config, with_mtp

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.stage("H")]

DEVICE = torch.device("cuda", 0)
LATENTS = dict(
    hidden_size=256,
    num_attention_heads=16,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=128,
    o_lora_rank=64,
    index_head_dim=64,
    index_topk=16,
    moe_intermediate_size=128,
    sliding_window=128,
    rates=(4, 128),
    max_position_embeddings=16384,
)
FORMATS = ("bf16", "fp8")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def _models(config: ModelConfig) -> tuple[DeepseekV4, DeepseekV4]:
    """The same weights on the CPU and on the GPU."""
    model = random_model(config, torch.bfloat16)
    twin = DeepseekV4(config, dtype=torch.bfloat16, device=DEVICE)
    twin.load_state_dict(model.state_dict())
    return model, twin


def _difference(actual: Tensor, expected: Tensor) -> Tensor:
    """Relative difference of every token's logits."""
    actual, expected = actual.cpu(), expected.cpu()
    return (actual - expected).norm(dim=-1) / expected.norm(dim=-1)


def _uses_kernels(model: DeepseekV4) -> bool:
    """Whether both operators of the model's caches bound kernels, not torch."""
    made = KvFormat.of(model.config, model.dtype, DEVICE, model.kv_format)
    known = (KV_INSERT.launches, SPARSE_FMHA_PAGED.launches)
    return made.name == model.kv_format and all(known)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("kinds", ["S", "C", "H", "SCH"])
def test_logits_are_the_cpus(kinds: str, kv_format: str, seed: int) -> None:
    """Without quantised linears, whose codes tip: whole, in chunks, and token by token.

    The bound is that of bfloat16 between two orders of sums; an expert or entry chosen otherwise at
    a near tie makes single tokens differ by more.
    """
    cpu, gpu = _models(tiny_config(kinds, **LATENTS))
    cpu.kv_format = gpu.kv_format = kv_format
    ids = torch.randint(0, cpu.config.vocab_size, (2, 150))
    expected = cpu(ids)
    for chunk in (150, 61, 1):
        found = _difference(gpu(ids.to(DEVICE), chunk=chunk), expected)
        print(f"{kinds}, {kv_format}, {chunk}: {found.median():.1e}, at most {found.max():.1e}")
        assert found.median() < 0.03, f"chunks of {chunk}: {found.median():.1e}, seed {seed}"
        assert (found > 0.1).float().mean() < 0.1, f"chunks of {chunk}, seed {seed}"
    assert _uses_kernels(gpu)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_quantised_model_stays_with_the_cpu(kv_format: str, seed: int) -> None:
    cpu, gpu = _models(quantized_config("SCH", **LATENTS))
    cpu.kv_format = gpu.kv_format = kv_format
    ids = torch.randint(0, cpu.config.vocab_size, (2, 150))
    found = _difference(gpu(ids.to(DEVICE), chunk=61), cpu(ids))
    assert found.median() < 0.1, f"{found.median():.1e}, seed {seed}"


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_replay_is_the_eager_forward_bit_for_bit(kv_format: str, rows: int, seed: int) -> None:
    _, gpu = _models(quantized_config("SCHC", **LATENTS))
    gpu.kv_format = kv_format
    lines = torch.randint(0, gpu.config.vocab_size, (rows, LENGTH)).tolist()
    predicted, cache = teacher_forced(gpu, lines, use_cuda_graphs=True)
    expected, reference = teacher_forced(gpu, lines, use_cuda_graphs=False)
    assert cache.kv_format.name == kv_format
    assert torch.equal(predicted, expected)
    assert_same_cache(cache, reference)


def test_both_formats_give_the_same_tokens_with_drafts_and_graphs(seed: int) -> None:
    """One kernel dequantises what the other reads as it is: values are the same, sums close."""
    _, gpu = _models(with_mtp(tiny_config("SCH", **LATENTS)))
    prompts = torch.randint(0, gpu.config.vocab_size, (3, 140)).tolist()
    found = []
    for kv_format in FORMATS:
        gpu.kv_format = kv_format
        for graphs in (True, False):
            result = gpu.generate(
                prompts, 20, num_draft_tokens=2, eos_token_id=(), use_cuda_graphs=graphs
            )
            found.append(result.tokens)
    # Replays are the eager forwards; rows of a plain model are not rounded, entries are.
    assert found[0] == found[1] and found[2] == found[3]


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_chunk_of_thousands_of_tokens(kv_format: str, seed: int) -> None:
    """8,192 tokens at once see what smaller chunks see."""
    _, gpu = _models(tiny_config("SCH", **LATENTS))
    gpu.kv_format = kv_format
    ids = torch.randint(0, gpu.config.vocab_size, (1, 9000), device=DEVICE)
    found = _difference(gpu(ids, chunk=8192), gpu(ids, chunk=1024))
    assert found.isfinite().all()
    assert found.median() < 0.03, f"{found.median():.1e}, seed {seed}"
