"""Calls of the public `sparse_fmha_with_swa`, on any device, into poisoned outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.ops import sparse_fmha_with_swa
from dsv4.testing.attention import Inputs, assert_attention_close


def run_op(
    inputs: Inputs, num_splits: int | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """o and lse on the device of the inputs."""
    out = torch.full_like(inputs.q, torch.nan) if out is None else out
    o, lse = sparse_fmha_with_swa(
        *inputs.tensors, **inputs.options, num_splits=num_splits, out=out, return_lse=True
    )
    assert o is out
    return o, lse


def check_op(inputs: Inputs, num_splits: int | None = None) -> None:
    """Compare the operator with the oracle."""
    o, lse = run_op(inputs, num_splits)
    expected_o, expected_lse = inputs.expected()
    assert_attention_close(o, expected_o, lse, expected_lse)
