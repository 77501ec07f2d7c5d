"""Calls of quack's public functions, beside PyTorch: `quack_cases.py CASE`."""

from __future__ import annotations

import sys

import torch
from torch.nn import functional

torch.manual_seed(0)


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def _compare(found, expected: torch.Tensor, bound: float = 1e-2) -> None:
    found = found[0] if isinstance(found, tuple) else found
    error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error < bound, f"relative error {error:.1e}"


def softmax() -> None:
    from quack.softmax import softmax

    x = _tensor(16, 1024)
    _compare(softmax(x), torch.softmax(x.float(), -1))


def softmax_backward() -> None:
    from quack.softmax import softmax

    x, dy = _tensor(8, 1024).requires_grad_(), _tensor(8, 1024)
    softmax(x).backward(dy)
    reference = x.detach().float().requires_grad_()
    torch.softmax(reference, -1).backward(dy.float())
    _compare(x.grad, reference.grad, 2e-2)


def rmsnorm() -> None:
    from quack.rmsnorm import rmsnorm

    x, weight = _tensor(16, 2048), _tensor(2048, dtype=torch.float32)
    _compare(rmsnorm(x, weight), functional.rms_norm(x.float(), (2048,), weight, 1e-6))


def rmsnorm_wide() -> None:
    """Rows that clusters of CTAs share."""
    from quack.rmsnorm import rmsnorm

    x, weight = _tensor(2, 65536), _tensor(65536, dtype=torch.float32)
    _compare(rmsnorm(x, weight), functional.rms_norm(x.float(), (65536,), weight, 1e-6))


def layernorm() -> None:
    from quack.rmsnorm import layernorm_fwd

    x, weight = _tensor(16, 2048), _tensor(2048, dtype=torch.float32)
    _compare(layernorm_fwd(x, weight), functional.layer_norm(x.float(), (2048,), weight, eps=1e-6))


def cross_entropy() -> None:
    from quack.cross_entropy import cross_entropy_fwd

    x, target = _tensor(16, 4096), torch.randint(0, 4096, (16,), device="cuda")
    loss = functional.cross_entropy(x.float(), target, reduction="none")
    _compare(cross_entropy_fwd(x, target), loss)


def topk() -> None:
    from quack.topk import topk

    x = _tensor(16, 512, dtype=torch.float32)
    # Its keys hold the column in their last bits.
    _compare(topk(x, 8), torch.topk(x, 8)[0], 1e-4)


def gemm() -> None:
    from quack.gemm_interface import gemm

    a, b = _tensor(256, 192), _tensor(192, 256)
    _compare(gemm(a, b, tuned=False), a.float() @ b.float())


def gemm_gelu() -> None:
    from quack.gemm_interface import gemm_act

    a, b = _tensor(256, 128), _tensor(128, 256)
    _, found = gemm_act(a, b, activation="gelu_tanh_approx", tuned=False)
    _compare(found, functional.gelu(a.float() @ b.float(), approximate="tanh"))


def gemm_swiglu() -> None:
    from quack.gemm_interface import gemm_gated

    a, b = _tensor(256, 128), _tensor(128, 256)
    _, found = gemm_gated(a, b, activation="swiglu", tuned=False)
    product = a.float() @ b.float()
    _compare(found, functional.silu(product[:, ::2]) * product[:, 1::2])


def gemm_add() -> None:
    from quack.gemm_interface import gemm_add

    a, b, c = _tensor(256, 128), _tensor(128, 256), _tensor(256, 256)
    _compare(gemm_add(a, b, c, tuned=False), a.float() @ b.float() + c.float())


if __name__ == "__main__":
    globals()[sys.argv[1]]()
