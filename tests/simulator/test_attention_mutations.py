"""Deleting any one synchronisation instruction of the attention kernels is noticed."""

import ast
import functools
import random
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
import torch

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.fmha_workspace import counter_words
from dsv4.ops.fmha_splits import workspace_size
from dsv4.simulator.ptx.parser import Instruction
from tests.accuracy import assert_attention_close
from tests.attention_cases import Case, make_inputs
from tests.simulator.mutations import Run, known_warnings, noticed, sync_instructions
from tests.simulator.support import dump_folder

pytestmark = pytest.mark.stage("simulator")

# Two blocks of heads, more tiles than any ring has stages, maxima that grow, tokens without keys.
CASE = Case(
    heads=72, requests=((0, 2), (1, 1), (-1, 1)), top_k=600, growing=True, sink_mode="swa_gate",
    is_causal=True,
)  # fmt: skip
SAMPLE = 2

# What is not missed, by instruction and the kernel's function: how many of them, and why.
LAUNCH = "only lets the next launch start early: its griddepcontrol.wait is what orders"
REDUNDANT = {
    "blackwell": {
        ("griddepcontrol.launch_dependents", "load_warp"): (1, LAUNCH),
        ("mbarrier.try_wait", "_load_q"): (1, "the only stage is free when it is first acquired"),
        ("mbarrier.try_wait", "_qk"): (
            3,
            "S: its first acquisition finds it free; later ones follow the wait for P two tiles "
            "before, which the softmax made from what this stage then held",
        ),
        ("mbarrier.try_wait", "softmax_warps"): (
            1,
            "P: every O is waited for, and with it the product that read this stage of P",
        ),
        ("tcgen05.commit", "_pv"): (
            2,
            "the last tile's chunk and P: nobody fills them again",
        ),
        ("tcgen05.wait::ld", "load_columns"): (
            4,
            "tolerated: the compiler moves uses of the registers before the wait, which the "
            "unchanged kernel is warned of",
        ),
    },
    "hopper": {
        ("griddepcontrol.launch_dependents", "kernel"): (1, LAUNCH),
        ("griddepcontrol.wait", "load"): (
            1,
            "orders the launch after the one before it, and each run here is one launch alone; "
            "test_launches.py has launches that overlap",
        ),
        ("cp.async", "tma_prefetch"): (4, "a hint, which moves nothing but lines of L2"),
        ("mbarrier.test_wait", "_has_landed"): (1, "a hint when to hand over P: the wait follows"),
        ("wgmma.commit_group", "_issue_scores"): (1, "with the next wait_group: when P may go"),
        ("wgmma.wait_group", "score"): (1, "P may go a little later; all is waited for after it"),
        ("mbarrier.try_wait", "output"): (
            1,
            "V: P of a block was made from its scores, whose warpgroup waited for the same rows",
        ),
        ("bar.warp", "_release"): (
            4,
            "two releases follow each other: either one's barrier orders the lanes for both; and "
            "nobody has read the two halves of a block that a wrong guess fetched",
        ),
    },
}


def _run(splits: int, schedule: str) -> Run:
    inputs = make_inputs(CASE, 1)
    expected_o, expected_lse = inputs.expected()
    q = inputs.tensors[0]
    config = FmhaConfig(CASE.head_dim, CASE.heads, 0, 0)

    def prepare() -> tuple[tuple, dict]:
        workspace = torch.full((max(4, workspace_size(config, len(q), splits)),), torch.nan)
        workspace[: counter_words(len(workspace))] = 0
        options = {
            "compressed_lens": inputs.options["compressed_lens"],
            "lse": torch.full(q.shape[:2], torch.nan),
            "workspace": workspace,
            "num_splits": splits,
            "num_ctas": 3,  # fewer than there is work for: a CTA goes on to more
        }
        return (*(x.clone() for x in inputs.tensors), torch.full_like(q, torch.nan)), options

    def correct(positional: tuple, keywords: dict) -> bool:
        try:
            assert_attention_close(positional[-1], expected_o, keywords["lse"], expected_lse)
        except AssertionError:
            return False
        return True

    return Run(prepare, correct, schedule)


@functools.cache
def kernel(name: str):
    """A compiled attention kernel, and the launches that must notice a deletion."""
    module, arch = {"blackwell": ("fmha", "sm_100a"), "hopper": ("fmha_sm90", "sm_90a")}[name]
    options = f"--keep-ptx --generate-line-info --gpu-arch {arch} --dump-dir {dump_folder()}"
    config = FmhaConfig(
        CASE.head_dim, CASE.heads, CASE.sliding_window, 1024, CASE.is_causal, CASE.sink_mode
    )
    compiled = import_module(f"dsv4.kernels.attention.{module}").build(config, options)
    runs = [_run(splits, schedule) for schedule in ("eager", "lazy") for splits in (1, 9)]
    return compiled, runs


@functools.cache
def _functions(path: str) -> list[tuple[int, int, str]]:
    """(first line, last line, name) of the functions in a file, inner ones last."""
    tree = ast.parse(Path(path).read_text())
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    return sorted((n.lineno, n.end_lineno, n.name) for n in found)


def place_of(ins: Instruction) -> tuple[str, str]:
    """An instruction's stem and the kernel's function it is in."""
    path, line = ins.source
    names = [name for first, last, name in _functions(path) if first <= line <= last]
    return ".".join(ins.parts[:2]), names[-1] if names else ""


@pytest.mark.parametrize("name", ["blackwell", pytest.param("hopper", marks=pytest.mark.slow)])
def test_some_deletions_are_noticed(name, seed):
    compiled, runs = kernel(name)
    instructions = sync_instructions(compiled.artifacts.PTX)
    needed = [i for i in instructions if place_of(i) not in REDUNDANT[name]]
    known = known_warnings(compiled, runs[:1])
    for ins in random.Random(seed).sample(needed, SAMPLE):
        assert noticed(compiled, ins, runs, known), f"seed {seed}: {ins.where()}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["blackwell", "hopper"])
def test_all_deletions_are_noticed(name):
    compiled, runs = kernel(name)
    known = known_warnings(compiled, runs)
    instructions = sync_instructions(compiled.artifacts.PTX)
    missed = [ins for ins in instructions if not noticed(compiled, ins, runs, known)]
    expected = {place: count for place, (count, _) in REDUNDANT[name].items()}
    assert Counter(map(place_of, missed)) == expected, "\n".join(i.where() for i in missed)
