"""`sample_tokens`: the token of each row of logits, drawn or the likeliest, as function and
operator."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.arch import ARCHS
from dsv4.kernels.sampling import config as configs
from dsv4.kernels.sampling.config import ARGS, SampleTokensConfig, values
from dsv4.ops import sampling_torch
from dsv4.ops.runtime.kernel_op import KernelOp

VOCAB_SIZE = 129_280  # of the released models


class SampleTokens(KernelOp):
    """arg max of p / e over the tokens of a row, of probabilities p and noise e ~ Exp(1)."""

    name = "sample_tokens"
    config = SampleTokensConfig
    args = ARGS
    kernels: ClassVar = dict.fromkeys(ARCHS, "dsv4.kernels.sampling.sample_tokens")

    def values(self, config: SampleTokensConfig) -> Mapping[str, int | str]:
        return values(config)

    def has_kernel(self, config: SampleTokensConfig) -> bool:
        return configs.has_kernel(config)

    def needs(self, config: SampleTokensConfig, name: str) -> bool | None:
        return None if config.truncates else False

    def torch(
        self,
        config: SampleTokensConfig,
        logits: Tensor,
        positions: Tensor,
        temperature: Tensor,
        seed: Tensor,
        tokens: Tensor,
        top_p: Tensor | None,
        top_k: Tensor | None,
        min_p: Tensor | None,
    ) -> None:
        given = logits, positions, temperature, seed, top_p, top_k, min_p
        tokens.copy_(sampling_torch.tokens_of(*given))

    def aot(self) -> Mapping[str, SampleTokensConfig]:
        """The vocabulary of Flash and Pro."""
        return {
            "temperature": SampleTokensConfig(VOCAB_SIZE),
            "top_p, top_k, min_p": SampleTokensConfig(VOCAB_SIZE, truncates=True),
        }


SAMPLE_TOKENS = SampleTokens()
_op = SAMPLE_TOKENS.overload


def sample_tokens(
    logits: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seed: Tensor,
    *,
    top_p: Tensor | None = None,
    top_k: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """Choose a token for each row of logits.

    At temperature 0 it is the likeliest one, the first of equals. Else it is drawn from the
    probabilities of logits / temperature that are left: of all tokens those that `min_p` keeps, of
    these the `top_k` likeliest, of these the nucleus of `top_p`; of equals the lower ids. What is
    drawn is a pure function of the row: its logits and options, its seed and position. It has the
    same bits on every device.

    Args:
        logits: [B, C, V] float32.
        positions: [B, C] int64, of the chosen tokens: with the seed they are the state of the
            noise.
        temperature: [B] float32, of requests, as all that follow; values under 1e-5 count as 1e-5,
            0 or less takes the likeliest token.
        seed: [B] int64.
        top_p: [B] float32, the least share of the mass that is kept; None: 1, all.
        top_k: [B] int64, at least 0; 0 or None: all.
        min_p: [B] float32, the least probability, relative to the likeliest token's; None: 0.

    Returns:
        [B, C] int64; -1 where a logit is NaN or every one is minus infinity.

    Raises:
        ValueError, TypeError: an argument does not fit, or requires grad; the message names it.
    """
    tokens = None
    try:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            given = logits, positions, temperature, seed, tokens, top_p, top_k, min_p
            SAMPLE_TOKENS.check_no_gradients(*given)
        truncates = top_p is not None or top_k is not None or min_p is not None
        identity = sample_tokens_runner_id(index(logits.shape[2]), truncates)
        tokens = torch.empty_like(positions)
        _op(logits, positions, temperature, seed, tokens, identity, top_p, top_k, min_p)
    except Exception:
        SAMPLE_TOKENS.explain(logits, positions, temperature, seed, tokens, top_p, top_k, min_p)
        raise
    return tokens


@torch.compiler.assume_constant_result
def sample_tokens_runner_id(vocab_size: int, truncates: bool = False) -> int:
    """Id of a configuration: what `torch.ops.dsv4.sample_tokens` takes."""
    return SAMPLE_TOKENS.runner_id(vocab_size, truncates)
