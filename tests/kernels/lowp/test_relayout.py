"""The kernel of `dshb_to_bhsd` against torch, bit for bit, and what the function refuses."""

from __future__ import annotations

import pytest
import torch

from dsv4.ops import dshb_to_bhsd
from dsv4.ops.quantized_attention.relayout import DSHB_TO_BHSD
from dsv4.testing.harness import Simulator, Target
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.relayout import RelayoutInputs, assert_turned

pytestmark = pytest.mark.stage("lowp")

# b, h, s, d, all different: more than a tile of either dimension, and parts of tiles.
SHAPE = (2, 3, 25, 70)


def check(target: Target, inputs: RelayoutInputs) -> None:
    """In every schedule, poison in the outputs and between their rows."""
    outcomes = OpKernels(DSHB_TO_BHSD, target).run(inputs, schedules=None)
    assert_turned(inputs, outcomes)


def test_the_kernel_is_torch_s(target, seed) -> None:
    check(target, RelayoutInputs.make(SHAPE, seed, device=target.device, padding=8))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 5, 130, 33), (3, 2, 1, 128), (0, 2, 3, 4)])
def test_sizes_and_dtypes(target, shape, dtype, seed) -> None:
    check(target, RelayoutInputs.make(shape, seed, dtype, target.device))


def test_the_function(seed) -> None:
    x = torch.randn(SHAPE).half()
    flat = x.permute(3, 2, 1, 0).contiguous().flatten()
    wide = torch.full((*SHAPE[:3], 80), torch.nan, dtype=x.dtype)
    assert torch.equal(dshb_to_bhsd(flat, SHAPE, out=wide[..., :70]), x)
    assert wide[..., 70:].isnan().all()
    for given, message in (
        ((flat[:-1], SHAPE), "x: got 10499 elements"),
        ((flat[::2], SHAPE), r"x: got strides \(2,\), needs a contiguous tensor"),
        ((flat, (2, 3)), r"shape: got \(2, 3\), needs four integers"),
        ((flat.int(), SHAPE), "dtype must be one of"),
        ((flat.float().requires_grad_(), SHAPE), "x: requires grad"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            dshb_to_bhsd(*given)
    arguments = (
        x.permute(3, 2, 1, 0).contiguous(),
        torch.empty_like(x),
        DSHB_TO_BHSD.runner_id("float16"),
    )
    torch.library.opcheck(DSHB_TO_BHSD.overload, arguments)


@pytest.mark.slow
def test_a_missing_barrier_is_noticed(monkeypatch, seed) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    from cutlass import cute

    from dsv4.kernels.lowp.relayout import build

    kernels = OpKernels(DSHB_TO_BHSD, Simulator("sm_90a"))
    inputs = RelayoutInputs.make(SHAPE, seed)
    monkeypatch.setattr(cute.arch, "sync_threads", lambda: None)
    compiled = kernels.compile(inputs.config, build)
    with pytest.raises(AssertionError, match="race"):
        kernels.run(inputs, compiled=compiled)
