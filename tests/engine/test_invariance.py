"""The probe of what may add in another order beside other tokens, on a CPU."""

from __future__ import annotations

import torch

from dsv4.engine.engine import Engine
from dsv4.engine.invariance import _Probe, depends_on_neighbours
from dsv4.engine.sampling_params import SamplingParams
from dsv4.ops import rms_norm_fp8
from tests.engine.tiny_model import tiny_model


def test_sums_of_a_library_are_found_and_nothing_else() -> None:
    x = torch.randn(4, 128)
    with _Probe() as probe:
        x.softmax(-1)
        torch.nn.functional.linear(x, x)
        (x * 2).amax(-1).to(torch.bfloat16)
        torch.arange(4).sum()
        torch.nn.functional.embedding(torch.tensor([1, 2]), x)
        rms_norm_fp8(x, torch.ones(128), eps=1e-6)
    names = {name.split(".")[1] for name in probe.found}
    assert "_softmax" in names and {"linear", "addmm", "mm"} & names
    assert "rms_norm_fp8" in names  # its torch implementation served it
    assert not names & {"mul", "amax", "_to_copy", "to", "sum", "embedding"}


def test_on_a_cpu_requests_run_alone(seed: int) -> None:
    model = tiny_model(seed)
    assert depends_on_neighbours(model) == ["torch on cpu"]
    assert not Engine(model, 2, 64, batch_invariant=True).shares_forwards
    assert Engine(model, 2, 64).shares_forwards


def test_requests_that_need_probabilities_are_told_apart() -> None:
    assert not SamplingParams(4).adds_over_vocabulary
    assert SamplingParams(4, temperature=0.5).adds_over_vocabulary
    assert SamplingParams(4, logprobs=2).adds_over_vocabulary
