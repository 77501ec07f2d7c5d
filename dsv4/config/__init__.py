"""Model configuration: sizes, layer schedule and quantisation of a checkpoint, validated."""

from dsv4.config.model_config import ModelConfig

__all__ = ["ModelConfig"]
