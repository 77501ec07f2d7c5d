"""Models and tokens for which the official forward is asked: one layer of each kind, and all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from torch import Tensor

from dsv4.config.model_config import ModelConfig
from tests.engines.checkpoint import SMALL, random_ids, random_tensors
from tests.engines.official import OfficialModel

GAIN = 0.6  # at which a rounding that tips does not spread over the whole model at once
LENGTH, PREFILLED = 300, 284  # the rest one by one; entries of both rates end in it
STEP = 8  # of the rows that are kept


@dataclass(frozen=True)
class Case:
    """A random model, and what of its results is kept."""

    config: ModelConfig

    @classmethod
    def of(cls, *ratios: int, hashes: int) -> Case:
        """Layers of these compression rates, the first `hashes` of which route by token id."""
        return cls(
            replace(
                SMALL,
                num_hidden_layers=len(ratios),
                compress_ratios=ratios,
                layer_types=(),
                num_hash_layers=hashes,
            )
        )

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return random_tensors(self.config, 0, GAIN)

    @property
    def ids(self) -> Tensor:
        return random_ids(self.config, LENGTH, 1)

    def ask(self, folder: Path) -> dict[str, Tensor]:
        """What the official forward in `folder` says."""
        model = OfficialModel(
            folder, self.config, self.tensors, self.config.max_position_embeddings
        )
        found = {"prefill": kept(model.prefill(self.ids)), "mtp": kept(model.mtp(self.ids))}
        model.prefill(self.ids[:PREFILLED])
        return found | {"decode": model.decode(self.ids[PREFILLED:], PREFILLED)}


def kept(rows: Tensor) -> Tensor:
    """Every eighth row, from the last on, and all of the last ones."""
    chosen = {*range(len(rows) - 1, -1, -STEP), *range(PREFILLED, len(rows))}
    return rows[sorted(chosen)]


CASES: Mapping[str, Case] = {
    "window": Case.of(0, hashes=1),
    "CSA": Case.of(4, hashes=0),
    "HCA": Case.of(128, hashes=0),
    "all": Case.of(0, 4, 128, 4, hashes=1),
}
