"""The two forwards of an engine, prefill and verification, each with drafting and sampling.

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
from dsv4.engine.sampler import sample

if TYPE_CHECKING:
    from dsv4.cache.model_cache import ModelCache
    from dsv4.model.model import DeepseekV4


def prefill(
    model: DeepseekV4, cache: ModelCache, inputs: ForwardInputs, num_drafts: int, last: bool
) -> Tensor | None:
    """Run a chunk of known tokens.

    Args:
        num_drafts: draft tokens to propose, k; 0 leaves MTP alone.
        last: some row ends its known tokens here, so that tokens are sampled and drafted.

    Returns:
        [B, 1 + k] int64: the token after each row's chunk, then drafts of those that follow it;
        meaningless in rows whose tokens go on. None unless `last`.
    """
    step = inputs.step
    streams = model.streams(inputs.tokens, cache, step)
    if not last:
        if num_drafts:
            model.mtp[0](streams, inputs.next_tokens, cache, step)
        return None
    end = (step.lens - 1).clamp_min(0)
    logits = model.logits(_take(streams, end))
    token = sample(logits, (step.starts + end + 1)[:, None], inputs.sampling)
    if not num_drafts:
        return token
    known = inputs.next_tokens != SAMPLED_HERE
    next_tokens = torch.where(known, inputs.next_tokens, token)
    drafts = _draft(model, cache, inputs, streams, next_tokens, end, num_drafts)
    return torch.cat([token, drafts], dim=1)


def verify(model: DeepseekV4, cache: ModelCache, inputs: ForwardInputs, num_drafts: int) -> Tensor:
    """Run each row's newest token and the drafts after it, C = 1 + k positions.

    Each position's token is sampled from the main model; a draft is accepted if it equals the
    sample before it, and so are all drafts ahead of it. What comes out is therefore distributed
    exactly as without drafts, and equal to it token by token where the logits are equal.

    Returns:
        [B, C + 1 + k] int64: the C samples, of which the first 1 + accepted hold; the number of
        accepted drafts; k new drafts.
    """
    step = inputs.step
    streams = model.streams(inputs.tokens, cache, step)
    sampled = sample(model.logits(streams), step.positions + 1, inputs.sampling)
    drafted = step.offsets[1:] < step.lens[:, None]
    matches = (sampled[:, :-1] == inputs.tokens[:, 1:]) & drafted
    accepted = matches.long().cumprod(dim=1).sum(dim=1)
    parts = [sampled, accepted[:, None]]
    if num_drafts:
        parts.append(_draft(model, cache, inputs, streams, sampled, accepted, num_drafts))
    return torch.cat(parts, dim=1)


def _draft(
    model: DeepseekV4,
    cache: ModelCache,
    inputs: ForwardInputs,
    streams: Tensor,
    next_tokens: Tensor,
    end: Tensor,
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

    Returns:
        [B, num_drafts] int64: the tokens after next_tokens[end].
    """
    step, mtp = inputs.step, model.mtp[0]
    streams = _take(mtp(streams, next_tokens, cache, step), end)
    position = step.starts + end
    drafts = [sample(mtp.logits(streams), position[:, None] + 2, inputs.sampling)]
    while len(drafts) < num_drafts:
        position = position + 1
        single = replace(step, starts=position, lens=step.lens.clamp_max(1), chunk=1)
        streams = mtp(streams, drafts[-1], cache, single)
        drafts.append(sample(mtp.logits(streams), position[:, None] + 2, inputs.sampling))
    return torch.cat(drafts, dim=1)


def _take(streams: Tensor, offsets: Tensor) -> Tensor:
    """One position per row: streams [B, C, hc, D] at offsets [B] -> [B, 1, hc, D]."""
    return streams.gather(1, offsets[:, None, None, None].expand(-1, 1, *streams.shape[2:]))
