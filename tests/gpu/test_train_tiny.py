"""The captured training step of the tiny checkpoint is the step that was captured."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("tokenizers", reason="the corpus of the recipe needs tokenizers")

from scripts.tools import train_tiny
from scripts.tools.tiny_batches import Batches, RecallKind
from scripts.tools.tiny_layers import sinkhorn
from scripts.tools.tiny_model import TrainedModel
from scripts.tools.tiny_rounding import rounded

pytestmark = [pytest.mark.stage("checkpoint"), pytest.mark.gpu]


def _batch(device: torch.device) -> Batches:
    marks = {"unto": [40], "end": [41], "newline": [42], "opening": [0, 43], "recall": [44, 45]}
    data = {name: torch.tensor(ids) for name, ids in marks.items()}
    data |= {"names": torch.arange(50, 60), "goods": torch.arange(60, 70)}
    data["train"] = torch.randint(100, 1000, (5000,))
    kinds = (RecallKind(share=0.5, pairs=4, rounds=2, gap=(0, 40)),)
    return Batches(data, kinds, batch=4, length=160, form_weight=0.25, device=device)


def test_replays_compute_what_an_eager_step_computes(seed: int) -> None:
    """Also once memory that the capture freed has other contents."""
    device = torch.device("cuda")
    tensors = train_tiny.initial_tensors(train_tiny.CONFIG, device)
    for name, tensor in tensors.items():
        tensor.requires_grad_(not name.endswith(("tid2eid", "gate.bias")))
    batch, dense = _batch(device), torch.tensor(False, device=device)
    optimizer = train_tiny.make_optimizer(tensors)
    model = TrainedModel(train_tiny.CONFIG, length=160, device=device)
    batch.draw(seed)
    step = train_tiny.make_step(model, tensors, batch, dense, optimizer, 0.0)
    for group in optimizer.param_groups:
        group["lr"].fill_(1e-3)
    for count in range(3):
        junk = [torch.full((size,), 7.0, device=device) for size in (2**8, 2**14, 2**20)] * 4
        batch.draw(seed + count)
        with torch.no_grad():
            weights = rounded(tensors, train_tiny.master_specs(train_tiny.CONFIG))
            expected, _ = train_tiny.training_loss(model, weights, batch, dense, 0.0)
        actual = [part.clone() for part in step()]
        torch.testing.assert_close(actual, list(expected), rtol=2e-3, atol=2e-3)
        del junk


def test_the_sinkhorn_kernel_is_the_reference_s(seed: int) -> None:
    from dsv4.reference import mhc

    scores = 2 * torch.randn(3, 77, 4, 4)
    grad = torch.randn(3, 77, 4, 4)

    def both(x: Tensor, passes) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        y = passes(x, 20, 1e-6)
        y.backward(grad.to(y.device))
        return y.detach().cpu(), x.grad.cpu()

    torch.testing.assert_close(both(scores.cuda(), sinkhorn), both(scores, mhc.sinkhorn))
