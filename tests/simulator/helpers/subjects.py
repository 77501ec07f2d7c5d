"""Compiled kernels of the package, and the launches that must notice a change of them: several
tiles of everything, few CTAs, so that rings wrap and each CTA has several tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from dsv4.kernels.attention.paged_plan import workspace_size
from dsv4.kernels.seam.config import tiling_of
from dsv4.ops.attention.sparse_fmha_paged import SPARSE_FMHA_PAGED
from dsv4.ops.kv_insert import KV_INSERT
from dsv4.testing import (
    compress,
    kv_insert,
    latent_rows,
    lowp,
    lowp_attention,
    lowp_codes,
    mhc_seam,
    paged_attention,
    rms_norm_fp8,
    sample_tokens,
    step_indices,
)
from dsv4.testing.attention import assert_attention_close
from dsv4.testing.harness import Call, Outcome, Simulator
from dsv4.testing.kernel_call import OpInputs, OpKernels
from dsv4.testing.paged_kernel import compiled_kernel
from dsv4.testing.relayout import RelayoutInputs, assert_turned
from tests.simulator.helpers.mutations import Run

SEED = 1
FEW_SMS = 2  # clusters have several tiles: rings wrap


class Subject(NamedTuple):
    """A compiled kernel, and its launches under a schedule."""

    compiled: Any
    runs: Callable[[str], list[Run]]


def run_of_call(
    make: Callable[[], Call], check: Callable[[Outcome], None], schedule: str = "eager"
) -> Run:
    """A launch whose tensors are new each time, and the check of what it left."""
    calls: list[Call] = []

    def prepare() -> tuple[tuple, dict]:
        calls.append(make().poisoned())
        return calls[-1].args, dict(calls[-1].options)

    def correct(positional: tuple, keywords: dict) -> bool:
        try:
            check(Outcome.of(calls[-1]))
        except AssertionError:
            return False
        return True

    return Run(prepare, correct, schedule)


Launch = tuple[OpInputs, dict[str, int]]  # inputs, and the scalars of a launch


def subject_of_op(
    arch: str, launches: Sequence[Launch], check: Callable[[OpInputs, Outcome], None]
) -> Subject:
    """The kernel of the inputs, which share a configuration, and these launches of it."""
    first = launches[0][0]
    kernels = OpKernels(first.op, Simulator(arch, has_lines=True))
    compiled = kernels.compile(first.config)

    def runs(schedule: str) -> list[Run]:
        return [
            run_of_call(partial(kernels.call, given, **scalars), partial(check, given), schedule)
            for given, scalars in launches
        ]

    return Subject(compiled, runs)


def subject_of_calls(
    compiled: Any, makes: Sequence[Callable[[], Call]], check: Callable[[Outcome], None]
) -> Subject:
    return Subject(
        compiled, lambda schedule: [run_of_call(make, check, schedule) for make in makes]
    )


# ---- attention over pages ------------------------------------------------------------------------
OPTIONS = {"ragged": True, "padded": True, "has_rope": True, "has_factor": True, "wild": True}
# Splits and CTAs. All work on one CTA; fewer CTAs than splits, which then cannot wait for each
# other; all at once.
PAGED_LAUNCHES = ((1, 1), (3, 3), (3, 132))
# The last ones of swap-AB are clusters; where these have no place, all at once without.
SWAP_AB_LAUNCHES = (*PAGED_LAUNCHES, (3, 9))
# The same of pieces: as many as there are, and room for more.
PIECES_LAUNCHES = ((2, 1), (3, 3), (2, 132))
# Of tokens of two pieces, of one, without keys.
PIECES_LENS = {"compressed_lens": (1200, 30, 0, 1180), "window_lens": (40, 33, 0, 40)}
PIECES = {
    "window": 40, "entries": 1200, "window_page": 53, "entry_page": 2, "batch_invariant": True,
    **OPTIONS, "ragged": False,
}  # fmt: skip
PAGED = {
    "swap_ab": ("sm_90a", paged_attention.Case(3, 1, 8, 64, "bf16", 40, 300, 53, 2, **OPTIONS)),
    "swap_ab_fp8": (
        "sm_90a", paged_attention.Case(3, 1, 16, 512, "fp8", 40, 200, 64, 53, **OPTIONS),
    ),
    "heads_m": ("sm_90a", paged_attention.Case(3, 1, 40, 64, "bf16", 40, 600, 53, 2, **OPTIONS)),
    "heads_m_latents": ("sm_90a", paged_attention.Case(3, 1, 72, 512, "bf16", 40, 200, **OPTIONS)),
    "heads_m_fp8": (
        "sm_90a", paged_attention.Case(3, 1, 72, 512, "fp8", 40, 200, 64, 53, **OPTIONS),
    ),
    # Splits by each token's own keys.
    "swap_ab_pieces": ("sm_90a", paged_attention.Case(4, 1, 8, 64, "bf16", **PIECES)),
    "heads_m_pieces": ("sm_90a", paged_attention.Case(4, 1, 64, 64, "bf16", **PIECES)),
    # Scores that grow and spread: O is rescaled in the middle, too.
    "one_cta": (
        "sm_100a",
        paged_attention.Case(
            3, 1, 8, 64, "bf16", 40, 600, 53, 2, softmax_scale=0.5, growing=True, **OPTIONS
        ),
    ),
    "one_cta_fp8": (
        "sm_100a",
        paged_attention.Case(
            3, 1, 16, 512, "fp8", 40, 600, 64, 53, softmax_scale=0.5, growing=True, **OPTIONS
        ),
    ),
    "two_ctas": (
        "sm_100a",
        paged_attention.Case(4, 1, 72, 512, "bf16", 40, 300, 53, 2, growing=True, **OPTIONS),
    ),
    "two_ctas_fp8": (
        "sm_100a",
        paged_attention.Case(4, 1, 72, 512, "fp8", 40, 300, 64, 53, growing=True, **OPTIONS),
    ),
}  # fmt: skip


@cache
def paged(name: str) -> Subject:
    arch, case = PAGED[name]
    inputs = paged_attention.make_inputs(case, SEED)
    if name.startswith("two_ctas"):
        # A token without keys behind others, in the same clusters.
        inputs.window_lens[-1] = inputs.compressed_lens[-1] = 0
    has_pieces = case.batch_invariant
    if has_pieces:
        lens = {name: torch.tensor(x, dtype=torch.int32) for name, x in PIECES_LENS.items()}
        inputs = replace(inputs, **lens)
    o, lse, largest = inputs.expected()

    def make(splits: int, ctas: int) -> Call:
        scalars = (splits, ctas, case.config.sliding_window, case.config.ratio)
        size = workspace_size(case.config, {"T": case.tokens}, (splits, PAGED_LAUNCHES[-1][1]))
        call = inputs.call(scalars, size)
        if splits > 1 and not has_pieces:
            # The largest scores would make it one split.
            call.options["max_logits"] = call.outputs.pop("max_logits")[:0]
        return call

    def check(found: Outcome) -> None:
        assert_attention_close(found["o"], o, found["lse"], lse)
        if has_pieces:
            torch.testing.assert_close(found["max_logits"], largest)

    compiled = compiled_kernel(Simulator(arch, has_lines=True), case)
    if has_pieces:
        return subject_of_calls(compiled, [partial(make, *one) for one in PIECES_LAUNCHES], check)
    # Only Hopper's splits wait for each other.
    launches = PAGED_LAUNCHES if arch == "sm_90a" else PAGED_LAUNCHES[:2]
    if name.startswith("swap_ab"):
        launches = SWAP_AB_LAUNCHES
    return subject_of_calls(compiled, [partial(make, *launch) for launch in launches], check)


# Scores that grow and spread: O is rescaled in the middle, too.
PAGED_CODES = paged_attention.Case(
    5, 1, 72, 512, "fp8", 40, 200, 64, 53,
    uniform=True, compute="fp8x2", growing=True, **OPTIONS,
)  # fmt: skip


@cache
def paged_codes(arch: str) -> Subject:
    """Products of FP8 codes: a launch without splits, of two CTAs. On Hopper each has a head tile.
    On Blackwell they are one cluster, which goes through a token without keys, too, and a second
    launch is not asked for the largest scores, which make the warps of a row wait once more."""
    from dsv4.testing import codes_kernel

    build = {"sm_90a": codes_kernel.build, "sm_100a": codes_kernel.build_sm100}[arch]
    inputs = paged_attention.make_inputs(PAGED_CODES, SEED)
    if arch == "sm_100a":
        inputs.window_lens[2] = inputs.compressed_lens[2] = 0
    largest = inputs.expected()[2]
    target = Simulator(arch, has_lines=True)
    config = SPARSE_FMHA_PAGED.compiled_config(PAGED_CODES.config, arch)
    make = partial(inputs.call, (1, 2, PAGED_CODES.config.sliding_window, PAGED_CODES.config.ratio))

    def without_largest() -> Call:
        call = make()
        call.options["max_logits"] = call.outputs.pop("max_logits")[:0]
        return call

    def check(found: Outcome) -> None:
        scores = found["max_logits"] if "max_logits" in found.outputs else largest
        paged_attention.assert_paged_close(inputs, found["o"], found["lse"], scores)

    makes = [make] if arch == "sm_90a" else [make, without_largest]
    return subject_of_calls(target.compile(build, config), makes, check)


# ---- seam, indexer, compressor -------------------------------------------------------------------
@cache
def seam(arch: str) -> Subject:
    """Every number of tokens a pass, on one cluster, and parts in two launches and in one."""
    inputs = mhc_seam.Inputs.make(mhc_seam.Case(11, 384), SEED)
    ways = [(size, 0, 0) for size in tiling_of(inputs.config).pass_sizes] + [(1, 1, 0), (1, 1, 1)]
    names = ("pass_tokens", "parts", "is_joined")
    launches = [(inputs, {"num_clusters": 1, **dict(zip(names, way))}) for way in ways]
    return subject_of_op(
        arch, launches, lambda given, found: mhc_seam.assert_seam_close(given, found.outputs)
    )


@cache
def compressor(arch: str) -> Subject:
    """Chunks longer than rings: what the first blocks read is overwritten by the last tokens."""
    inputs = compress.Inputs.make(compress.Case((5, 0, 18, 2), (21, 9, 20, -1), 21), SEED)
    return subject_of_op(
        arch, [(inputs, {})], lambda given, found: compress.assert_step(given, found.scratch)
    )


@cache
def latents(arch: str) -> Subject:
    """All tasks of a layer with an indexer, several blocks of a request, rows in turns."""
    case = latent_rows.Case((5, 6, 0), (13, 9, -1), 13)
    return subject_of_op(
        arch,
        [(latent_rows.Inputs.make(case, SEED), {"num_ctas": 1})],
        lambda given, found: latent_rows.assert_tasks(given, {**found.outputs, **found.scratch}),
    )


# ---- rows, indices of a step ---------------------------------------------------------------------
@cache
def norm(arch: str, dim: int) -> Subject:
    """More rows than stages, the last ones in part, on one CTA."""
    inputs = rms_norm_fp8.Inputs.make(rms_norm_fp8.Case(45, dim), SEED)

    def check(given: rms_norm_fp8.Inputs, found: Outcome) -> None:
        for name, tensor in given.expected().items():
            rms_norm_fp8.assert_same_codes(name, found[name], tensor)

    return subject_of_op(arch, [(inputs, {"num_ctas": 1})], check)


@cache
def insert(arch: str) -> Subject:
    """Latents in turns of a CTA, with entries of a pool."""
    inputs = kv_insert.Inputs.make(kv_insert.Case(40, 128), SEED)
    kernels, pools = OpKernels(KV_INSERT, Simulator(arch, has_lines=True)), []

    def make() -> Call:
        pools.append(inputs.pool())
        return inputs.call(kernels.planned_for, {"pool": pools[-1]}, num_ctas=1)

    def check(found: Outcome) -> None:
        kv_insert.assert_same_pool(kv_insert.frame_of(pools[-1]), inputs)

    return subject_of_calls(kernels.compile(inputs.config), [make], check)


@cache
def relayout(arch: str) -> Subject:
    """Tiles that are whole, and parts of some."""
    inputs = RelayoutInputs.make((2, 3, 25, 40), SEED)
    return subject_of_op(arch, [(inputs, {})], assert_turned)


@cache
def indices(arch: str) -> Subject:
    """Requests with drafts, padding among them."""
    inputs = step_indices.Inputs.make(step_indices.Case(37, 3, 40), SEED)

    def check(given: step_indices.Inputs, found: Outcome) -> None:
        for name, tensor in step_indices.expected(given).items():
            assert torch.equal(found[name], tensor), name

    return subject_of_op(arch, [(inputs, {"num_ctas": 1})], check)


# ---- quantised attention, sampler ----------------------------------------------------------------
LOWP = {
    "rows": lowp.Case(
        1, 2, 1, 200, 810, 64,
        options={"qk": "fp8", "qk_quant_gran": "per_row", "causal": "bottom_right"},
    ),
    "wide": lowp.Case(1, 2, 1, 200, 810, 128, options={"causal": "bottom_right"}),
    "halves": lowp.Case(
        1, 2, 1, 200, 810, 128,
        options={"pv": "fp16", "pv_accum_dtype": "fp16+fp32", "causal": "bottom_right"},
    ),
    "masked": lowp.Case(1, 2, 1, 200, 810, 64, options={"mask": "bool", "causal": "bottom_right"}),
    # Behind a launch that finds the largest queries of a head; warps that show each other theirs.
    "heads": lowp.Case(
        1, 2, 1, 200, 810, 64,
        options={"qk": "fp8", "qk_quant_gran": "per_head", "causal": "bottom_right"},
    ),
    "blocks": lowp.Case(
        1, 2, 1, 200, 810, 64,
        options={"qk": "fp8", "qk_quant_gran": "per_64", "causal": "bottom_right"},
    ),
    "pairs": lowp.Case(
        1, 2, 1, 200, 810, 64,
        options={"qk_quant_gran": "per_warp", "geometry": "sm89", "causal": "bottom_right"},
    ),
    # Weights in blocks, at whose place warpgroups take turns, since no tile is cut by a diagonal.
    "plain": lowp.Case(1, 2, 1, 200, 810, 64),
    # Sums of all tiles in one accumulator; of halves of a tile, in fp16.
    "summed": lowp.Case(
        1, 2, 1, 200, 810, 64, options={"pv_accum_dtype": "fp32", "causal": "bottom_right"},
    ),
    "flushed": lowp.Case(
        1, 2, 1, 200, 810, 64, options={"pv_accum_dtype": "fp32+fp16", "causal": "bottom_right"},
    ),
    # Two warpgroups, which see different tiles; sums of a part of the channels at a time.
    "widest": lowp.Case(1, 2, 1, 200, 750, 256, options={"causal": "bottom_right"}),
    "widest halves": lowp.Case(
        1, 2, 1, 200, 810, 256,
        options={
            "pv": "fp16", "pv_accum_dtype": "fp16+fp32", "geometry": "sm89",
            "causal": "bottom_right",
        },
    ),
}  # fmt: skip


@cache
def quantized(name: str) -> Subject:
    """More tiles of keys than stages, both kinds of tiles, several work tiles of a CTA, some of
    them shorter than the rings."""
    case = LOWP[name]
    short = replace(case, batch=5, queries=100, keys=100)
    launches = [
        (lowp_attention.Inputs.make(given, SEED), {"num_ctas": ctas})
        for given, ctas in ((short, 1), (case, 1), (case, 2))
    ]
    if name in ("rows", "heads", "blocks", "summed", "flushed"):
        # A second tile that is masked: no whole one's step has waited for the first one's values.
        masked = replace(case, queries=100, keys=200)
        launches.append((lowp_attention.Inputs.make(masked, SEED), {"num_ctas": 1}))
    return subject_of_op(
        "sm_90a",
        launches,
        lambda given, found: lowp_attention.assert_attention(
            given, found, tiles=given.summed_tiles
        ),
    )


# Of Blackwell: scales of keys in the ring, all of Tensor Memory, a mask; in FP4, with the means of
# queries.
BLACKWELL_LOWP = {
    "rows": lowp.Case(
        1, 2, 1, 300, 810, 64,
        options={"qk": "fp8", "qk_quant_gran": "per_row", "causal": "bottom_right"},
    ),
    "wide": lowp.Case(
        1, 2, 1, 300, 600, 128,
        options={"qk": "fp8", "qk_quant_gran": "per_64", "causal": "top_left"},
    ),
    "masked": lowp.Case(1, 2, 1, 300, 600, 64, options={"mask": "bool", "causal": "bottom_right"}),
    # Two heads of keys: scales of the head before are others.
    "fp4": lowp.Case(
        1, 2, 2, 300, 810, 64, "qbias",
        options={"qk": "nvfp4", "smooth_q": True, "causal": "bottom_right"},
    ),
}  # fmt: skip


@cache
def blackwell_quantized(name: str) -> Subject:
    """More tiles of keys than stages, and work tiles that are shorter than the rings."""
    case = BLACKWELL_LOWP[name]
    short = replace(case, queries=600, keys=100)
    launches = [
        (lowp_attention.Inputs.make(given, SEED), {"num_ctas": ctas})
        for given, ctas in ((short, 1), (case, 1), (case, 2))
    ]
    return subject_of_op(
        "sm_100a",
        launches,
        lambda given, found: lowp_attention.assert_attention(given, found, has_fp32_sums=True),
    )


CODES = {
    "sm_90a": {"pv_accum_dtype": "fp32", "smooth_v": True},
    "sm_100a": {"qk": "nvfp4", "smooth_q": True},
}


@cache
def codes(arch: str = "sm_90a") -> Subject:
    """Codes of keys and values, and their scales; on Blackwell in FP4."""
    inputs = lowp_codes.KvInputs.make(lowp.Case(1, 2, 1, 1, 400, 64, options=CODES[arch]), SEED)
    return subject_of_op(arch, [(inputs, {})], lowp_codes.assert_codes)


@cache
def sampler(arch: str, truncates: bool) -> Subject:
    """A cluster a row: few likely tokens, ties of the best, all equal."""
    inputs = sample_tokens.Inputs.make(sample_tokens.Case(6, 1, 2056, truncates), SEED)
    inputs = inputs.of([0, 2, 5])

    def check(given: sample_tokens.Inputs, found: Outcome) -> None:
        assert torch.equal(found["tokens"], sample_tokens.expected(given))

    return subject_of_op(arch, [(inputs, {})], check)
