"""The clauses of the attention contract, on each of the four kernels.

Every kernel runs in the simulator, where races raise, and on a GPU of its architecture where there
is one. By default the smallest shapes with at least three tiles of keys, each clause once on every
kernel; the rest is slow. T = 0 never reaches a kernel: the operator's tests have it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dsv4.testing.accuracy import assert_same_bits
from dsv4.testing.attention import (
    Case,
    Inputs,
    assert_attention_close,
    make_inputs,
    poison_rows,
    widened,
)
from dsv4.testing.attention_kernel import (
    AttentionKernels,
    AttentionOutcome,
    assert_right,
    config_of,
)
from dsv4.testing.harness import Device, simulator

# The window is causal in one mode and a ring in the other, so that two compilations show it all: by
# default the first; the second is slow here, and every kernel has tests of its own in it.
IS_CAUSAL = {"swa_gate": True, "softmax": False}
# Infinite, swallowed by rounding, near the largest float, within reach of a score; and ordinary.
SINKS = (math.inf, -math.inf, 1e8, -1e8, 3e38, -3e38, 1e4, -1e4, 200.0, -200.0, 0.3, -1.2)
INT_MAX = torch.iinfo(torch.int32).max
FEW_CTAS = 4  # fewer than work items: persistent CTAs take several


@dataclass(frozen=True)
class Subject:
    """A kernel, by sizes that it serves, on a target."""

    kernels: AttentionKernels
    heads: int
    head_dim: int

    def case(self, **options) -> Case:
        """Four tiles of compressed keys, two of window keys; causal, with a gate."""
        options = {"top_k": 200, "window_rows": 100, "sliding_window": 20, **options}
        options = {"sink_mode": "swa_gate", "is_causal": True, **options}
        return Case(heads=self.heads, head_dim=self.head_dim, **options)

    def run(
        self, inputs: Inputs, splits: int = 1, schedule: str | None = None, **options
    ) -> AttentionOutcome:
        """Launch the kernel of the inputs' options."""
        kernel = self.kernels.compile(config_of(inputs))
        return self.kernels.run(kernel, inputs, splits, schedule, **options)


VARIANTS = {
    "1-CTA": ("sm_100a", 16, 64),
    "2-CTA": ("sm_100a", 72, 512),
    "heads-in-M": ("sm_90a", 40, 64),
    "swap-AB": ("sm_90a", 24, 64),
}
STAGES = {"sm_100a": "E", "sm_90a": "H"}


def _subjects(
    slow: tuple[str, ...] = (), targets: tuple[str, ...] = ("sim", "cuda")
) -> pytest.MarkDecorator:
    params = []
    for name, (arch, *_) in VARIANTS.items():
        marks = [pytest.mark.stage(STAGES[arch])]
        marks_of = {
            "sim": [*marks, pytest.mark.slow] if name in slow else marks,
            "cuda": [*marks, getattr(pytest.mark, arch.removesuffix("a").replace("_", ""))],
        }
        for target in targets:
            params.append(
                pytest.param((name, target), id=f"{name}-{target}", marks=marks_of[target])
            )
    return pytest.mark.parametrize("subject", params, indirect=True)


