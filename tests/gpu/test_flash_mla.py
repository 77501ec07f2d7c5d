"""FlashMLA's entry points on a GPU: arguments as engines pass them, against the torch code."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv4.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache
from dsv4.compat.kv_entry import ENTRY_BYTES
from dsv4.reference.cache_entry import pack_pages
from dsv4.testing.accuracy import assert_close
from dsv4.testing.attention import assert_lse_close

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.stage("op")]

DIM = 512
BLOCK_BYTES = 93_888  # of a block of many layers, as vLLM packs them
WINDOW_START, ENTRIES_START = 1_152, 1_152 + 65 * 576


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def pages_of(frame: Tensor, start: int, size: int) -> Tensor:
    """Pages of entries at `start` of each block, 0xFF elsewhere: filled, and as FlashMLA sees
    them."""
    packed = frame[:, start : start + size * ENTRY_BYTES]
    keys = torch.randn(len(frame), size, DIM).bfloat16()
    packed.copy_(pack_pages(keys)[:, : size * ENTRY_BYTES])
    return packed.view(len(frame), size, 1, ENTRY_BYTES)


def moved(call: dict) -> dict:
    """A call's tensors on the GPU; views of one frame stay views of one."""
    frames: dict[int, Tensor] = {}

    def there(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in frames:
            whole = x.as_strided((storage.nbytes() // x.element_size(),), (1,), 0)
            frames[storage.data_ptr()] = whole.cuda()
        return frames[storage.data_ptr()].as_strided(x.shape, x.stride(), x.storage_offset())

    return {name: there(x) if torch.is_tensor(x) else x for name, x in call.items()}


def assert_decodes(call: dict) -> tuple[Tensor, Tensor]:
    """Check a decode step on the GPU against the same on the CPU."""
    call |= {"block_table": None, "cache_seqlens": None, "head_dim_v": DIM}
    call |= {"tile_scheduler_metadata": None, "is_fp8_kvcache": True}
    expected = flash_mla_with_kvcache(**call)
    out, lse = flash_mla_with_kvcache(**moved(call))
    assert_close("out", out.cpu(), expected[0].float())
    assert lse.stride() == expected[1].stride()
    assert torch.equal(lse.cpu() == math.inf, expected[1] == math.inf)
    assert_lse_close(lse.cpu(), expected[1])
    return out, lse


@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("size", [2, 64])
def test_a_step_of_vllm(heads, size, seed) -> None:
    """Both pools in a packed block, index rows of a wider buffer, tokens that are padding: of
    length 0, and as SGLang has them of index 0 and length 1."""
    frame = torch.full((40, BLOCK_BYTES), 0xFF, dtype=torch.uint8)
    window = pages_of(frame, WINDOW_START, 64)
    entries = pages_of(frame, ENTRIES_START, size)
    wide = torch.full((5, 1, 1000), 12345, dtype=torch.int32)
    chosen = wide[..., :192]
    chosen.copy_(torch.randint(0, 40 * size, chosen.shape))
    near = torch.randint(0, 40 * 64, (5, 1, 128), dtype=torch.int32)
    near[3], near[4], chosen[3:] = -1, 0, -1
    assert_decodes(
        {
            "q": torch.randn(5, 1, heads, DIM).bfloat16(),
            "k_cache": window,
            "indices": near,
            "topk_length": torch.tensor([128, 7, 64, 0, 1], dtype=torch.int32),
            "attn_sink": torch.randn(heads),
            "extra_k_cache": entries,
            "extra_indices_in_kvcache": chosen,
            "extra_topk_length": torch.tensor([192, 0, 100, 0, 1], dtype=torch.int32),
        }
    )


def test_lists_of_16384_columns(seed) -> None:
    """FlashMLA's largest case."""
    frame = torch.full((300, 65 * 576), 0xFF, dtype=torch.uint8)
    assert_decodes(
        {
            "q": torch.randn(2, 2, 64, DIM).bfloat16(),
            "k_cache": pages_of(frame, 0, 64),
            "indices": torch.randint(-9, 300 * 64, (2, 2, 16_384), dtype=torch.int32),
            "topk_length": torch.tensor([16_000, 5_000], dtype=torch.int32),
        }
    )


@pytest.mark.parametrize("size", [(3, 1), (2, 3)])
def test_an_output_that_is_part_of_a_buffer(size, seed) -> None:
    """Of more heads, and of more tokens of a request: what it is not is left alone."""
    cache = pages_of(torch.zeros(4, 65 * 576, dtype=torch.uint8), 0, 64).cuda()
    q = torch.randn(*size, 64, DIM).bfloat16().cuda()
    call = (q, cache, None, None, DIM, None)
    indices = torch.randint(0, 256, (*size, 64), dtype=torch.int32).cuda()
    options = {"is_fp8_kvcache": True, "indices": indices}
    expected = flash_mla_with_kvcache(*call, **options)[0]
    buffer = torch.full((size[0] + 1, size[1] + 1, 72, DIM + 64), 7.0).bfloat16().cuda()
    out = buffer[: size[0], : size[1], :64, :DIM]
    assert flash_mla_with_kvcache(*call, **options, out=out)[0] is out
    assert torch.equal(out, expected)
    out.fill_(7)
    assert (buffer == 7).all()
    rows = torch.randn(300, 1, DIM).bfloat16().cuda()
    prefill = (q[:, 0], rows, indices[:, :1], 0.04)
    out = buffer[: size[0], 0, :64, :DIM]
    assert flash_mla_sparse_fwd(*prefill, out=out)[0] is out
    assert torch.equal(out, flash_mla_sparse_fwd(*prefill)[0])
