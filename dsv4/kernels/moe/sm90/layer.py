"""A mixture-of-experts layer for Hopper (sm_90a), from hidden states to hidden states.

Four or five launches, of which each begins while the one before ends: gate and quantisation;
selection and sort beside gate and up of the shared expert; gate and up of the routed experts, and
down of all, in one launch or two; sum over a token's experts, unless their reader adds them. Up to
256 tokens whose codes are given, the first two are one. Where an expert has several tokens,
rows of the shared expert's h are rounded by one in between.
"""

from __future__ import annotations

from dsv4.kernels.kit.args import compile_kernel
from dsv4.kernels.moe.config import BF16_DTYPES, ExpertsConfig
from dsv4.kernels.moe.layer import MoeLayer
from dsv4.kernels.moe.layer_args import ARGS, values
from dsv4.kernels.moe.layer_config import MoeConfig
from dsv4.kernels.moe.routing import RoutingConfig
from dsv4.kernels.moe.sm90.bf16_experts import Bf16Experts
from dsv4.kernels.moe.sm90.experts import ExpertsSm90


class MoeSm90(MoeLayer):
    """Kernels of one configuration."""

    @staticmethod
    def experts(config: ExpertsConfig, routing: RoutingConfig):
        is_bf16 = config.expert_dtype in BF16_DTYPES
        return (Bf16Experts if is_bf16 else ExpertsSm90)(config, routing)


def build(config: MoeConfig, options: str = ""):
    """Compile the kernels of `config` for sm_90a; needs no GPU."""
    return compile_kernel(MoeSm90(config), ARGS, values(config), options)
