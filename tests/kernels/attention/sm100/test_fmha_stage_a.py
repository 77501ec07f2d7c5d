"""Stage A: Q K^T into Tensor Memory and out."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

from dsv4.testing.attention import Case, make_inputs
from dsv4.testing.attention_kernel import AttentionKernels, config_of
from tests.kernels.attention.sm100.stage_kernels import build_scores

pytestmark = pytest.mark.stage("A")


def scores_of(backend: AttentionKernels, case: Case, inputs) -> list[torch.Tensor]:
    """The kernel's scores [T, n_h, top_k] in every schedule."""
    kernel = backend.compile(config_of(case), build_scores)
    size = case.tokens * case.heads * case.top_k
    results = []
    for schedule in backend.schedules:
        workspace = torch.full((size,), torch.nan, device=backend.device)
        found = backend.run(kernel, inputs, schedule=schedule, workspace=workspace).workspace
        results.append(found.reshape(case.tokens, case.heads, case.top_k))
    return results


@pytest.mark.parametrize(
    "case",
    [
        Case(heads=64, head_dim=64, top_k=64, requests=((0, 1),), ragged=False),
        Case(heads=72, head_dim=64, top_k=640, requests=((0, 2),), ragged=False),
        Case(heads=64, head_dim=512, top_k=320, requests=((0, 2),), ragged=False),
    ],
    ids=str,
)
def test_scores(backend: AttentionKernels, case: Case, seed: int) -> None:
    """Every score, over one tile and over more tiles than the KV ring holds."""
    inputs = make_inputs(case, seed).replaced(swa_lens=torch.zeros(case.batch, dtype=torch.int32))
    q, keys = (x.float() for x in inputs.tensors[:2])
    expected = torch.einsum("thd,tkd->thk", q, keys)
    for actual in scores_of(backend, case, inputs):
        # fp32 sums of exact products, in another order.
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4 * case.head_dim**0.5)


def test_each_score_has_its_place(backend: AttentionKernels) -> None:
    """One-hot queries against keys of small integers: every score is exact, wherever it lands."""
    case = Case(heads=64, head_dim=64, top_k=192, requests=((0, 1),), ragged=False)
    inputs = make_inputs(case, 0).replaced(
        q=torch.eye(64).reshape(1, 64, 64).bfloat16(),
        compressed_kv=(torch.arange(192 * 64) % 251).reshape(1, 192, 64).bfloat16(),
        swa_lens=torch.zeros(case.batch, dtype=torch.int32),
    )
    expected = inputs.compressed_kv.float().transpose(1, 2)
    for actual in scores_of(backend, case, inputs):
        assert torch.equal(actual, expected)
