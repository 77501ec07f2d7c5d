"""The forwards of an engine, prefill and decode, each with drafting and sampling.

Device code only: shapes follow from the step's (B, C), nothing is read back, so that a forward of
one shape can be captured in a CUDA graph. What the host needs comes back in one tensor.

MTP at position t takes the main model's streams of t and the embedding of token t + 1, rotates at t
and predicts token t + 2. Every position a request keeps passes through MTP with the token that
really follows it; what rejected and chained drafts left at later positions is overwritten then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv4.engine.inputs import SAMPLED_HERE, ForwardInputs
from dsv4.engine.results import packed
from dsv4.engine.sampler import SamplingBatch, sample
from dsv4.layers.hyper_connection import Streams

if TYPE_CHECKING:
    from dsv4.cache.model_cache import ModelCache
    from dsv4.engine.request_state import DecodeShape, RequestState
    from dsv4.model.model import DeepseekV4
    from dsv4.model.mtp import MTPBlock


def prefill(
    model: DeepseekV4, cache: ModelCache, inputs: ForwardInputs, num_drafts: int, last: bool
) -> Tensor | None:
    """Run a chunk of known tokens.

    Args:
        num_drafts: draft tokens to propose, k; 0 leaves MTP alone.
        last: some row ends its known tokens here, so that tokens are sampled and drafted.

    Returns:
        [B, 1 ..] int64, as `packed` has them: the token after each row's chunk; with drafts, that
        none was accepted, and those of the tokens that follow it. Meaningless in rows whose tokens
        go on. None unless `last`.
    """
    step = inputs.step
    streams = model.unwritten_streams(inputs.tokens, cache, step)
    if num_drafts:
        streams = Streams(model.hyper.written(streams))
    if not last:
        if num_drafts:
            model.mtp[0].unwritten_streams(streams.values, inputs.next_tokens, cache, step)
        return None
    end = (step.lens - 1).clamp_min(0)
    sampling = inputs.sampling
    places = _behind(step.starts + end, sampling)[:, None]
    token, logits, _ = _chosen(model, streams.at(end), places, sampling)
    drafted = ()
    if num_drafts:
        chosen = token.clamp_min(0)
        known = inputs.next_tokens != SAMPLED_HERE
        next_tokens = torch.where(known, inputs.next_tokens, chosen)
        later = sampling.after(chosen)
        given = streams.values, next_tokens, end, later
        drafts = _draft(model, cache, inputs, *given, num_drafts)
        drafted = torch.zeros_like(end), drafts
    return packed(token, drafted, logits, sampling.logprobs)


def decode(
    model: DeepseekV4, cache: ModelCache, state: RequestState, rows: Tensor, shape: DecodeShape
) -> Tensor:
    """Verify requests' newest tokens and drafts, and make what was found their newest.

    Args:
        rows: [B] int64 of `state`.

    Returns:
        As `verify`.
    """
    inputs = state.inputs(rows, shape)
    result = verify(model, cache, inputs, shape.chunk - 1)
    step = inputs.step
    kept = torch.minimum(result[:, shape.chunk] + 1, step.lens) if shape.chunk > 1 else step.lens
    state.advance(rows, step.starts + kept, result, shape.chunk)
    if shape.sampling.penalized:
        state.count(rows, result[:, : shape.chunk], step.offsets < kept[:, None])
    return result


def verify(model: DeepseekV4, cache: ModelCache, inputs: ForwardInputs, num_drafts: int) -> Tensor:
    """Run each row's newest token and the drafts after it, C = 1 + k positions.

    Each position's token is sampled from the main model; a draft is accepted if it equals the
    sample before it, and so are all drafts ahead of it. What comes out is therefore distributed
    exactly as without drafts, and equal to it token by token where the logits are equal.

    Returns:
        [B, C ..] int64, as `packed` has them: the C samples, of which the first 1 + accepted hold;
        with drafts, the number of accepted ones and k new ones.
    """
    step, sampling = inputs.step, inputs.sampling
    streams = model.unwritten_streams(inputs.tokens, cache, step)
    following = inputs.tokens[:, 1:] if num_drafts else None
    places = _behind(step.positions, sampling)
    sampled, logits, streams = _chosen(model, streams, places, sampling, following)
    if not num_drafts:
        return packed(sampled, (), logits, sampling.logprobs)
    drafted = step.offsets[1:] < step.lens[:, None]
    matches = (sampled[:, :-1] == inputs.tokens[:, 1:]) & drafted
    accepted = _leading(matches)
    chosen, later = sampled.clamp_min(0), sampling
    if sampling.penalties is not None:  # else the mask would be a launch for nothing
        later = sampling.after(chosen, step.offsets <= accepted[:, None])
    drafts = _draft(model, cache, inputs, streams, chosen, accepted, later, num_drafts)
    return packed(sampled, (accepted, drafts), logits, sampling.logprobs)


def _leading(matches: Tensor) -> Tensor:
    """How many of each row [B, k] match ahead of the first that does not, [B] int64."""
    if matches.shape[1] == 1:  # three launches fewer
        return matches[:, 0].long()
    return matches.long().cumprod(dim=1).sum(dim=1)


def _draft(
    model: DeepseekV4,
    cache: ModelCache,
    inputs: ForwardInputs,
    streams: Tensor,
    next_tokens: Tensor,
    end: Tensor,
    sampling: SamplingBatch,
    num_drafts: int,
) -> Tensor:
    """Feed MTP the step, then chain drafts from each row's last kept position.

    The first MTP block makes every draft; a chained one gets the block's own output streams in
    place of the main model's. A draft is sampled with the noise its position will be sampled with,
    so that sampled drafts match as often as the two distributions allow.

    Args:
        streams: [B, C, hc, D], the main model's.
        next_tokens: [B, C], the token after each position, as far as it is kept.
        end: [B], offset of the last kept position of each row.
        sampling: behind next_tokens[end].

    Returns:
        [B, num_drafts] int64: the tokens after next_tokens[end].
    """
    step, mtp = inputs.step, model.mtp[0]
    pending = mtp.unwritten_streams(streams, next_tokens, cache, step).at(end)
    position = step.starts + end
    drafts: list[Tensor] = []
    while True:
        places = _behind(position, sampling, 2)[:, None]
        draft, _, streams = _chosen(mtp, pending, places, sampling)
        draft = draft.clamp_min(0)
        drafts.append(draft)
        if len(drafts) == num_drafts:
            return torch.cat(drafts, dim=1)
        sampling = sampling.after(draft)
        position = position + 1
        single = replace(step, starts=position, lens=step.lens.clamp_max(1), chunk=1)
        pending = mtp.unwritten_streams(streams, draft, cache, single)


def _chosen(
    part: DeepseekV4 | MTPBlock,
    streams: Streams,
    positions: Tensor,
    sampling: SamplingBatch,
    following: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Tokens of streams as `sample` chooses them, [B, C] int64, the logits that they were chosen
    from, and the streams [B, C, hc, D]; no logits where the head's kernel finds the largest ones.
    """
    best = part.best(streams) if sampling.takes_best else None
    if best is not None:
        return best[0], None, best[1]
    logits, written = part.outputs(streams)
    return sample(logits, positions, sampling, following), logits, written


def _behind(positions: Tensor, sampling: SamplingBatch, distance: int = 1) -> Tensor:
    """Positions of the tokens that are chosen at others; which only draws depend on."""
    return positions if sampling.greedy else positions + distance
