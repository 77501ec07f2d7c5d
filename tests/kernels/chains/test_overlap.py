"""Neighbouring kernels of a decode step under programmatic dependent launch: the launches that a
layer makes, with the memory it gives them, some of them early.

A layer of each kind runs as on a GPU, its launches simulated; each run of neighbours is then one
chain. The checker holds every access before `griddepcontrol.wait` against all launches before, and
takes memory that the chain writes for theirs, too, as an allocator would have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from unittest import mock

import pytest
import torch

from dsv4 import ops
from dsv4.cache.manager import CacheManager
from dsv4.kernels.moe import plan as plans
from dsv4.layers.hyper_connection import Streams
from dsv4.simulator import SimulatorError
from dsv4.simulator.api import Simulation
from dsv4.simulator.ptx.entry import Instruction
from dsv4.simulator.ptx.parser import parse_module
from dsv4.simulator.races.findings import Findings
from dsv4.testing import paged_attention
from dsv4.testing.harness import simulator
from dsv4.testing.launch_chain import Chain, Recorded, chains_of, recorded
from tests.model.tiny import quantized_config, random_model
from tests.simulator.helpers.mutations import changed_simulation, without

pytestmark = pytest.mark.stage("simulator")

# The smallest of which every product has a kernel; contexts end with a block of either rate.
SIZES = {
    "hidden_size": 512, "num_attention_heads": 8, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 512, "o_lora_rank": 256, "index_n_heads": 64, "index_head_dim": 128,
    "index_topk": 8, "moe_intermediate_size": 128, "sliding_window": 128, "rates": (4, 128),
    "n_routed_experts": 32, "num_hash_layers": 0, "max_position_embeddings": 1024,
    "vocab_size": 256,
}  # fmt: skip
LENGTHS = (255, 130)
ROWS = 3  # the last one is padding
# Operators of a layer and of the head behind it, in the order of launches.
BEHIND = ("grouped_linear", "fp8_linear", "mhc_seam", "moe", "mhc_seam", "linear_argmax")
BEFORE = ("mhc_seam", "merged_linear", "latent_rows")
LAYERS = {
    "CSA": (*BEFORE, "merged_linear", "index_topk", "sparse_fmha_paged", *BEHIND),
    "HCA": (*BEFORE, "fp8_linear", "sparse_fmha_paged", *BEHIND),
    "SWA": (*BEFORE, "fp8_linear", "sparse_fmha_paged", *BEHIND),
}
# Of the experts' tilings on Hopper: the last one must be there. The one that is launched has both
# products in one launch.
TILINGS, CHOSEN = (0, 1, 3, 5), 1


@contextmanager
def tilings_of_experts() -> Iterator[None]:
    """Compile a part of them, and launch one."""
    every = plans.tilings

    def some(config):
        return tuple(every(config)[i] for i in TILINGS)

    with ExitStack() as stack:
        for module in (plans, import_module("dsv4.kernels.moe.sm90.experts")):
            stack.enter_context(mock.patch.object(module, "tilings", some))
        stack.enter_context(mock.patch.object(plans, "choose", lambda *_: CHOSEN))
        yield


@cache
def calls_of_layer(arch: str, kind: str, rows: int = ROWS) -> list[Recorded]:
    """Calls of a decode step of a model of one layer."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    torch.manual_seed(0)
    model = random_model(quantized_config(kind[0], **SIZES), torch.bfloat16)
    model.kv_format = "fp8"
    ids = torch.randint(0, SIZES["vocab_size"], (rows, 1))
    with torch.inference_mode(), tilings_of_experts():
        cache = model.new_cache(4, 12, 4, max_tokens=256)
        manager, slots = CacheManager(cache), []
        for length in LENGTHS:
            slots.append(manager.admit(length + 8))
            step = manager.step(slots[-1:], [length], length)
            model.unwritten_streams(ids[:1].expand(1, length), cache, step)
        step = manager.step(slots, [1] * len(slots), 1, rows)

        def warm_up() -> None:
            (layer,) = model.layers
            layer.ffn.prepare()
            layer.attn.rope.table(step.capacity, step.starts.device)

        with recorded(simulator(arch), warm_up) as calls:
            model.best(model.unwritten_streams(ids, cache, step))
    return calls


