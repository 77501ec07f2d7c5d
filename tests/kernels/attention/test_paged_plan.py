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
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_every_architecture_has_products_of_codes(arch, compute) -> None:
    config = replace(CODES, compute=compute)
    assert paged_plan.has_kernel(config)
    assert SPARSE_FMHA_PAGED.serves(config, arch)
    assert SPARSE_FMHA_PAGED.compiled_config(config, arch).compute == compute
    labels = [
        label
        for label, found in SPARSE_FMHA_PAGED.aot_for(arch).items()
        if found.compute == compute
    ]
    assert len(labels) == 4
    values = replace(config, compute="bf16")
    assert splits(config, 1, arch) == splits(values, 1, arch) > 1
    assert splits(config, 128, arch) == 1


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
