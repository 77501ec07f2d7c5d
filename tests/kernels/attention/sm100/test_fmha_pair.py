"""Pairs of CTAs (head_dim 512, more than 64 heads): layouts, pipelines and the whole contract.

What the ladder of stages shows for single CTAs is shown here for pairs, from the layouts up. Few
CTAs are said to run at a time, so that each pair takes several items one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.sm100 import fmha
from dsv4.kernels.attention.sm100.fmha import ONE, FmhaKernel
from dsv4.kernels.attention.sm100.plan_1cta import KEYS
from dsv4.simulator import Deadlock, KernelFault
from dsv4.simulator.api import Simulation
from dsv4.simulator.timing import trace
from dsv4.simulator.timing.recorder import record
from dsv4.testing.attention import Case, assert_attention_close, make_inputs
from dsv4.testing.attention_kernel import AttentionKernels, assert_right, config_of
from dsv4.testing.mutate import Edit, at, check, mutated

ONE_TOKEN = Case(heads=128, head_dim=512, top_k=64, requests=((0, 1),), ragged=False)
# Branches of every kind, a padding token, ragged ends; growing scores raise references late.
MIXED = Case(
    heads=72,
    head_dim=512,
    top_k=150,
    window_rows=128,
    requests=((0, 2), (-1, 1), (1, 1)),
    sink_mode="swa_gate",
    growing=True,
    is_causal=True,
)
ONE_PAIR = 2  # CTAs: one pair takes every item


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


# ---- A, B: where scores and values are ----------------------------------------------------------


@pytest.mark.stage("A")
def test_each_column_of_q_meets_its_column_of_k(backend: AttentionKernels, seed: int) -> None:
    """512 one-hot queries and one key: the lse of query d is element d of the key, scaled."""
    case = Case(**{**vars(ONE_TOKEN), "top_k": 1, "requests": ((0, 4),)})
    inputs = make_inputs(case, seed)
    key = torch.randn(512).bfloat16()
    inputs = inputs.without_window().replaced(
        q=torch.eye(512).reshape(4, 128, 512).bfloat16(),
        compressed_kv=key.expand(4, 1, 512).contiguous(),
    )
    result = backend.run_all(backend.compile(config_of(case)), inputs, seed=seed, ctas=ONE_PAIR)
    expected = key.float() / 512**0.5
    torch.testing.assert_close(result.lse.flatten(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.stage("B")
def test_each_value_has_its_place(backend: AttentionKernels, seed: int) -> None:
    """Head h selects key h of 128, by a column of its own: its output is that key, bit for bit."""
    case = Case(**{**vars(ONE_TOKEN), "top_k": 128})
    inputs = make_inputs(case, seed).without_window()
    heads = torch.arange(128)
    column = (4 * heads + heads % 4 + 256) % 512
    keys, q = torch.randn(128, 512), torch.zeros(128, 512)
    keys[heads, column], q[heads, column] = 64.0, 256.0
    keys = keys.bfloat16()
    inputs = inputs.replaced(q=q.bfloat16()[None], compressed_kv=keys[None])
    result = backend.run_all(backend.compile(config_of(case)), inputs, seed=seed)
    assert torch.equal(result.o[0], keys)


# ---- C, D: the contract -------------------------------------------------------------------------


@pytest.mark.stage("D5d")
@pytest.mark.parametrize("splits", slow(1, 3))  # the contract has a pair in every schedule
def test_mixed_batch(backend: AttentionKernels, splits: int, seed: int) -> None:
    backend.check(MIXED, seed, splits, ONE_PAIR)


@pytest.mark.stage("C")
@pytest.mark.parametrize("tiles", [3, *slow(1, 2, 7, 18)])
def test_tiles(backend: AttentionKernels, tiles: int, seed: int) -> None:
    """Full tiles, of two tokens by one pair; the ring of six stages wraps at different places."""
    case = Case(**{**vars(ONE_TOKEN), "top_k": KEYS * tiles, "requests": ((0, 2),)})
    inputs = make_inputs(case, seed).without_window()
    result = backend.run_all(backend.compile(config_of(case)), inputs, seed=seed, ctas=ONE_PAIR)
    assert_right(result, inputs)


@pytest.mark.stage("C")
@pytest.mark.parametrize("keys", [33, *slow(1, 31, 63, 65, 200)])
def test_ragged_last_tile(backend: AttentionKernels, keys: int, seed: int) -> None:
    """The rows behind the last key hold NaN, in the columns of both CTAs."""
    case = Case(**{**vars(ONE_TOKEN), "top_k": 256, "requests": ((0, 2),)})
    inputs = make_inputs(case, seed).without_window()
    inputs.compressed_kv[:, keys:] = torch.nan
    inputs = inputs.replaced(compressed_lens=torch.full((2,), keys, dtype=torch.int32))
    result = backend.run_all(backend.compile(config_of(case)), inputs, seed=seed, ctas=ONE_PAIR)
    assert_right(result, inputs)


@pytest.mark.stage("C")
@pytest.mark.parametrize("order", ["rising", *slow("falling")])
def test_maxima_that_move(backend: AttentionKernels, order: str, seed: int) -> None:
    """O is rescaled in every tile, or in none after the first."""
    case = Case(**{**vars(ONE_TOKEN), "top_k": 256})
    inputs = make_inputs(case, seed).without_window()
    q, keys = inputs.q, inputs.compressed_kv
    q[..., 300] = 16.0
    keys[..., 300] = 64 * torch.linspace(-1, 1, 256) * (1 if order == "rising" else -1)
    result = backend.run_all(backend.compile(config_of(case)), inputs, seed=seed)
    expected_o, expected_lse = inputs.expected()
    # The moving column is not of unit scale: bounds are relative to the largest value.
    scale = expected_o.abs().max()
    o = (result.o / scale).bfloat16()
    assert_attention_close(o, expected_o / scale, result.lse, expected_lse)


@pytest.mark.stage("D2")
@pytest.mark.slow
@pytest.mark.parametrize("heads", [80, 88, 96, 104, 112, 120, 192, 256])
def test_head_counts(backend: AttentionKernels, heads: int, seed: int) -> None:
    """Rows past the last head are neither read nor written; 192 and 256 take two pairs."""
    case = Case(**{**vars(MIXED), "heads": heads, "top_k": 70, "requests": ((0, 1), (1, 1))})
    backend.check(case, seed, ctas=ONE_PAIR)


@pytest.mark.stage("D5d")
@pytest.mark.slow
def test_pairs_and_single_ctas_agree(backend: AttentionKernels, seed: int) -> None:
    """Both arrangements, to the rounding of the output."""

    def build(config: FmhaConfig, options: str):
        return FmhaKernel(
            config.head_dim,
            config.num_query_heads,
            config.sliding_window,
            config.top_k,
            is_causal=config.is_causal,
            sink_mode=config.sink_mode,
            cta_group=ONE,
        ).compile(options)

    inputs = make_inputs(MIXED, seed)
    pair, single = (
        backend.run(backend.compile(config_of(MIXED), builder), inputs) for builder in (None, build)
    )
    torch.testing.assert_close(pair.o, single.o, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(pair.lse, single.lse, rtol=1e-5, atol=1e-5)


# ---- what it costs ------------------------------------------------------------------------------


@pytest.mark.stage("D5c")
def test_each_element_is_loaded_once_per_pair(backend: AttentionKernels, seed: int) -> None:
    """TMA brings every tile of keys into one CTA or the other, and nothing else."""
    if backend.device != "cpu":
        pytest.skip("only the simulator counts bytes")
    # The kernel of the tests above.
    plain = {"heads": 128, "sink_mode": "softmax", "is_causal": False}
    case = Case(**{**vars(MIXED), **plain, "requests": ((0, 1), (1, 1))})
    inputs = make_inputs(case, seed)
    kernel = backend.compile(config_of(case))
    result = backend.run(kernel, inputs, ctas=ONE_PAIR)
    rows = [*inputs.compressed_lens.tolist(), *inputs.swa_lens[:2].tolist()]
    tile_bytes = sum(-(-keys // KEYS) for keys in rows) * KEYS * case.head_dim * 2
    box_bytes = KEYS * 64 * 2
    assert result.report.launches[0].operations["tensor load"] * box_bytes == tile_bytes
    # The same from the trace, which knows where the bytes land.
    q, lens = inputs.q, inputs.compressed_lens
    options = {
        "compressed_lens": lens,
        "lse": torch.empty(2, case.heads),
        "workspace": torch.empty(4),
    }
    options |= {"num_splits": 1, "num_ctas": ONE_PAIR}
    arguments = (*inputs.tensors, torch.empty_like(q))
    traces = record(Simulation.of_compiled(kernel), arguments, options, range)
    loads = [
        event
        for warp in traces[0].clusters[0].warps
        for _, events in warp.blocks
        for event in events
        if isinstance(event, trace.BulkLoad)
    ]
    assert all(len(load.targets) == 1 for load in loads), "no multicast"
    # Rows past a tensor's end are filled with zeros, not fetched.
    held = [inputs.compressed_kv.shape[1]] * 2 + [inputs.swa_kv.shape[1]] * 2
    fetched = sum(min(-(-keys // KEYS) * KEYS, most) for keys, most in zip(rows, held, strict=True))
    assert sum(load.size for load in loads) == fetched * case.head_dim * 2


@pytest.mark.stage("D5c")
def test_products(backend: AttentionKernels, seed: int) -> None:
    """16 instructions of 16 columns in both halves for S, 2 of 16 keys each for O, a tile."""
    if backend.device != "cpu":
        pytest.skip("only the simulator counts instructions")
    inputs = make_inputs(ONE_TOKEN, seed).without_window()
    result = backend.run(backend.compile(config_of(ONE_TOKEN)), inputs)
    assert result.report.launches[0].operations["tcgen05.mma"] == 256 // 16 + 2 * (KEYS // 16)


# ---- bugs put in --------------------------------------------------------------------------------

TWO_TOKENS = Case(**{**vars(ONE_TOKEN), "top_k": 192, "requests": ((0, 2),)})
# Maxima pass the threshold every other tile or so, in one half of it or the other.
CLIMBING = Case(**{**vars(ONE_TOKEN), "top_k": 640, "growing": True, "softmax_scale": 0.125})
SOFTMAX_WARPS = at("Fmha2Cta.softmax_warps")
# What is put in, and a case that exposes it.
BUGS: dict[str, tuple[Edit, Case]] = {
    # Each thread exponentiates the partial scores of half of the columns.
    "partial scores not exchanged": (
        at("Fmha2Cta._load_scores").assignment("scores[0, i]").value.replace("scores[0, i]"),
        ONE_TOKEN,
    ),
    # Every CTA loads the columns of the first one.
    "one half loaded twice": (
        at("DenseKv2Cta.copy").call("cute.copy").argument(1).expression("half").replace("0"),
        ONE_TOKEN,
    ),
    # Only the first CTA's masked rows are cleared: NaN from the other's.
    "rows of the second CTA kept": (
        at("Fmha2Cta._mask").call("zero_rows").argument(2).replace("{} + 64 * ctx.cta_rank"),
        MIXED,
    ),
    # A new token's Q lands while scores of the last one are still computed.
    "Q not waited for": (
        at("Fmha2Cta.query_warps").call("q_pipe.producer_acquire", nth=0).delete(),
        TWO_TOKENS,
    ),
    # The output is staged where the exchange of the next token writes.
    "stores not waited for": (
        SOFTMAX_WARPS.call("self._wait_for_stores", nth=0).delete(),
        TWO_TOKENS,
    ),
    # O of the last tile is read while it is being computed.
    "O not waited for": (
        SOFTMAX_WARPS.branch("keys.last > keys.first").test.replace("keys.first > keys.last"),
        TWO_TOKENS,
    ),
    # The two threads of a row keep maxima of their own.
    "row maxima not agreed": (
        at("any_in_row_pair")
        .expression("found != 0")
        .replace("cute.arch.vote_any_sync(condition)"),
        CLIMBING,
    ),
    # The first product of a token adds to the last token's.
    "first PV accumulates": (
        at("Fmha2Cta._pv").call("pv_mma.set", nth=0).argument(1).replace("True"),
        TWO_TOKENS,
    ),
}


def noticed(backend: AttentionKernels, build: Callable | None, case: Case, seed: int) -> bool:
    """Whether the checks that every test makes fail on what `build` compiles."""
    inputs = make_inputs(case, seed)
    try:
        kernel = backend.compile(config_of(case), build)
        assert_right(backend.run_all(kernel, inputs, seed=seed, ctas=ONE_PAIR), inputs)
    except (AssertionError, Deadlock, KernelFault):
        return True
    return False


@pytest.mark.parametrize("name", BUGS)
def test_bug_has_its_place(name: str) -> None:
    """What is renamed in a kernel is found here at once, in the slow rows too."""
    check(BUGS[name][0])


@pytest.mark.stage("E")
@pytest.mark.slow  # bugs of single CTAs are not, in test_fmha_regressions.py
@pytest.mark.parametrize("name", BUGS)
def test_bug_is_noticed(backend: AttentionKernels, tmp_path: Path, name: str, seed: int) -> None:
    if backend.device != "cpu":
        pytest.skip("a broken kernel may hang a GPU")
    edit, case = BUGS[name]
    build = mutated(fmha.build, tmp_path, edit)
    assert noticed(backend, build, case, seed), f"{name}: passes {case}"
    assert not noticed(backend, None, case, seed), f"{case} fails without the bug"
