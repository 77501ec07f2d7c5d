"""`generate`: continue prompts and return when all are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from dsv4.cache.paged_cache import block_size
from dsv4.engine.engine import DEFAULT_PREFILL_CHUNK, Engine, check_prompt
from dsv4.engine.sampler import SamplingParams
from dsv4.engine.stats import GenerationStats

if TYPE_CHECKING:
    from dsv4.model.model import DeepseekV4

DEFAULT_MAX_REQUESTS = 32


@dataclass(frozen=True)
class GenerateResult:
    """What `generate` returns.

    Attributes:
        tokens: the new tokens of each prompt, a stop token included.
        stats: what they cost.
    """

    tokens: list[list[int]]
    stats: GenerationStats


def generate(
    model: DeepseekV4,
    prompts: Sequence[Sequence[int]] | Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    num_draft_tokens: int = 0,
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
    max_requests: int = DEFAULT_MAX_REQUESTS,
    use_cuda_graphs: bool | None = None,
    on_tokens: Callable[[int, list[int]], None] | None = None,
) -> GenerateResult:
    """Continue each prompt.

    A prompt's continuation does not depend on the prompts beside it; neither does it depend on
    `num_draft_tokens`, `prefill_chunk` and `max_requests`, up to the rounding of the model's dtype.

    Args:
        prompts: a list of token lists, or an integer tensor [B, S].
        max_new_tokens: tokens to generate per prompt, at most.
        temperature: 0 takes the likeliest token; above 0 samples.
        top_p: sample from the smallest set of tokens with at least this mass, in (0, 1].
        seed: repeats the samples; every prompt uses it. None draws a fresh one per prompt.
        eos_token_id: id or ids that end a continuation; None means the model's, () none at all.
        num_draft_tokens: tokens that MTP drafts ahead per decode forward.
        prefill_chunk: tokens of one prefill forward, padding included.
        max_requests: prompts that run at the same time.
        use_cuda_graphs: replay decode forwards as CUDA graphs; needs a CUDA device and at most 15
            drafts. None: wherever that holds.
        on_tokens: called as on_tokens(index of the prompt, new tokens) whenever there are some.

    Raises:
        TypeError: a prompt does not consist of integers.
        ValueError: a prompt is empty, holds an id outside the vocabulary or is too long for the
            model's context, or another argument is out of range; the message names it.
    """
    config = model.config
    stop_tokens = (eos_token_id,) if isinstance(eos_token_id, int) else eos_token_id
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop_tokens=None if stop_tokens is None else tuple(stop_tokens),
    )
    prompts = [
        check_prompt(prompt, config.vocab_size, f"prompts[{index}]")
        for index, prompt in enumerate(prompts)
    ]
    if not prompts:
        raise ValueError("prompts must hold at least one prompt, got none")
    lengths = sorted((len(prompt) + max_new_tokens for prompt in prompts), reverse=True)
    if lengths[0] > config.max_position_embeddings:
        raise ValueError(
            f"prompts: the longest has {lengths[0] - max_new_tokens} tokens, with max_new_tokens = "
            f"{max_new_tokens} that exceeds the context of {config.max_position_embeddings}"
        )
    max_requests = min(max_requests, len(prompts))
    engine = Engine(
        model,
        max_requests,
        max_context=lengths[0],
        num_draft_tokens=num_draft_tokens,
        prefill_chunk=prefill_chunk,
        num_blocks=sum(-(-length // block_size(config)) for length in lengths[:max_requests]),
        use_cuda_graphs=use_cuda_graphs,
    )
    tokens: list[list[int]] = [[] for _ in prompts]
    index_of = {engine.add(prompt, sampling): index for index, prompt in enumerate(prompts)}
    while engine.num_requests:
        for output in engine.step():
            index = index_of[output.request]
            tokens[index] += output.tokens
            if on_tokens is not None:
                on_tokens(index, output.tokens)
    return GenerateResult(tokens, engine.stats)