every_kernel = _subjects()
# Rows of 512 elements take seconds where 64 take tenths.
small_kernels = _subjects(slow=("2-CTA",))
every_kernel_on_its_gpu = _subjects(targets=("cuda",))


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Subject:
    """Kernels are compiled once in a process."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    name, target = request.param
    arch, heads, head_dim = VARIANTS[name]
    where = simulator(arch) if target == "sim" else Device()
    return Subject(AttentionKernels(where, FEW_CTAS), heads, head_dim)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def slow(*values: object) -> list:
    return [pytest.param(*value, marks=pytest.mark.slow) for value in values]


def edges(subject: Subject, sink_mode: str, is_causal: bool, seed: int) -> tuple[Inputs, Inputs]:
    """Every combination of empty and full branches, lengths out of range, padding of every kind,
    NaN in all that must not be read, extreme sinks; and the same said without what is clamped."""
    tokens = ((0, 2), (1, 2), (-1, 3), (2, 1), (3, 2))
    case = subject.case(requests=tokens, sink_mode=sink_mode, is_causal=is_causal)
    inputs = make_inputs(case, seed)
    generator = torch.Generator().manual_seed(seed)
    lens = int32(200, 0, 64, 0, 200, 130, 0, 200, 0, 130)
    swa_lens = int32(100, 0, 100, 7)
    keys = torch.randn(10, 200, subject.head_dim, generator=generator)
    window = torch.randn(4, 100, subject.head_dim, generator=generator)
    poison_rows(keys, lens)
    poison_rows(window, swa_lens)
    q, padding = inputs.q.clone(), inputs.request_ids < 0
    q[padding], keys[padding] = torch.nan, torch.nan
    sinks = torch.tensor(SINKS).repeat(-(-subject.heads // len(SINKS)))[: subject.heads]
    inside = inputs.replaced(
        q=q,
        compressed_kv=keys.bfloat16(),
        swa_kv=window.bfloat16(),
        swa_lens=swa_lens,
        compressed_lens=lens,
        sink_logits=sinks,
    )
    outside = inside.replaced(
        compressed_lens=int32(200, 0, 64, -5, INT_MAX, 130, -1, 201, -(2**31), 130),
        swa_lens=int32(100, -3, INT_MAX, 7),
        # Only a request that exists has a window: others are padding, below 0 and past the batch.
        request_ids=int32(0, 0, 1, 1, -1, 4, INT_MAX, 2, 3, 3),
    )
    return outside, inside


@pytest.mark.parametrize(
    ("sink_mode", "splits", "is_causal"),
    [
        ("swa_gate", 3, True),
        *slow(("softmax", 1, False), ("softmax", 3, False), ("softmax", 5, True)),
        *slow(("swa_gate", 1, True), ("swa_gate", 5, False), ("swa_gate", 2, True)),
        *slow(("softmax", 2, False)),
    ],
)
@every_kernel
def test_edges(subject: Subject, sink_mode: str, splits: int, is_causal: bool, seed: int) -> None:
    outside, inside = edges(subject, sink_mode, is_causal, seed)
    outcome = subject.run(outside, splits, "random" if subject.kernels.device == "cpu" else None)
    expected_o, expected_lse = inside.expected()
    assert_attention_close(outcome.o, expected_o, outcome.lse, expected_lse)
    padding = inside.request_ids < 0
    assert (outcome.o[padding] == 0).all() and (outcome.lse[padding] == -math.inf).all()


@pytest.mark.parametrize(
    ("sink_mode", "splits"), [("swa_gate", 2), *slow(("swa_gate", 9), ("softmax", 1))]
)
@every_kernel
def test_schedules(subject: Subject, sink_mode: str, splits: int, seed: int) -> None:
    """Equal bits whenever asynchronous work completes; maxima that grow, ragged lengths."""
    case = subject.case(
        requests=((0, 2), (-1, 1), (1, 1)),
        sink_mode=sink_mode,
        is_causal=IS_CAUSAL[sink_mode],
        growing=True,
    )
    subject.kernels.check(case, seed, splits)


@pytest.mark.parametrize(("top_k", "rows"), [(0, 100), *slow((200, 0), (0, 0))])
@pytest.mark.parametrize("splits", [1, pytest.param(3, marks=pytest.mark.slow)])
@small_kernels
def test_tensors_without_rows(
    subject: Subject, top_k: int, rows: int, splits: int, seed: int
) -> None:
    """An empty tensor has no address, and its branch no weight."""
    case = subject.case(top_k=top_k, window_rows=rows, ragged=False, full_windows=True)
    inputs = make_inputs(case, seed)
    outcome = subject.run(inputs, splits)
    assert_right(outcome, inputs)
    if top_k + rows == 0:
        assert (outcome.o == 0).all() and (outcome.lse == -math.inf).all()


@pytest.mark.parametrize("splits", [1, pytest.param(3, marks=pytest.mark.slow)])
@small_kernels
def test_no_requests(subject: Subject, splits: int, seed: int) -> None:
    """Padding tokens beside windows that are not there: nothing is read, and nothing weighs."""
    case = subject.case(requests=((-1, 2),), batch=0, ragged=False)
    outcome = subject.run(make_inputs(case, seed), splits)
    assert (outcome.o == 0).all()
    assert (outcome.lse == -math.inf).all()


@small_kernels
def test_strides(subject: Subject, seed: int) -> None:
    """q, KV and o may be slices of wider tensors; nothing beside the slice of o is written."""
    inputs = make_inputs(subject.case(requests=((0, 2), (-1, 1), (2, 1))), seed)
    o = widened(torch.full_like(inputs.q, torch.nan).to(subject.kernels.device))
    dense, strided = subject.run(inputs), subject.run(inputs.strided(), o=o)
    assert_right(dense, inputs)
    strided.assert_same_bits(dense, "strided against dense")
    o.fill_(torch.nan)
    assert o._base.isnan().all(), "a row or column beside the slice was written"


@pytest.mark.parametrize("splits", [3, pytest.param(1, marks=pytest.mark.slow)])
@small_kernels
def test_nan_in_a_key_shows(subject: Subject, splits: int, seed: int) -> None:
    """A NaN that a token sees is its output and lse; no other token's."""
    inputs = make_inputs(subject.case(requests=((0, 1), (1, 1), (-1, 1)), ragged=False), seed)
    inputs.compressed_kv[0, 70, 3] = torch.nan
    outcome = subject.run(inputs, splits)
    expected_o, expected_lse = inputs.expected()
    assert outcome.o[0].isnan().all() and outcome.lse[0].isnan().all()
    assert expected_o[0].isnan().all() and expected_lse[0].isnan().all()
    assert_attention_close(outcome.o[1:], expected_o[1:], outcome.lse[1:], expected_lse[1:])


