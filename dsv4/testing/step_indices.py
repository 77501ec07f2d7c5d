"""`step_indices` under test: requests of a step, padding among them, and a block table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.kernels.step.config import StepIndicesConfig
from dsv4.ops.step_indices import STEP_INDICES, step_indices
from dsv4.testing.kernel_call import OpInputs

FLASH_WITH_A_DRAFT = StepIndicesConfig(129, 128, 4, 128)


@dataclass(frozen=True)
class Case:
    """Sizes of a step.

    Attributes:
        rows, chunk, blocks: B, C and W.
        config: of the operator.
    """

    rows: int
    chunk: int = 1
    blocks: int = 9
    config: StepIndicesConfig = FLASH_WITH_A_DRAFT


@dataclass(frozen=True)
class Inputs(OpInputs):
    """Tensors of a case: requests around ends of entries, blocks and the table, every fourth row
    padding, one in five blocks missing."""

    op = STEP_INDICES

    case: Case
    slots: Tensor
    starts: Tensor
    lens: Tensor
    block_table: Tensor

    @classmethod
    def make(cls, case: Case, seed: int, device: torch.device | str = "cpu") -> Inputs:
        generator = torch.Generator().manual_seed(seed)

        def random(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator)

        rows, blocks = case.rows, case.blocks
        slots = torch.randperm(4 * rows, generator=generator)[:rows]
        edges = random(0, blocks + 1, rows) * case.config.block
        starts = (edges + random(-5, 5, rows)).clamp_min(0)
        lens = random(1, case.chunk + 1, rows)
        table = random(0, 1 << 20, rows, blocks)
        table[random(0, 5, rows, blocks) == 0] = -1
        for tensor, value in ((slots, -1), (starts, 0), (lens, 0), (table, -1)):
            tensor[2::4] = value
        return cls(case, *(tensor.to(device) for tensor in (slots, starts, lens, table)))

    @property
    def config(self) -> StepIndicesConfig:
        return self.case.config

    @property
    def requests(self) -> dict[str, Tensor]:
        """The inputs by the table's names."""
        names = ("slots", "starts", "lens", "block_table")
        return {name: getattr(self, name) for name in names}

    @property
    def arguments(self) -> Mapping[str, Tensor | None]:
        case = self.case

        def empty(width: int) -> Tensor:
            shape, device = (case.rows, width), self.slots.device
            return torch.empty(shape, dtype=torch.int32, device=device)

        names = ("positions", "request_ids", "window_slots")
        outputs = {name: empty(case.chunk) for name in names}
        for kind, ratio in enumerate(case.config.ratios):
            if ratio:
                outputs[f"completed_{kind}"] = empty(-(-case.chunk // ratio))
                outputs[f"visible_{kind}"] = empty(case.chunk)
        return {**self.requests, **outputs}


def expected(inputs: Inputs) -> dict[str, Tensor]:
    """What the operator gives on the CPU, by the names of the table."""
    case, config = inputs.case, inputs.config
    ratios = tuple(filter(None, config.ratios))
    sizes = {"ring": config.ring, "block": config.block, "ratios": ratios}
    found = step_indices(**inputs.requests, chunk=case.chunk, **sizes)
    names = ("requests", "pages", "positions", "request_ids", "window_slots", "live_tokens")
    by_name = dict(zip(names, found))
    for kind in range(len(ratios)):
        by_name[f"completed_{kind}"] = found.completed[kind]
        by_name[f"visible_{kind}"] = found.visible[kind]
    return by_name