@cache
def calls_of_head(arch: str) -> list[Recorded]:
    """Calls behind the last layer."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    torch.manual_seed(0)
    model = random_model(quantized_config("S", **SIZES), torch.bfloat16)
    streams = torch.randn(ROWS, 1, model.config.hc_mult, SIZES["hidden_size"]).bfloat16()
    with torch.inference_mode(), recorded(simulator(arch)) as calls:
        model.best(Streams(streams))
    return calls


def longest(calls: list[Recorded]) -> Chain:
    """The longest chain."""
    return max(chains_of(calls), key=lambda chain: len(chain.calls))


def check(chain: Chain, seed: int, randoms: int = 1, races: bool = True) -> None:
    """Checked in order, and early in each way: the bits of the calls apart."""
    expected = chain.apart()
    print(chain.name)
    if races:
        print(chain.run(expected))
    report = chain.run(expected, races=False, overlap="all")
    assert report.early_starts == len(report.launches) - 1
    for k in range(randoms):
        options = {"overlap": "random", "schedule": "random", "seed": seed + k}
        chain.run(expected, races=False, **options)


def check_early(calls: Iterable[Recorded]) -> None:
    """What kernels touch while the launch before still runs is what their operator says."""
    for call in calls:
        chain = Chain((call,))
        late = chain.simulate(recycled=call.late).races
        assert not late, f"{call.op.name}: {late[0].message}"
        known = [x for x in call.tensors if not any(x is other for other in call.late)]
        early = chain.simulate(recycled=known).races
        assert any(x.kind == "race with the launch before" for x in early), call.op.name


def test_the_head_overlaps(seed) -> None:
    """Seam and the arg-max of logits, which loads and stores too early without its waits."""
    (chain,) = chains_of(calls_of_head("sm_90a"))
    assert chain.name == "mhc_seam > linear_argmax"
    check(chain, seed)
    check_early(chain.calls)
    (waits,) = launched_waits(chain.calls[1])
    assert_both_are_missed(chain, 1, waits)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_overlaps(kind, seed) -> None:
    """As many of its launches at the same time as let the next one start."""
    chain = longest(calls_of_layer("sm_90a", kind))
    assert tuple(call.op.name for call in chain.calls) == LAYERS[kind]
    check_early(chain.calls)
    check(chain, seed, randoms=2)


@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 3])
def test_neighbours_overlap(length, seed) -> None:
    for chain in chains_of(calls_of_layer("sm_90a", "CSA"), length):
        check(chain, seed, races=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_of_blackwell_overlaps(kind, seed) -> None:
    """Attention reads nothing early."""
    chain = longest(calls_of_layer("sm_100a", kind))
    assert tuple(call.op.name for call in chain.calls) == LAYERS[kind]
    (attention,) = (call for call in chain.calls if call.op.name == "sparse_fmha_paged")
    assert not Chain((attention,)).simulate(recycled=attention.tensors).races
    check_early(call for call in chain.calls if call is not attention)
    check(chain, seed, randoms=2)


@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 3])
def test_blackwells_neighbours_overlap(length, seed) -> None:
    for chain in chains_of(calls_of_layer("sm_100a", "CSA"), length):
        check(chain, seed, races=False)


# ---- attention that gives codes ------------------------------------------------------------------


@cache
def calls_of_codes(arch: str, heads: int, sms: int) -> list[Recorded]:
    """Attention and the projection that takes its codes. On few SMs neither keys nor columns are
    split."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    case = paged_attention.Case(9, 1, heads, 512, "bf16", 40, 100, ragged=True, has_rope=True)
    inputs = paged_attention.make_inputs(case, 0)
    groups = heads // 8
    weight = torch.randn(groups * 256, 4096).to(torch.float8_e4m3fn)
    scale = torch.full((2 * groups, 32), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    target = simulator(arch)
    with mock.patch.object(type(target), "multiprocessors", sms), recorded(target) as calls:
        codes, scales = ops.sparse_fmha_paged_fp8(*inputs.tensors, **inputs.options)
        ops.grouped_linear_fp8(codes, weight, scale, x_scale=scales)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "heads", "sms", "launches"),
    [
        ("sm_90a", 40, 3, 2),
        ("sm_90a", 40, 132, 2),
        ("sm_90a", 16, 132, 3),
        ("sm_100a", 40, 3, 2),
        ("sm_100a", 40, 148, 3),
    ],
)
def test_codes_and_their_projection_overlap(arch, heads, sms, launches, seed) -> None:
    """Hopper's heads in M make the codes on their way, a launch behind swap-AB does; Blackwell's
    attention, and the sum of its splits."""
    (chain,) = chains_of(calls_of_codes(arch, heads, sms))
    assert chain.name == "sparse_fmha_paged > grouped_linear"
    assert len(chain.simulate(races=False).launches) == launches
    check_early(chain.calls[1:])  # attention reads no list early
    check(chain, seed, randoms=2)
    for number, call in enumerate(chain.calls):
        for waits in launched_waits(call):
            report = chain.simulate(without_waits(chain, number, waits))
            assert any(x.kind == "race with the launch before" for x in report.races)


