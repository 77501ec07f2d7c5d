"""`generate`: continue prompts and return when all are done."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from dsv4.cache.model_cache import block_size
from dsv4.engine.arguments import check_drafts, check_integer, check_prompt, check_token_ids
from dsv4.engine.engine import Engine
from dsv4.engine.logprobs import TokenLogprobs
from dsv4.engine.request import Output, Reason
from dsv4.engine.sampling_params import SamplingParams
from dsv4.engine.stats import GenerationStats
from dsv4.model.model import DEFAULT_MAX_REQUESTS, DEFAULT_PREFILL_CHUNK
from dsv4.quoting import quoted

if TYPE_CHECKING:
    from dsv4.config.model_config import ModelConfig
    from dsv4.model.model import DeepseekV4


@dataclass(frozen=True)
class GenerateResult:
    """Result of `generate`.

    Attributes:
        tokens: the new tokens of each prompt, a stop token included.
        stats: what they cost.
        reasons: why each continuation ended: "stop", "length", or "failed" where no token could be
            chosen (`dsv4.engine.request.Output`).
        logprobs: of each new token of each prompt; None: not asked for.
    """

    tokens: list[list[int]]
    stats: GenerationStats
    reasons: list[Reason]
    logprobs: list[list[TokenLogprobs]] | None


def generate(
    model: DeepseekV4,
    prompts: Sequence[Sequence[int]] | Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    logprobs: int | None = None,
    seed: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    num_draft_tokens: int = 0,
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
    max_requests: int = DEFAULT_MAX_REQUESTS,
    use_cuda_graphs: bool | None = None,
    batch_invariant: bool = False,
    on_tokens: Callable[[int, list[int]], None] | None = None,
) -> GenerateResult:
    """Continue each prompt.

    With `batch_invariant` a prompt's continuation depends on nothing but the prompt and how it is
    sampled. Without, the prompts beside it, `num_draft_tokens`, `prefill_chunk` and `max_requests`
    change the shapes of forwards and so the order of sums: it is the same up to the rounding of the
    model's dtype, which quantised models amplify (see `Engine`).

    Args:
        prompts: a list of token lists, or an integer tensor [B, S].
        max_new_tokens: tokens to generate per prompt, at most.
        temperature: 0 takes the likeliest token; above 0 samples.
        top_p: sample from the smallest set of tokens with at least this mass, in (0, 1].
        top_k, min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias, logprobs:
            as `dsv4.engine.sampling_params.SamplingParams` describes them.
        seed: repeats the samples; every prompt uses it. None draws a fresh one per prompt.
        eos_token_id: id or ids that end a continuation; None means the model's, () none at all.
        num_draft_tokens: tokens that MTP drafts ahead per decode forward, at most 64; drafts past
            `max_new_tokens` are not made.
        prefill_chunk: tokens of one prefill forward, padding included.
        max_requests: prompts that run at the same time.
        use_cuda_graphs: replay decode forwards as CUDA graphs; needs a CUDA device and at most 15
            drafts. None: wherever that holds.
        batch_invariant: compute every token by itself, in one shape: the same bits whatever runs
            beside it. Many times slower; without drafts.
        on_tokens: called as on_tokens(index of the prompt, new tokens) whenever there are some.

    Raises:
        TypeError: a prompt does not consist of integers, or another argument is of another type;
            the message names it.
        ValueError: a prompt is empty, holds an id outside the vocabulary or is too long for the
            model's context, or another argument is out of range; the message names it.
    """
    config = model.config
    max_new_tokens = check_integer("max_new_tokens", max_new_tokens, 1)
    if eos_token_id is not None:
        ids = eos_token_id if isinstance(eos_token_id, Collection) else (eos_token_id,)
        eos_token_id = check_token_ids("eos_token_id", ids, config.vocab_size)
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        logprobs=logprobs,
        seed=seed,
        stop_tokens=eos_token_id,
    )
    max_requests = check_integer("max_requests", max_requests, 1)
    num_draft_tokens = check_drafts(config, num_draft_tokens)
    if on_tokens is not None and not callable(on_tokens):
        raise TypeError(f"on_tokens must be callable, got {quoted(on_tokens)}")
    prompts = _check_prompts(prompts, max_new_tokens, config)
    lengths = sorted((len(prompt) + max_new_tokens for prompt in prompts), reverse=True)
    max_requests = min(max_requests, len(prompts))
    engine = Engine(
        model,
        max_requests,
        max_context=lengths[0],
        num_draft_tokens=min(num_draft_tokens, max_new_tokens - 1),
        prefill_chunk=prefill_chunk,
        num_blocks=sum(-(-length // block_size(config)) for length in lengths[:max_requests]),
        use_cuda_graphs=use_cuda_graphs,
        batch_invariant=batch_invariant,
    )
    found: dict[int, Output] = {}
    index_of = {engine.add(prompt, sampling): index for index, prompt in enumerate(prompts)}
    while engine.num_requests:
        for output in engine.step():
            index = index_of[output.request]
            found[index] = found[index].then(output) if index in found else output
            if on_tokens is not None and output.tokens:
                on_tokens(index, output.tokens)
    outputs = [found[index] for index in range(len(prompts))]
    return GenerateResult(
        [output.tokens for output in outputs],
        engine.stats,
        [output.reason for output in outputs],
        None if logprobs is None else [output.logprobs for output in outputs],
    )


def _check_prompts(prompts: object, max_new_tokens: int, config: ModelConfig) -> list[list[int]]:
    """The prompts as lists; an error names the one that is none, or too long."""
    if not isinstance(prompts, (Sequence, Tensor)) or isinstance(prompts, (str, bytes)):
        raise TypeError(f"prompts must be a list of token lists, got {quoted(prompts)}")
    if isinstance(prompts, Tensor) and prompts.dim() != 2:
        got = quoted(list(prompts.shape))
        raise TypeError(f"prompts must be [B, S], got a tensor of shape {got}")
    checked = [
        check_prompt(prompt, config.vocab_size, f"prompts[{index}]")
        for index, prompt in enumerate(prompts)
    ]
    if not checked:
        raise ValueError("prompts must hold at least one prompt, got none")
    longest = max(map(len, checked))
    if longest + max_new_tokens > config.max_position_embeddings:
        raise ValueError(
            f"prompts: the longest has {longest} tokens, with max_new_tokens = "
            f"{max_new_tokens} that exceeds the context of {config.max_position_embeddings}"
        )
    return checked
