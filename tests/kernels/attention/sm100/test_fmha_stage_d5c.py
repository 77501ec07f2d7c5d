"""Stage D5c: both loops in one launch: Q is loaded once, every key once, for both products."""

from __future__ import annotations

import pytest

from dsv4.kernels.attention.sm100.plan_1cta import KEYS, Tiling
from dsv4.testing.attention import Case, make_inputs
from dsv4.testing.attention_kernel import AttentionKernels, config_of

pytestmark = pytest.mark.stage("D5c")


@pytest.mark.parametrize(
    ("head_dim", "splits"), [(64, 3), pytest.param(256, 1, marks=pytest.mark.slow)]
)
def test_loads(backend: AttentionKernels, head_dim: int, splits: int, seed: int) -> None:
    """Boxes of 64 columns that TMA fetches: Q's once per CTA, KV's half by each CTA of the pair."""
    case = Case(heads=72, head_dim=head_dim, requests=((0, 1), (1, 1)))
    inputs = make_inputs(case, seed)
    result = backend.check(case, seed, splits)
    if result.report is None:
        pytest.skip("only the simulator counts loads")
    lens = inputs.compressed_lens.tolist()
    windows = inputs.swa_lens[:2].tolist()
    tiles = sum(-(-keys // KEYS) for keys in (*lens, *windows))
    head_blocks, boxes = 2, Tiling(head_dim).head_dim // 64
    loads = head_blocks * boxes * (case.tokens * splits + tiles)
    assert result.report.launches[0].operations["tensor load"] == loads


def test_products(backend: AttentionKernels, seed: int) -> None:
    """Two MMAs of 64 x 64 x 16 per 16 columns of head_dim, one of 64 x 64 x 16 per 16 keys."""
    case = Case(heads=64, head_dim=64, top_k=128, window_rows=64, requests=((0, 1),), ragged=False)
    result = backend.run(backend.compile(config_of(case)), make_inputs(case, seed))
    if result.report is None:
        pytest.skip("only the simulator counts instructions")
    tiles = 2 + 1
    assert result.report.launches[0].operations["tcgen05.mma"] == tiles * (64 // 16 + KEYS // 16)


def test_a_pair_of_ctas_reads_keys_once(backend: AttentionKernels) -> None:
    """With more than 64 heads every KV load is a multicast to both CTAs, with fewer none is.

    A KV barrier expects the bytes of one chunk and both CTAs signal it: were each to fetch more
    than its half, the launches of `test_loads` would fault.
    """
    if backend.device != "cpu":
        pytest.skip("reads the PTX that only the simulator keeps")
    for heads, multicasts in ((64, 0), (72, 2)):
        ptx = backend.compile(config_of(Case(heads=heads))).artifacts.PTX
        loads = [line for line in ptx.splitlines() if "cp.async.bulk.tensor.3d.shared" in line]
        assert len(loads) == 3, "Q, compressed and window chunks"
        assert sum("multicast::cluster" in line for line in loads) == multicasts
