"""Kernels of `quantize_kv` under test: operands, and torch's bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.kernels.kit.args import tensors_of
from dsv4.kernels.lowp.args import CODES, QUANTIZE_KV_ARGS, needs, values
from dsv4.kernels.lowp.config import QuantizeKvConfig
from dsv4.kernels.lowp.groups import num_blocks
from dsv4.ops.quantized_attention.options import FORMAT_OPTIONS, complete
from dsv4.ops.quantized_attention.quantize_kv import QUANTIZE_KV
from dsv4.ops.runtime.tensors import empty
from dsv4.testing.accuracy import assert_same_bits
from dsv4.testing.harness import Outcome
from dsv4.testing.kernel_call import OpInputs
from dsv4.testing.lowp import Case, make_inputs


@dataclass(frozen=True)
class KvInputs(OpInputs):
    """Operands of a call.

    Attributes:
        keys, values: [b, Hk, S, d].
        ends: [N + 1] int32 of packed sequences.
    """

    op = QUANTIZE_KV

    options: QuantizeKvConfig
    keys: Tensor
    values: Tensor
    ends: Tensor | None = None

    @classmethod
    def make(
        cls,
        case: Case,
        seed: int,
        lens: tuple[int, ...] | None = None,
        device: torch.device | str = "cpu",
    ) -> KvInputs:
        """Keys and values of a case; with `lens`, packed sequences of so many."""
        _, k, v = (x.to(device) for x in make_inputs(case, seed))
        found = complete({name: case.options.get(name) for name in FORMAT_OPTIONS})
        config = QuantizeKvConfig(
            case.dim, str(case.dtype).removeprefix("torch."), is_varlen=lens is not None, **found
        )
        ends = None
        if lens is not None:
            ends = torch.tensor([0, *lens]).cumsum(0).to(device, torch.int32)
        return cls(config, k, v, ends)

    @property
    def config(self) -> QuantizeKvConfig:
        return self.options

    @property
    def arguments(self) -> dict[str, Tensor | None]:
        """By the table's names, with outputs: no input has their sizes."""
        batch, heads, rows = self.keys.shape[:3]
        sequences = None if self.ends is None else len(self.ends) - 1
        tiles = num_blocks(rows, self.config.tiles.block_k, sequences)
        count = batch if sequences is None else sequences
        sizes = {"b": batch, "Hk": heads, "S": rows, "Gk": tiles, "N": count}
        outputs = {
            arg.name: empty(arg, values(self.config), sizes, self.keys.device)
            for arg in tensors_of(QUANTIZE_KV_ARGS)
            if arg.name in CODES
            and needs(self.config, arg.name) in (None, True)
            and (not arg.is_optional or needs(self.config, arg.name))
        }
        return {"k": self.keys, "v": self.values, "cu_seqlens_k": self.ends, **outputs}

    def expected(self) -> dict[str, Tensor]:
        """What torch writes."""
        given = self.arguments
        names = (arg.name for arg in self.op.tensors if arg.name != "workspace")
        self.op.torch(self.config, *(given.get(name) for name in names))
        return {name: x for name, x in given.items() if name in CODES and x is not None}


def assert_codes(inputs: KvInputs, outcome: Outcome) -> None:
    """Fail where a bit is not torch's."""
    for name, wanted in inputs.expected().items():
        assert_same_bits(name, outcome[name], wanted.cpu())