@pytest.mark.parametrize("splits", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sign", [1, -1])
@small_kernels
def test_scores_of_thousands_under_huge_sinks(
    subject: Subject, sign: int, splits: int, seed: int
) -> None:
    """A sink that swallows every score leaves one branch, as an infinite one does, bit for bit."""
    case = subject.case(
        requests=((0, 1), (2, 1)), sink_mode="swa_gate", is_causal=True, ragged=False
    )
    inputs = make_inputs(case, seed)
    inputs = inputs.replaced(q=inputs.q * 2000)
    infinite, huge = (
        subject.run(inputs.replaced(sink_logits=torch.full((subject.heads,), sign * sink)), splits)
        for sink in (math.inf, 1e38)
    )
    assert huge.o.isfinite().all()
    assert_same_bits("o", huge.o, infinite.o)


@small_kernels
def test_a_token_is_the_same_alone_and_in_a_batch(subject: Subject, seed: int) -> None:
    """Bit for bit, at one number of splits; the last token of a request, as its window says."""
    inputs = make_inputs(subject.case(), seed)
    batch, alone = subject.run(inputs, 2), subject.run(inputs.of_tokens(slice(8, 9)), 2)
    assert_right(batch, inputs)
    assert_same_bits("o", alone.o[0], batch.o[8])
    assert_same_bits("lse", alone.lse[0], batch.lse[8])


@pytest.mark.parametrize("splits", [1, 3])
@every_kernel_on_its_gpu
def test_graph_and_streams(subject: Subject, splits: int, seed: int) -> None:
    """Graph replays, and launches on two streams at a time, give the bits of plain launches."""
    both = [make_inputs(subject.case(), seed + i) for i in range(2)]
    kernel = subject.kernels.compile(config_of(both[0]))
    device = subject.kernels.target
    plain = [subject.run(inputs, splits) for inputs in both]
    calls = [subject.kernels.call(inputs, splits) for inputs in both]
    for expected, found in zip(plain, device.on_streams(kernel, calls), strict=True):
        expected.assert_same_bits(found, "two streams")
    plain[0].assert_same_bits(device.replay(kernel, calls[0]), "graph")
