"""Stage B: the scores themselves as weights, so that P V is tested without a softmax."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

from dsv4.testing.attention import Case, Inputs, make_inputs
from dsv4.testing.attention_kernel import AttentionKernels, config_of
from tests.kernels.attention.sm100.stage_kernels import build_identity

pytestmark = pytest.mark.stage("B")


def products_of(backend: AttentionKernels, case: Case, inputs: Inputs) -> list[torch.Tensor]:
    """bf16(Q K^T) K of the kernel, [T, n_h, d], in every schedule."""
    kernel = backend.compile(config_of(case), build_identity)
    inputs = inputs.replaced(swa_lens=torch.zeros(case.batch, dtype=torch.int32))
    shape = (case.tokens, case.heads, case.head_dim)
    results = []
    for schedule in backend.schedules:
        workspace = torch.full((torch.Size(shape).numel(),), torch.nan, device=backend.device)
        found = backend.run(kernel, inputs, schedule=schedule, workspace=workspace).workspace
        results.append(found.reshape(shape))
    return results


@pytest.mark.parametrize(
    "case",
    [
        Case(heads=64, head_dim=64, top_k=64, requests=((0, 1),), ragged=False),
        Case(heads=64, head_dim=128, top_k=256, requests=((0, 2),), ragged=False),
        Case(heads=72, head_dim=512, top_k=320, requests=((0, 1),), ragged=False),
    ],
    ids=str,
)
def test_identity_softmax(backend: AttentionKernels, case: Case, seed: int) -> None:
    inputs = make_inputs(case, seed)
    q, keys = (x.float() for x in inputs.tensors[:2])
    scores = torch.einsum("thd,tkd->thk", q, keys)
    expected = torch.einsum("thk,tkd->thd", scores.bfloat16().float(), keys)
    for actual in products_of(backend, case, inputs):
        # A score at a rounding boundary may round the other way: bf16 has 8 bits.
        relative = (actual - expected).norm() / expected.norm()
        assert relative < 1e-4, f"relative error {relative:.1e}"


@pytest.mark.parametrize("head_dim", [64, 512])
def test_each_value_has_its_place(backend: AttentionKernels, head_dim: int) -> None:
    """Row h selects key h alone, among 128: its output must be that key, bit for bit."""
    case = Case(heads=64, head_dim=head_dim, top_k=128, requests=((0, 1),), ragged=False)
    # Key k is the unit vector k % d scaled by 1 + k / 128, so no two keys are equal.
    keys = torch.zeros(1, 128, head_dim)
    keys[0, torch.arange(128), torch.arange(128) % head_dim] = 1 + torch.arange(128) / 128
    q = torch.zeros(1, 64, head_dim)
    q[0, torch.arange(64), torch.arange(64)] = 1.0
    inputs = make_inputs(case, 0).replaced(q=q.bfloat16(), compressed_kv=keys.bfloat16())
    exact = inputs.compressed_kv.double()
    scores = torch.einsum("thd,tkd->thk", q.double(), exact).bfloat16().double()
    expected = torch.einsum("thk,tkd->thd", scores, exact).float()
    for actual in products_of(backend, case, inputs):
        assert torch.equal(actual, expected)
