"""Hyper-connections between sublayers: the reference, and which stream goes where."""

from __future__ import annotations

import pytest
import torch

from dsv4.layers.hyper_connection import HyperConnection, HyperParameters, Streams
from dsv4.layers.norm import RMSNorm
from dsv4.ops.moe.rows import ExpertRows
from dsv4.reference import mhc
from dsv4.reference.norm import rms_norm


@pytest.mark.stage("mhc")
@pytest.mark.parametrize("mult", [2, 4])
def test_streams_equal_the_reference(mult: int, seed: int) -> None:
    hyper, rows = HyperConnection(mult, 20, 1e-6, 1e-6), (2 + mult) * mult
    parameters = HyperParameters(
        torch.randn(rows, mult * 32) * 0.2, torch.randn(rows), torch.randn(3)
    )
    streams, y = torch.randn(2, 5, mult, 32), torch.randn(2, 5, 32)
    mix = mhc.mixing(streams, *parameters, iterations=20, eps=1e-6, norm_eps=1e-6)
    norm = RMSNorm(32, 1e-6)
    norm.weight.data = torch.randn(32)
    x, kept = hyper.read(Streams(streams), parameters, norm)
    wanted = rms_norm(mhc.contract(streams, mix.pre), norm.weight, 1e-6)
    torch.testing.assert_close(x, wanted)
    torch.testing.assert_close(mhc.iterated(kept.comb, 10, 1e-6), mix.comb)
    expected = mhc.expand(y, streams, mix.post, mix.comb)
    torch.testing.assert_close(hyper.written(kept.after(y)), expected)
    _, after = hyper.read(kept.after(y), parameters, norm)
    torch.testing.assert_close(after.values, expected)
    # The same output as rows of which the first has no expert.
    rows = torch.stack([torch.full_like(y, torch.nan), y / 2, y / 2], 2).flatten(0, 1)
    ids = torch.tensor([-1, 3], dtype=torch.int32).expand(10, 2)
    behind_experts = kept.after(ExpertRows(rows, ids, torch.tensor([1, 10], dtype=torch.int32)))
    torch.testing.assert_close(hyper.written(behind_experts), expected)
    _, after = hyper.read(behind_experts, parameters, norm)
    torch.testing.assert_close(after.values, expected)
    head = HyperParameters(parameters.fn[:mult], parameters.base[:mult], parameters.scale[:1])
    x, _ = hyper.read(Streams(streams), head, norm)
    mixed = mhc.head(streams, *head, eps=1e-6, norm_eps=1e-6)
    torch.testing.assert_close(x, rms_norm(mixed, norm.weight, 1e-6))


@pytest.mark.stage("mhc")
def test_streams_are_mixed_from_their_sources(seed: int) -> None:
    """Doubly stochastic mixing, with the passes that were left; the first index of `comb` is the
    source stream."""
    hyper = HyperConnection(4, 20, 1e-6, 1e-6)
    # Of the size that 20 passes make doubly stochastic: more extreme logits converge later.
    parameters = HyperParameters(torch.randn(24, 64) / 8, torch.randn(24), torch.rand(3))
    streams = torch.randn(3, 4, 16)
    norm = RMSNorm(16, 1e-6)
    norm.weight.data.normal_()
    _, mix = hyper.read(Streams(streams), parameters, norm)
    ones = torch.ones(3, 4)
    # What is written where stream j is 1 in channel j is comb itself.
    comb = hyper.written(
        Streams(torch.eye(4).expand(3, 4, 4), torch.zeros(3, 4), mix.post, mix.comb)
    ).mT
    torch.testing.assert_close(comb.sum(-2), ones, atol=1e-4, rtol=0)
    torch.testing.assert_close(comb.sum(-1), ones, atol=5e-2, rtol=0)
    moved = hyper.written(mix.after(torch.zeros(3, 16)))
    by_hand = sum(comb[:, j, 2, None] * streams[:, j] for j in range(4))
    torch.testing.assert_close(moved[:, 2], by_hand)
