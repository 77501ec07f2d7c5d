"""Stage D5d: the sink in the epilogue, both modes, every edge, with and without splits."""

from __future__ import annotations

import pytest
import torch

from dsv4.kernels.attention.config import SINK_MODES
from dsv4.testing.attention import Case, make_inputs
from dsv4.testing.attention_kernel import AttentionKernels, config_of

pytestmark = pytest.mark.stage("D5d")


@pytest.mark.parametrize("sink_mode", SINK_MODES)
def test_infinite_sinks_by_definition(backend: AttentionKernels, sink_mode: str, seed: int) -> None:
    """What the contract says in words: one branch alone, or nothing."""
    case = Case(heads=16, requests=((0, 1),), ragged=False, sink_mode=sink_mode)
    inputs = make_inputs(case, seed)
    kernel = backend.compile(config_of(case))

    def run(sink: float, **changes: torch.Tensor) -> torch.Tensor:
        sinks = torch.full((16,), sink)
        return backend.run(kernel, inputs.replaced(sink_logits=sinks, **changes)).o

    if sink_mode == "softmax":
        assert (run(torch.inf) == 0).all()
        return
    no_keys = torch.zeros(1, dtype=torch.int32)
    window = run(0.0, compressed_lens=no_keys)
    compressed = run(0.0, swa_lens=torch.zeros(4, dtype=torch.int32))
    torch.testing.assert_close(run(torch.inf), window, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(run(-torch.inf), compressed, rtol=1e-2, atol=1e-3)


def test_splits_are_combined_in_order(backend: AttentionKernels, seed: int) -> None:
    """The same launch twice is the same to the bit; another number of splits to the rounding."""
    case = Case(heads=16, requests=((0, 1),), ragged=False, sink_mode="swa_gate", growing=True)
    inputs = make_inputs(case, seed)
    kernel = backend.compile(config_of(case))
    by_splits = [backend.run_all(kernel, inputs, splits, seed) for splits in (1, 2, 4)]
    again = backend.run(kernel, inputs, 4, "random" if backend.device == "cpu" else "", seed + 1)
    assert torch.equal(again.o, by_splits[-1].o)
    for result in by_splits[1:]:
        torch.testing.assert_close(result.o, by_splits[0].o, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(result.lse, by_splits[0].lse, rtol=0, atol=1e-4)
