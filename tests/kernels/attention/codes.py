"""Cases of the kernels that multiply FP8 codes, and the check of both architectures' tests."""

from __future__ import annotations

import torch

from dsv4.ops.attention.sparse_fmha_paged import SPARSE_FMHA_PAGED
from dsv4.testing.attention import assert_attention_close
from dsv4.testing.harness import SCHEDULES, Outcome, run_all, simulator
from dsv4.testing.paged_attention import Case, assert_paged_close, make_inputs

CTAS = 2  # so few that each has several tokens
BUILDERS = {"sm_90a": "build", "sm_100a": "build_sm100"}  # of `dsv4.testing.codes_kernel`


class SimulatedCodes:
    """The kernel of an architecture, simulated."""

    def __init__(self, arch: str) -> None:
        self.simulator = simulator(arch)

    def kernel_of(self, case: Case):
        """The kernel without those that launches with splits take, which other tests have."""
        from dsv4.testing import codes_kernel

        arch = self.simulator.arch
        config = SPARSE_FMHA_PAGED.compiled_config(case.config, arch)
        return self.simulator.compile(getattr(codes_kernel, BUILDERS[arch]), config)

    def check(
        self,
        case: Case,
        seed: int,
        inputs=None,
        schedules=SCHEDULES,
        is_unit_scale: bool = True,
    ) -> Outcome:
        """Run in every schedule, compare the bits, and compare with the oracle."""
        inputs = make_inputs(case, seed) if inputs is None else inputs
        kernel = self.kernel_of(case)
        outcome = run_all(self.simulator, kernel, lambda: call_of(inputs), seed, schedules)
        found = (outcome["o"], outcome["lse"], outcome["max_logits"])
        assert_paged_close(inputs, *found, is_unit_scale=is_unit_scale)
        if self.simulator.arch == "sm_100a" and case.compute == "fp8x2" and is_unit_scale:
            # Its tensor core adds codes in fp32: all that is asked of products of bf16 holds.
            o, lse, _ = inputs.expected()
            assert_attention_close(outcome["o"], o, outcome["lse"], lse)
        return outcome


def call_of(inputs, ctas: int = CTAS, has_largest: bool = True):
    """A call of the kernel, with every output, or without the largest scores."""
    config = inputs.case.config
    call = inputs.call((1, ctas, config.sliding_window, config.ratio))
    if not has_largest:
        call.options["max_logits"] = call.outputs.pop("max_logits")[:0]
    return call


def latents(heads: int, compute: str, *sizes: int, **options) -> Case:
    """Three tokens over uniform entries."""
    names = ("window", "entries", "window_page", "entry_page")
    options |= dict(zip(names, sizes))
    return Case(3, 1, heads, 512, "fp8", uniform=True, compute=compute, **options)


def shifted(pool: torch.Tensor) -> torch.Tensor:
    """The entries plus a vector that all have in common, packed anew with one scale each."""
    from dsv4.reference.cache_entry import pack_pages
    from dsv4.reference.paged_attention import decoded

    rows = decoded(pool, 512, 64).nan_to_num(0.0).unflatten(0, pool.shape[:2])
    rows = rows + 4 * torch.randn(512, generator=torch.Generator().manual_seed(3))
    packed = pack_pages(rows, uniform_scale=True)
    size, row = pool.shape[1:]
    return packed[:, : size * row].unflatten(1, (size, row))


def set_scale(inputs, token: int, place: int, scale: int) -> None:
    """Give an entry that a token names another scale for all of its groups."""
    case = inputs.case
    page, entry = divmod(int(inputs.compressed_indices[token, place]), case.entry_page)
    frame = inputs.compressed_pool[page].flatten()
    start = case.entry_page * 576 + entry * 8
    frame[start : start + 7] = scale
