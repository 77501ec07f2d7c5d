"""Whole kernels: GEMMs of both architectures against PyTorch, under every schedule."""

import functools

import cutlass
import pytest
import torch

from dsv4.simulator import simulate
from tests.simulator.helpers.support import compile_kernel
from tests.simulator.kernels.gemm_sm90 import GemmSm90
from tests.simulator.kernels.gemm_sm100 import GemmSm100

pytestmark = pytest.mark.stage("simulator")

SCHEDULES = ("eager", "lazy", "random")


def _operands(m: int, n: int, k: int, dtype=torch.bfloat16, major_a="k", major_b="k"):
    a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    a = a if major_a == "k" else a.T.contiguous().T
    b = b if major_b == "k" else b.T.contiguous().T
    return a, b, torch.full((m, n), float("nan"))


@functools.cache
def _compiled_sm100(two_cta: bool, cluster: tuple[int, int], m: int, n: int):
    return compile_kernel(GemmSm100(two_cta, cluster), "sm_100a", *_operands(m, n, 192))


@functools.cache
def _compiled_sm90(dtype, major_a: str, major_b: str):
    operands = _operands(128, 256, 192, dtype, major_a, major_b)
    element = cutlass.BFloat16 if dtype == torch.bfloat16 else cutlass.Float16
    return compile_kernel(GemmSm90(element), "sm_90a", *operands)


def _check(compiled, a, b, c, schedule: str, seed: int):
    report = simulate(compiled, a, b, c, schedule=schedule, seed=seed)
    # Same operands, same fp32 accumulation: only the order of the sum differs.
    torch.testing.assert_close(c, a.float() @ b.float().T, atol=1e-4, rtol=1e-5)
    report.raise_if_racy()
    (launch,) = report.launches
    assert launch.coverage.complete, launch.coverage.missed
    return launch


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("two_cta", "cluster", "m", "n"),
    [(False, (1, 1), 256, 128), (True, (2, 1), 512, 128), (True, (4, 2), 512, 128)],
    ids=["one", "pair", "multicast"],
)
def test_sm100_gemm(two_cta, cluster, m, n, schedule, seed):
    operands = _operands(m, n, 192)
    launch = _check(_compiled_sm100(two_cta, cluster, m, n), *operands, schedule, seed)
    assert launch.cluster == (*cluster, 1)
    products = 12 * (m // (256 if two_cta else 128)) * (n // 64)
    assert launch.operations["tcgen05.mma"] == products


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("majors", ["kk", "mk", "kn", "mn"])
def test_sm90_gemm(majors, schedule, seed):
    operands = _operands(128, 256, 192, torch.bfloat16, *majors)
    _check(_compiled_sm90(torch.bfloat16, *majors), *operands, schedule, seed)


def test_sm90_gemm_f16(seed):
    operands = _operands(128, 256, 192, torch.float16)
    _check(_compiled_sm90(torch.float16, "k", "k"), *operands, "eager", seed)


def test_launch_configuration_is_the_compiled_one():
    launch = _check(_compiled_sm100(True, (2, 1), 512, 128), *_operands(512, 128, 192), "eager", 0)
    assert launch.grid == (4, 2, 1)
    assert launch.block == (128, 1, 1)
    # Two stages of 128 x 64 A and 32 x 64 B per CTA, barriers, alignment.
    operands = 2 * (128 + 32) * 64 * 2
    assert operands < launch.shared_bytes < operands + 2048


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_result_does_not_depend_on_its_place(arch):
    """As on a GPU: the same rows and columns give the same bits, wherever in a tile they are."""
    a, b, c = _operands(128, 256, 192)
    if arch == "sm_90a":
        compiled = _compiled_sm90(torch.bfloat16, "k", "k")
    else:
        compiled = _compiled_sm100(False, (1, 1), 128, 256)
    rows, columns = torch.randperm(128), torch.randperm(256)
    moved = torch.full_like(c, float("nan"))
    simulate(compiled, a, b, c)
    simulate(compiled, a[rows], b[columns], moved)
    assert torch.equal(moved, c[rows][:, columns])
