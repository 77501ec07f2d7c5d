"""CPU tensors that say they are on a GPU."""

import pytest
import torch

from dsv4.simulator.frontend.cuda_tensors import CudaTensors

pytestmark = pytest.mark.stage("simulator")
GPU, HOST = torch.device("cuda", 0), torch.device("cpu")


def test_tensors_are_where_code_put_them():
    with CudaTensors():
        made = torch.ones(3, device="cuda")
        moved = torch.arange(3).to("cuda:0")
        host = torch.arange(3)
        for tensor in (made, moved, host.cuda(), made + 1, made[1:], torch.empty_like(moved)):
            assert tensor.is_cuda and not tensor.is_cpu and tensor.device == GPU
            assert tensor.get_device() == 0
        for tensor in (host, host * 2, made.cpu(), moved.to("cpu"), torch.zeros(1, device="cpu")):
            assert not tensor.is_cuda and tensor.is_cpu and tensor.device == HOST
        assert torch.zeros(2, device=made.device).device == GPU
        assert torch.zeros(2, device=host.device).device == HOST
        assert torch.ones(2, pin_memory=True).pin_memory().device == HOST
        assert made.sum().item() == 3 and made.cpu().numpy().tolist() == [1, 1, 1]
    assert made.device == HOST


def test_new_tensors_are_aligned_as_on_a_gpu():
    with CudaTensors():
        made = torch.ones(5, 7, device="cuda")
        views = [made[1:], made.add_(0)]
        # Many: some would be aligned by chance.
        new = [make(made) for make in (torch.empty_like, torch.relu, torch.clone) for _ in range(8)]
        assert all(tensor.data_ptr() % 256 == 0 for tensor in (made, *new))
        start = made.untyped_storage().data_ptr()
        assert all(tensor.untyped_storage().data_ptr() == start for tensor in views)
        assert new[-1].tolist() == made.tolist()


class Doubled(torch.autograd.Function):
    """A function whose backward asks where its gradient is."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        assert gradient.is_cuda and gradient.device == GPU
        return gradient * 2


@pytest.mark.parametrize("given", [False, True])
def test_gradients_are_on_the_gpu(given):
    with CudaTensors():
        leaf = torch.ones(3, device="cuda", requires_grad=True)
        out = Doubled.apply(leaf)
        out.backward(torch.ones_like(out)) if given else out.sum().backward()
        assert leaf.grad.is_cuda and leaf.grad.tolist() == [2, 2, 2]


def test_meta_tensors_stay_so():
    with CudaTensors():
        assert torch.empty(2, device="meta").device.type == "meta"


def test_functions_of_the_dispatcher_see_the_same():
    mode = CudaTensors()

    def double(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_cuda
        return tensor + torch.full_like(tensor, 1, device=tensor.device)

    library = torch.library.Library("simulator_test", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", mode.around(double), "CPU")
    with mode:
        assert torch.ops.simulator_test.double(torch.ones(2, device="cuda")).tolist() == [2, 2]
