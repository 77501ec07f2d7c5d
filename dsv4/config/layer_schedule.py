"""Layer schedule: the attention and the router of every layer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4.config.model_config import ModelConfig


class LayerKind(StrEnum):
    """Attention of a layer. The values are the `layer_types` of transformers' configuration."""

    SWA = "sliding_attention"
    CSA = "compressed_sparse_attention"
    HCA = "heavily_compressed_attention"


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer.

    The kind, never the rate, decides how a layer compresses: CSA blocks overlap by one block and an
    indexer selects among them, HCA blocks do neither.

    Attributes:
        kind: the attention of the layer.
        ratio: original tokens per compressed entry; 0 for SWA.
        hash_routed: experts come from the token table `tid2eid`, not from the scores.
        index: position in the schedule, where MTP layers follow the main ones.
        prefix: where the checkpoint keeps the layer's tensors: `layers.3`, `mtp.0`.
    """

    kind: LayerKind
    ratio: int
    hash_routed: bool
    index: int
    prefix: str

    @property
    def is_mtp(self) -> bool:
        """Whether this is a multi-token-prediction layer, which the main forward does not run."""
        return self.prefix.startswith("mtp.")

    @property
    def overlap(self) -> bool:
        """Whether a compressed entry also reads the block before its own."""
        return self.kind is LayerKind.CSA


def layer_schedule(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Return every layer of the model in order, main layers first, then MTP layers."""
    main = [
        LayerSpec(
            kind=LayerKind(kind),
            ratio=config.compress_ratios[index],
            hash_routed=index < config.num_hash_layers,
            index=index,
            prefix=f"layers.{index}",
        )
        for index, kind in enumerate(config.layer_types)
    ]
    mtp = [
        LayerSpec(LayerKind.SWA, 0, False, config.num_hidden_layers + stage, f"mtp.{stage}")
        for stage in range(config.num_nextn_predict_layers)
    ]
    return (*main, *mtp)