# ---- waits that are missing ----------------------------------------------------------------------


def launched_waits(call: Recorded) -> list[list[Instruction]]:
    """By kernel that a call launches: its `griddepcontrol.wait`s that are run."""
    entries = parse_module(call.compiled.artifacts.PTX).entries
    launches = Chain((call,)).simulate(races=False).launches
    # Coverage adds up over launches of a kernel.
    return [
        [
            ins
            for ins in entries[launch.kernel].instructions
            if ins.opcode == "griddepcontrol.wait"
            and ins.where() not in launch.coverage.missed_sync
        ]
        for launch in {launch.kernel: launch for launch in launches}.values()
    ]


class _Found(SimulatorError):
    """The first finding of a chain: the rest of it need not run."""


def _end(findings: Findings, kind: str, message: str, key: tuple, places: tuple) -> None:
    raise _Found(message)


def without_waits(chain: Chain, number: int, waits: list[Instruction]) -> dict[int, Simulation]:
    """The function of one of a chain's calls without some waits."""
    compiled = chain.calls[number].compiled
    ptx = compiled.artifacts.PTX
    for ins in waits:
        ptx = without(ptx, ins)
    return {number: changed_simulation(compiled, ptx)}


def is_missed(chain: Chain, number: int, wait: Instruction) -> bool:
    """Whether the checker finds something where a call lacks a wait."""
    with mock.patch.object(Findings, "report", _end):
        try:
            chain.simulate(without_waits(chain, number, [wait]))
        except _Found:
            return True
    return False


def assert_both_are_missed(chain: Chain, number: int, waits: list[Instruction]) -> None:
    """Where a kernel lacks all of its waits, it loads and it stores too early."""
    report = chain.simulate(without_waits(chain, number, waits))
    found = [x.message for x in report.races if x.kind == "race with the launch before"]
    for what in ("read of", "write of"):
        assert any(what in message for message in found), f"{chain.name}, {what}: {found}"


# Waits of an operator that are not missed alone: their roles load nothing but weights, or get what
# they read from roles that wait, by a barrier or an mbarrier.
REDUNDANT = {
    "merged_linear": 1, "index_topk": 1, "grouped_linear": 1, "fp8_linear": 1, "moe": 4,
    "linear_argmax": 2,
}  # fmt: skip


@pytest.mark.slow
def test_missing_waits_are_noticed() -> None:
    """Of the second of two neighbours, for each operator of a layer."""
    found: dict[str, int] = {}
    for chain in chains_of(calls_of_layer("sm_90a", "CSA"), 2):
        for waits in launched_waits(chain.calls[1]):
            assert_both_are_missed(chain, 1, waits)
            unnoticed = [ins for ins in waits if not is_missed(chain, 1, ins)]
            name = chain.calls[1].op.name
            found[name] = found.get(name, 0) + len(unnoticed)
            print(f"{name}: {len(waits)} waits, not missed: {[x.where() for x in unnoticed]}")
    assert {name: count for name, count in found.items() if count} == REDUNDANT


@pytest.mark.slow
def test_a_launch_that_does_not_wait_is_noticed_behind_it() -> None:
    """In the middle of three: the third one's wait no longer says that the first is complete."""
    chains = chains_of(calls_of_layer("sm_90a", "CSA"), 3)
    middles = ("grouped_linear", "fp8_linear", "mhc_seam", "moe")
    for chain in chains[5:9]:
        assert chain.calls[1].op.name in middles
        waits = launched_waits(chain.calls[1])[-1]
        report = chain.simulate(without_waits(chain, 1, waits))
        hidden = [x for x in report.races if "between them has not waited" in x.message]
        assert hidden, chain.name
