"""`compress` in the simulator, for both architectures: decode, chunks, every kind of compressor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dsv4.kernels.compressor.config import CompressConfig, has_kernel
from dsv4.kernels.kit.index_entry import INDEX_FORMATS
from dsv4.ops.compress import COMPRESS
from dsv4.testing.compress import EPS, Case, Inputs, assert_step, decoded
from dsv4.testing.harness import Outcome, Simulator, missed_synchronisation, simulator
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.mutate import Edit, at
from tests.kernels import planted_bugs

pytestmark = pytest.mark.stage("compressor")

# Ends of blocks, the first block, the middle of one, a request without tokens.
DECODE = Case((3, 7, 2, 0, 11, 9), (1, 1, 1, 1, 1, -1))
# Longer than rings: what the first blocks read is overwritten by the last tokens.
CHUNK = Case((5, 0, 18, 2), (21, 9, 20, -1), 21)
HCA = Case((127, 4, 255), (1, 1, 1), ratio=128, overlap=False)


def changed(case: Case, **fields) -> Case:
    """The case with other fields."""
    return Case(**{**vars(case), **fields})


def run(kernels: OpKernels, case: Case, seed: int, schedules: int | None = 1) -> Outcome:
    """Run, and compare with the torch implementation."""
    inputs = Inputs.make(case, seed)
    outcome = kernels.run(inputs, seed, schedules)
    assert_step(inputs, outcome.scratch)
    return outcome


# The same source for both: what the second takes is its compilation.
@pytest.fixture(scope="module", params=["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def kernels(request: pytest.FixtureRequest) -> OpKernels:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    return OpKernels(COMPRESS, simulator(request.param))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(DECODE, marks=pytest.mark.slow),
        changed(CHUNK, dim=128, is_index=True, kv_format="fp4"),
        pytest.param(changed(CHUNK, dim=128, is_index=True), marks=pytest.mark.slow),
        pytest.param(CHUNK, marks=pytest.mark.slow),
        pytest.param(changed(DECODE, kv_format="bf16"), marks=pytest.mark.slow),
        pytest.param(changed(DECODE, kv_format="bf16", is_rounded=False), marks=pytest.mark.slow),
        pytest.param(changed(DECODE, dim=128), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_equals_the_torch_implementation(kernels, case, seed) -> None:
    run(kernels, case, seed, None)


@pytest.mark.slow
def test_fp4_index_keys_hold_what_fp8_ones_hold(kernels, seed) -> None:
    pools = []
    for kv_format in INDEX_FORMATS:
        case = changed(CHUNK, dim=128, is_index=True, kv_format=kv_format)
        outcome = run(kernels, case, seed)
        pools.append(decoded(case, outcome.scratch["pool"].cpu()))
    written = Inputs.make(case, seed).tensors["slots"].flatten().long()
    written = written[written >= 0]
    first, second = (pool.flatten(0, 1)[written] for pool in pools)
    assert torch.equal(first, second)


@pytest.mark.parametrize("case", [HCA, changed(HCA, chunk=3, lens=(3, 1, 2))], ids=str)
@pytest.mark.slow
def test_long_blocks(kernels, case, seed) -> None:
    run(kernels, case, seed, None)


@pytest.mark.slow
def test_no_synchronisation_is_left_out(seed) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    kernels = OpKernels(COMPRESS, Simulator("sm_90a"))
    assert not missed_synchronisation([run(kernels, CHUNK, seed).report])


def test_configurations_with_kernels() -> None:
    for config in COMPRESS.aot().values():
        assert has_kernel(config), config
    for other in (
        CompressConfig(512, 4, True, EPS, "fp32", "fp32"),
        CompressConfig(512, 4, True, EPS, uniform_scale=True),
        CompressConfig(512, 256, False, EPS),
        CompressConfig(128, 4, True, EPS, kv_format="bf16", is_index=True),
        CompressConfig(256, 4, True, EPS),
    ):
        assert not has_kernel(other), other


# ---- bugs ----------------------------------------------------------------------------------------

BUGS: dict[str, Edit] = {
    "maxima read before they are written": at("Compress.pooled")
    .call("cute.arch.sync_threads", 0)
    .delete(),
    "sums read before they are written": at("Compress.pooled")
    .call("cute.arch.sync_threads", 1)
    .delete(),
    "squares of the cluster not waited for": at("Compress.over_cluster")
    .call("cute.arch.cluster_wait", 1)
    .delete(),
    "columns of the block before swapped": at("Compress.column")
    .expression("term < self.config.ratio")
    .replace("term >= self.config.ratio"),
    "the ring appended at the wrong place": at("Compress.store_new")
    .expression("request.start + offset")
    .replace("request.start + offset + 1"),
    "tokens behind a team's first left out": at("Compress.append")
    .expression("item + self.teams")
    .replace("item + 2 * self.teams"),
}


def checked(build: Callable, seed: int) -> None:
    """The checks that every test makes, of what `build` compiles."""
    kernels = OpKernels(COMPRESS, Simulator("sm_90a"))
    inputs = Inputs.make(CHUNK, seed)
    compiled = kernels.compile(inputs.config, build)
    outcome = kernels.run(inputs, seed, None, compiled)
    assert_step(inputs, outcome.scratch)


(
    test_bug_has_its_place,
    test_bug_is_noticed,
    test_without_a_bug_nothing_is_noticed,
) = planted_bugs.tests_of(BUGS, "dsv4.kernels.compressor.compress", checked)
