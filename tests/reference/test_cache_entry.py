"""The 584-byte cache entry: offsets, page strides, and exactness."""

from __future__ import annotations

import pytest
import torch

from dsv4.reference import cache_entry
from dsv4.reference.quantize import fake_quantize_e4m3

pytestmark = pytest.mark.stage("reference")


@pytest.mark.parametrize("entries, stride", [(64, 37440), (2, 1728), (1, 1152), (72, 42048)])
def test_page_stride_is_a_multiple_of_576(entries: int, stride: int) -> None:
    assert cache_entry.page_bytes(entries) == stride


@pytest.mark.parametrize("entries", [64, 2])
def test_pages_hold_exactly_the_fake_quantised_vectors(entries: int, seed: int) -> None:
    kv = torch.randn(3, entries, 512) * torch.exp2(torch.randint(-9, 9, (3, entries, 1)).float())
    kv[0, 0, :64] = 0
    pages = cache_entry.pack_pages(kv)
    back = cache_entry.unpack_pages(pages, entries).float()
    assert torch.equal(back[..., :448], fake_quantize_e4m3(kv[..., :448], 64))
    assert torch.equal(back[..., 448:], kv[..., 448:].bfloat16().float())


def test_bytes_sit_where_the_layout_says(seed: int) -> None:
    kv = torch.zeros(1, 64, 512)
    kv[0, 5, 70] = 448 * 4.0  # group 1: scale 2^2, code of 448
    kv[0, 5, 511] = 1.5
    page = cache_entry.pack_pages(kv)[0]
    assert page[5 * 576 + 70] == 0x7E
    assert page[5 * 576 + 574 : 5 * 576 + 576].tolist() == [0xC0, 0x3F]
    scales = page[576 * 64 + 8 * 5 : 576 * 64 + 8 * 6].tolist()
    floor = scales[0]
    assert scales == [floor, 129, floor, floor, floor, floor, floor, 0]
    assert 2.0 ** (floor - 127) >= 1e-4 / 448 > 2.0 ** (floor - 128)
    assert page[584 * 64 :].count_nonzero() == 0


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="64 channels, got 250"):
        cache_entry.pack_entries(torch.zeros(1, 250))
    with pytest.raises(ValueError, match="at least 1168"):
        cache_entry.unpack_pages(torch.zeros(1, 1160, dtype=torch.uint8), 2)
