"""Stage D5c: both loops in one launch: Q is loaded once, every key once, for both products."""

from __future__ import annotations

import pytest

from dsv4.kernels.attention.fmha_plan import KEYS, Tiling
from tests.attention_cases import Case, make_inputs
from tests.unit.conftest import Backend, config_of

pytestmark = pytest.mark.stage("D5c")


@pytest.mark.parametrize(
    ("head_dim", "splits"), [(64, 3), pytest.param(512, 1, marks=pytest.mark.slow)]
)
def test_loads(backend: Backend, head_dim: int, splits: int, seed: int) -> None:
    """64-column boxes that TMA fetches: Q's once per CTA, each KV tile's once per 64 heads."""
    case = Case(heads=72, head_dim=head_dim, requests=((0, 1), (1, 1)))
    inputs = make_inputs(case, seed)
    result = backend.check(case, seed, splits)
    if result.report is None:
        pytest.skip("only the simulator counts loads")
    lens = inputs.options["compressed_lens"].tolist()
    windows = inputs.tensors[3][:2].tolist()
    tiles = sum(-(-keys // KEYS) for keys in (*lens, *windows))
    head_blocks, boxes = 2, Tiling(head_dim).head_dim // 64
    loads = head_blocks * boxes * (case.tokens * splits + tiles)
    assert result.report.launches[0].operations["tensor load"] == loads


def test_products(backend: Backend, seed: int) -> None:
    """Two MMAs of 64 x 64 x 16 per 16 columns of head_dim, one of 64 x 64 x 16 per 16 keys."""
    case = Case(heads=64, head_dim=64, top_k=128, window_rows=64, requests=((0, 1),), ragged=False)
    result = backend.run(backend.compile(config_of(case)), make_inputs(case, seed))
    if result.report is None:
        pytest.skip("only the simulator counts instructions")
    tiles = 2 + 1
    assert result.report.launches[0].operations["tcgen05.mma"] == tiles * (64 // 16 + KEYS // 16)
