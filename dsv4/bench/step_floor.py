"""Time that no decode step beats: bytes of weights and keys over bandwidth, or FLOPs over rate."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4.bench.machine import Machine
from dsv4.config.layer_schedule import LayerKind, LayerSpec
from dsv4.config.model_config import ModelConfig
from dsv4.kernels.kit.kv_entry import Fp8Entry
from dsv4.loader import TensorSpec, inventory

INDEX_KEY_BYTES = 68  # 128 FP4 codes and a scale per 32: no format without loss is smaller
EIGHT_BIT = (torch.float8_e4m3fn, torch.int8)
FP8_RATE = 2  # of bf16's


@dataclass(frozen=True)
class Load:
    """Load of a decode step.

    Attributes:
        requests, tokens: rows, and tokens of each: one and its drafts.
        context: positions before the step.
        distinct: routed experts of a layer that some token uses, on average.
    """

    requests: int
    tokens: int
    context: int
    distinct: float


class StepFloor:
    """Floors of a model's layers, its head and its drafts, in microseconds.

    Every weight is read once in the dtype of the release, every routed expert that some token uses
    once; every request reads its own keys, whatever its drafts are. Each weight takes the larger of
    its two times.
    """

    def __init__(self, config: ModelConfig, machine: Machine) -> None:
        self.config, self.machine = config, machine
        self._tensors: dict[str, list[TensorSpec]] = {}
        self._expert: dict[str, list[TensorSpec]] = {}
        for name, spec in inventory(config).items():
            prefix = ".".join(name.split(".")[:2]) if name.startswith(("layers.", "mtp.")) else name
            if ".experts.0." in name:
                self._expert.setdefault(prefix, []).append(spec)
            elif ".experts." not in name and name != "embed.weight":
                self._tensors.setdefault(prefix, []).append(spec)

    def layer(self, spec: LayerSpec, load: Load) -> float:
        """One layer."""
        tokens = load.requests * load.tokens
        total = sum(self._linear(tensor, tokens) for tensor in self._tensors[spec.prefix])
        used = tokens * self.config.num_experts_per_tok / load.distinct
        for tensor in self._expert[spec.prefix]:
            total += load.distinct * self._linear(tensor, used)
        return total + self._attention(spec, load) + self._index(spec, load)

    def step(self, load: Load) -> float:
        """All layers, the head, and the drafts' layers with a head each."""
        main = [spec for spec in self.config.schedule if not spec.is_mtp]
        tokens = load.requests * load.tokens
        total = sum(self.layer(spec, load) for spec in main) + self.head(tokens)
        for spec in self.config.schedule[len(main) :]:
            total += self.layer(spec, load) + self.head(load.requests)
        return total

    def head(self, tokens: int) -> float:
        """The projection to logits, of so many tokens."""
        (weight,) = self._tensors["head.weight"]
        return self._linear(weight, tokens)

    def _linear(self, tensor: TensorSpec, tokens: float) -> float:
        """A tensor that is read once, and multiplied with so many tokens if it is a matrix."""
        flops = 0.0
        if len(tensor.shape) == 2 and tensor.dtype in (*EIGHT_BIT, torch.bfloat16, torch.float32):
            packed = 2 if tensor.dtype == torch.int8 else 1
            flops = 2 * tokens * packed * tensor.shape[0] * tensor.shape[1]
        rate = FP8_RATE if tensor.dtype in EIGHT_BIT else 1
        return self.machine.floor(tensor.nbytes, flops / rate)

    def _attention(self, spec: LayerSpec, load: Load) -> float:
        config = self.config
        entry = Fp8Entry(config.head_dim, config.qk_rope_head_dim)
        keys = min(load.context, config.sliding_window)
        if spec.ratio:
            complete = load.context // spec.ratio
            keys += min(complete, config.index_topk) if spec.kind is LayerKind.CSA else complete
        flops = 4 * load.requests * load.tokens * config.num_attention_heads * keys
        return self.machine.floor(load.requests * keys * entry.bytes, flops * config.head_dim)

    def _index(self, spec: LayerSpec, load: Load) -> float:
        config = self.config
        entries = load.context // spec.ratio if spec.kind is LayerKind.CSA else 0
        if entries <= config.index_topk:
            return 0.0
        products = load.requests * load.tokens * entries * config.index_n_heads
        flops = 2 * products * config.index_head_dim
        return self.machine.floor(load.requests * entries * INDEX_KEY_BYTES, flops / FP8_RATE)
