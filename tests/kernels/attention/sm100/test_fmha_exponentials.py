"""Exponentials are what the softmax warps spend most time on: one a score, and few beside them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dsv4.kernels.attention.sm100.plan_1cta import KEYS, ROWS
from dsv4.simulator.api import Simulation
from dsv4.simulator.compile.codegen import BLOCKED
from dsv4.simulator.compile.program import Program
from dsv4.testing.attention import Case, make_inputs
from dsv4.testing.attention_kernel import AttentionKernels, config_of

pytestmark = pytest.mark.stage("C")


class CountedBlocks(list):
    """Block functions of a program that count how many lanes execute an opcode."""

    def __init__(self, functions: list[Callable], program: Program, opcode: str):
        self.lanes = 0
        self.in_block = []
        for block in program.blocks:
            found = program.entry.instructions[block.start : block.stop]
            found = [ins for ins in found if ins.parts[0] == opcode]
            assert all(ins.guard is None for ins in found), "guarded ones are not counted right"
            self.in_block.append(len(found))
        super().__init__(self._counted(i, f) for i, f in enumerate(functions))

    def __setitem__(self, number: int, function: Callable) -> None:
        """A block has been compiled."""
        super().__setitem__(number, self._counted(number, function))

    def _counted(self, number: int, function: Callable) -> Callable:
        def counted(w, R):
            lanes = int(w.mask.sum())
            following = function(w, R)
            if following != BLOCKED:
                self.lanes += lanes * self.in_block[number]
            return following

        return counted if self.in_block[number] else function


def exponentials(kernel, arguments: tuple, options: dict) -> int:
    """Lanes that execute ex2 in the attention kernel of a call; the combine's are not counted."""
    simulation = Simulation.of_compiled(kernel)
    name = next(name for name in simulation.module.entries if "Combine" not in name)
    program = simulation.program(name)
    program.full = CountedBlocks(program.full, program, "ex2")
    program.masked = CountedBlocks(program.masked, program, "ex2")
    simulation.run(arguments, options, (), "eager", 0, races=False)
    return program.full.lanes + program.masked.lanes


@pytest.mark.parametrize(
    ("heads", "head_dim", "sink_mode", "splits"),
    [
        (64, 64, "softmax", 1),
        (128, 512, "softmax", 1),
        pytest.param(72, 512, "softmax", 1, marks=pytest.mark.slow),
        pytest.param(64, 64, "swa_gate", 2, marks=pytest.mark.slow),
        pytest.param(72, 512, "swa_gate", 2, marks=pytest.mark.slow),
    ],
)
def test_exponentials(
    backend: AttentionKernels, heads: int, head_dim: int, sink_mode: str, splits: int, seed: int
) -> None:
    """At most padded rows x padded keys and one per row and tile, though every tile rescales."""
    if backend.device != "cpu":
        pytest.skip("only the simulator counts instructions")
    case = Case(
        heads=heads,
        head_dim=head_dim,
        top_k=250,
        window_rows=100,
        requests=((0, 2),),
        ragged=False,
        sink_mode=sink_mode,
    )
    inputs = make_inputs(case, seed)
    q, keys, window = inputs.tensors[:3]
    q[..., 5] = 16.0
    keys[..., 5] = 64 * torch.linspace(-1, 0, 250)
    window[0, :, 5] = 64 * torch.linspace(0, 1, 100)
    options = {
        "compressed_lens": torch.empty(0, dtype=torch.int32),
        "lse": torch.empty(case.tokens, heads),
        "workspace": torch.empty(case.tokens * heads * splits * (head_dim + 4)),
        "num_splits": splits,
        "num_ctas": 148,
    }
    kernel = backend.compile(config_of(case))
    found = exponentials(kernel, (*inputs.tensors, torch.empty_like(q)), options)
    rows = case.tokens * (ROWS if heads <= ROWS else 2 * ROWS)
    tiles = -(-250 // KEYS) - (-100 // KEYS)
    scores = rows * tiles * KEYS
    # Every tile but a split's first has O rescaled: fewer would test nothing.
    rescaled = case.tokens * heads * (tiles - splits)
    assert scores + rescaled <= found <= scores + rows * tiles, found - scores
