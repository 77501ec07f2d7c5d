"""Times of paged attention on a B200, as the time model has them."""

from __future__ import annotations

import pytest

from dsv4.kernels.attention.paged_plan import workspace_size
from dsv4.ops.attention.sparse_fmha_paged import SPARSE_FMHA_PAGED
from dsv4.simulator.timing import B200, predict
from dsv4.testing.harness import simulator
from dsv4.testing.paged_attention import Case, make_inputs
from dsv4.testing.paged_kernel import compiled_kernel

pytestmark = [pytest.mark.stage("D5c"), pytest.mark.slow]

pytest.importorskip("cutlass")

SIMULATOR = simulator("sm_100a")
PRO = {"heads": 128, "head_dim": 512, "kv_format": "fp8", "window": 128, "entries": 1024}


def modelled(compiled, case: Case, splits: int, seed: int) -> float:
    """Microseconds of the launches of a call, one request per token."""
    inputs = make_inputs(case, seed)
    scalars = (splits, B200.multiprocessors, 0, 0)
    call = inputs.call(scalars, workspace_size(case.config, {"T": case.tokens}, scalars))
    call.options["max_logits"] = call.outputs.pop("max_logits")[:0]
    return predict(compiled, *call.args, **call.options).microseconds


def test_one_token(seed) -> None:
    """Of Pro, in one split a key tile: at most 9 us."""
    case = Case(1, **PRO)
    assert modelled(compiled_kernel(SIMULATOR, case), case, 18, seed) <= 9


def test_two_terms_of_codes(seed) -> None:
    """Of Pro, 128 tokens: two for some pairs of CTAs, as the page counts them."""
    from dsv4.testing import codes_kernel

    case = Case(128, uniform=True, compute="fp8x2", **PRO)
    config = SPARSE_FMHA_PAGED.compiled_config(case.config, SIMULATOR.arch)
    compiled = SIMULATOR.compile(codes_kernel.build_sm100, config)
    assert modelled(compiled, case, 1, seed) == pytest.approx(34.4, rel=0.03)
