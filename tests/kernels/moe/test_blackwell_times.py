"""Times of the experts on a B200, as the time model has them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from dsv4.kernels.moe.config import FP4_GROUP, K_BLOCK, ExpertsConfig
from dsv4.kernels.moe.sm100.plan import choose, tilings
from dsv4.simulator.api import Simulation
from dsv4.simulator.timing import B200, predict
from dsv4.testing.harness import Simulator
from dsv4.testing.moe import MATRICES, Case, Inputs, Weight, make_ids, make_x

pytestmark = [pytest.mark.stage("moe"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

FLASH = Case(1, 4096, 2048, 256, 6, is_tiled=True)
PRO = Case(1, 7168, 3072, 384, 6, is_tiled=True)
DRAW = 2  # in which 64 tokens have 200 experts of Flash


class Zeros(Weight):
    """A weight of zeros, which are so in any order: what no launch reads is never touched."""

    @classmethod
    def make(cls, shape: tuple[int, ...], scale: tuple[int, ...], dtype: torch.dtype) -> Zeros:
        codes, scales = (torch.zeros(sizes, dtype=torch.uint8) for sizes in (shape, scale))
        return cls(codes.view(dtype), scales.view(torch.float8_e8m0fnu))

    def prepared(self, form: str) -> Weight:
        return self


def routed(case: Case, matrix: str) -> Weight:
    """All experts' in FP4."""
    rows, columns = case.shape(matrix)
    lead = (case.experts, rows)
    return Zeros.make((*lead, columns // 2), (*lead, columns // FP4_GROUP), torch.int8)


def shared(case: Case, matrix: str) -> Weight:
    """The shared expert's in FP8."""
    rows, columns = case.shape(matrix)
    scale = (rows // K_BLOCK, columns // K_BLOCK)
    return Zeros.make((rows, columns), scale, torch.float8_e4m3fn)


@cache
def simulation(config: ExpertsConfig) -> Simulation:
    """Of both products and of the sum."""
    from dsv4.kernels.moe.sm100 import experts

    return Simulation.of_compiled(Simulator("sm_100a").compile(experts.build, config))


def modelled(case: Case) -> tuple[float, int]:
    """Microseconds of a call with lists given, and how many experts have a token."""
    generator = torch.Generator().manual_seed(DRAW)
    ids = make_ids(case, generator)
    weights = [{name: of(case, name) for name in MATRICES} for of in (routed, shared)]
    inputs = Inputs(case, make_x(case, generator), *weights, ids, torch.ones(ids.shape))
    tiling = choose(case.config, case.tokens, case.experts)
    group_tokens = tilings(case.config)[tiling].tokens
    call = inputs.experts_call(tiling, B200.multiprocessors, group_tokens)
    found = predict(simulation(case.config), *call.args, **call.options)
    assert len(found.launches) == 3
    return found.microseconds, len(ids.unique())


# docs/design/experts_sm100.md.
@pytest.mark.parametrize("tokens, experts, expected", [(1, 6, 20.2), (4, 24, 55.0), (64, 200, 407)])
def test_flash(tokens: int, experts: int, expected: float) -> None:
    """64 tokens: at most 440 us."""
    found, drawn = modelled(replace(FLASH, tokens=tokens))
    assert drawn == experts
    assert found == pytest.approx(expected, rel=0.02)


def test_one_token_of_pro() -> None:
    assert modelled(PRO)[0] == pytest.approx(45.0, rel=0.02)
