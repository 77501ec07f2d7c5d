"""Stage D5b: two launches, one per branch, merged outside by the formulas of the contract."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4.kernels.attention.config import SINK_MODES
from dsv4.testing.attention import Case, Inputs, assert_attention_close, make_inputs
from dsv4.testing.attention_kernel import AttentionKernels, config_of

pytestmark = pytest.mark.stage("D5b")


def merged(o_c, lse_c, o_w, lse_w, sink: Tensor, sink_mode: str) -> tuple[Tensor, Tensor]:
    """The definition, in float64: sinks of a few units and unit-scale logits cannot overflow it."""
    o_c, lse_c, o_w, lse_w, sink = (x.double() for x in (o_c, lse_c, o_w, lse_w, sink))
    gate = sink.exp() if sink_mode == "swa_gate" else torch.ones_like(sink)
    weight_c, weight_w = lse_c.exp(), gate * lse_w.exp()
    total = weight_c + weight_w
    denominator = total + sink.exp() if sink_mode == "softmax" else total
    o = weight_c[..., None] * o_c + weight_w[..., None] * o_w
    return o / denominator[..., None], total.log()


@pytest.mark.parametrize("sink_mode", SINK_MODES)
def test_two_passes(backend: AttentionKernels, sink_mode: str, seed: int) -> None:
    """The kernel with one branch empty, twice; merged they equal one launch and the oracle."""
    case = Case(heads=16, sink_mode=sink_mode, requests=((0, 1), (1, 1)), ragged=False)
    inputs = make_inputs(case, seed)
    kernel = backend.compile(config_of(case))
    no_sink = torch.full_like(inputs.sink_logits, -torch.inf)

    def branch(inputs: Inputs) -> tuple[Tensor, Tensor]:
        # In "softmax" mode the sink belongs to the merge, not to a branch.
        if sink_mode == "softmax":
            inputs = inputs.replaced(sink_logits=no_sink)
        result = backend.run_all(kernel, inputs, seed=seed)
        return result.o, result.lse

    compressed = branch(inputs.replaced(swa_lens=torch.zeros_like(inputs.swa_lens)))
    window = branch(inputs.replaced(compressed_lens=torch.zeros(case.tokens, dtype=torch.int32)))
    o, lse = merged(*compressed, *window, inputs.sink_logits, sink_mode)
    expected = inputs.expected()
    assert_attention_close(o.bfloat16(), expected[0], lse, expected[1])
    single = backend.run(kernel, inputs)
    assert_attention_close(single.o, o, single.lse, lse)
