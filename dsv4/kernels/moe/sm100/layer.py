"""A mixture-of-experts layer for Blackwell (sm_100a), from hidden states to hidden states.

Five launches, or four, of which each begins while the one before ends: gate and quantisation;
selection and sort; gate and up of all experts; down of all; sum over a token's experts, unless
their reader adds them.
"""

from __future__ import annotations

from dsv4.kernels.kit.args import compile_kernel
from dsv4.kernels.moe.layer import MoeLayer
from dsv4.kernels.moe.layer_args import ARGS, values
from dsv4.kernels.moe.layer_config import MoeConfig
from dsv4.kernels.moe.sm100.experts import ExpertsSm100


class MoeSm100(MoeLayer):
    """Kernels of one configuration."""

    experts = ExpertsSm100


def build(config: MoeConfig, options: str = ""):
    """Compile the kernels of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    return compile_kernel(MoeSm100(config), ARGS, values(config), options)
