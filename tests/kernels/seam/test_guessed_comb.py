"""comb of a seam that starts beside the launch that writes it: a guess, which the seam settles
behind its wait."""

from __future__ import annotations

import pytest
import torch

from dsv4.ops import mhc_seam
from dsv4.ops.mhc_seam import MHC_SEAM
from dsv4.testing.harness import Simulator
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.launch_chain import Chain, Recorded, chains_of, recorded
from dsv4.testing.mhc_seam import EPS, Case, Inputs
from dsv4.testing.mutate import at, mutated
from tests.simulator.helpers.mutations import changed_simulation

seam = pytest.importorskip("dsv4.kernels.seam.seam", reason="compiles kernels: needs CuTeDSL")

pytestmark = pytest.mark.stage("mhc")

# By a cluster, in two launches, and in one of parts.
TOKENS = (3, 11, 35)
PLAIN = Case(3, 256)


def calls_of(target: Simulator, case: Case, seed: int) -> list[Recorded]:
    """Two seams, of which the second one's comb is the first one's."""
    inputs = Inputs.make(case, seed)
    tensors = inputs.tensors
    given = [tensors[name] for name in ("fn", "base", "scale", "norm_weight")]
    options = {"eps": EPS, "norm_eps": EPS, "quantize": case.quantizes}
    with torch.inference_mode(), recorded(target) as calls:
        first = mhc_seam(tensors["streams"], *given, **options)
        mixes = {"post": first.post, "comb": first.comb}
        mhc_seam(first.streams, *given, y=inputs.y, **mixes, **options)
    return calls


def chain_of(target: Simulator, case: Case, seed: int) -> Chain:
    """Both as a chain; where the second one finds another comb if it reads it too early."""
    (chain,) = chains_of(calls_of(target, case, seed))
    assert chain.name == "mhc_seam > mhc_seam"
    (comb,) = chain.calls[1].guessed
    # What memory held before: a comb of other tokens.
    held = chain.calls[0].before[comb.untyped_storage().data_ptr()]
    held.view(torch.float32).uniform_()
    return chain


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_a_wrong_guess_is_settled(arch, tokens, seed) -> None:
    """With the bits of the calls apart."""
    chain = chain_of(Simulator(arch), Case(tokens, 256, top_k=2), seed)
    expected = chain.apart()
    chain.run(expected)
    report = chain.run(expected, races=False, overlap="all")
    assert report.early_starts >= 1
    for k in range(2):
        chain.run(expected, races=False, overlap="random", schedule="random", seed=seed + k)


def test_a_guess_that_is_not_settled_is_noticed(tmp_path, seed) -> None:
    """Where no difference counts between what is found before and behind the wait."""
    chain = chain_of(Simulator("sm_90a"), PLAIN, seed)
    expected = chain.apart()
    unsettled = (
        at("Combs.settle").expression("differences != 0").replace("differences == differences + 1")
    )
    kernels = OpKernels(MHC_SEAM, Simulator("sm_90a"))
    changed = {1: kernels.compile(PLAIN.config, mutated(seam.build, tmp_path, unsettled))}
    chain.simulate(changed, races=False)
    assert all(map(torch.equal, chain.left(), expected)), "in order nothing is to be settled"
    report = chain.simulate(changed, races=False, overlap="all")
    assert report.early_starts == 1
    assert not all(map(torch.equal, chain.left(), expected))


def test_a_weak_load_is_no_guess(seed) -> None:
    """It could leave a line in L1 that is found behind the wait."""
    chain = chain_of(Simulator("sm_90a"), PLAIN, seed)
    compiled = chain.calls[1].compiled
    ptx = compiled.artifacts.PTX
    assert "ld.relaxed.gpu.global" in ptx
    weak = changed_simulation(compiled, ptx.replace("ld.relaxed.gpu.global", "ld.global"))
    assert not chain.simulate().races
    report = chain.simulate({1: weak})
    assert any(x.kind == "race with the launch before" for x in report.races)
