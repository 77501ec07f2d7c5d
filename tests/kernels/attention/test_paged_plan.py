"""What the paged kernels serve, and which launches multiply FP8 codes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsv4.kernels.attention import paged_plan
from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.ops.attention.sparse_fmha_paged import SPARSE_FMHA_PAGED

pytestmark = pytest.mark.stage("H")

SMS = 132
CODES = PagedFmhaConfig(512, 128, "fp8", compute="fp8x2")


def splits(config: PagedFmhaConfig, tokens: int, arch: str = "sm_90a") -> int:
    sizes = {"T": tokens, "k_w": 128, "k_c": 1024}
    return paged_plan.scalars(config, sizes, SMS, arch)[0]


@pytest.mark.parametrize("compute", ["fp8", "fp8x2"])
def test_hopper_alone_has_products_of_codes(compute) -> None:
    """Blackwell's kernels take the same calls: they multiply bf16 values, without another one to be
    compiled."""
    config = replace(CODES, compute=compute)
    assert paged_plan.has_kernel(config)
    labels = [
        label
        for label, found in SPARSE_FMHA_PAGED.aot_for("sm_90a").items()
        if found.compute == compute
    ]
    assert len(labels) == 4
    values = replace(config, compute="bf16")
    for arch in ("sm_100a", "sm_103a"):
        assert SPARSE_FMHA_PAGED.serves(config, arch)
        keys = [SPARSE_FMHA_PAGED.compiled_config(one, arch) for one in (config, values)]
        assert keys[0] == keys[1]
        for tokens in (1, 128):
            assert splits(config, tokens, arch) == splits(values, tokens, arch)
        others = SPARSE_FMHA_PAGED.aot_for(arch).values()
        assert not any(found.compute == compute for found in others)


def test_few_heads_share_the_kernel_of_values() -> None:
    for heads, compute in ((32, "bf16"), (40, "fp8x2")):
        config = replace(CODES, num_query_heads=heads)
        assert SPARSE_FMHA_PAGED.compiled_config(config, "sm_90a").compute == compute


@pytest.mark.parametrize("heads", [64, 128])
def test_launches_for_half_of_the_machine_multiply_codes(heads) -> None:
    """Smaller ones have splits, as those of values have, or one where that is asked for."""
    config = replace(CODES, num_query_heads=heads)
    enough = SMS // 2 * 64 // heads + 1
    assert splits(config, enough) == 1
    assert splits(config, 1) == splits(replace(config, compute="bf16"), 1) > 1
    assert splits(replace(config, batch_invariant=True), 1) == 1
    assert splits(replace(config, num_splits=3), 1024) == 3
