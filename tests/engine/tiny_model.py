"""A tiny random DeepSeek-V4 with every kind of layer, and a drafter whose hits are planned."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dsv4.cache.model_cache import ModelCache
from dsv4.cache.step import Step
from dsv4.config.model_config import ModelConfig
from dsv4.engine.sampling_params import SamplingParams
from dsv4.layers.hyper_connection import Streams
from dsv4.model.model import DeepseekV4
from dsv4.ops.sampling_torch import exponential, philox_words

WINDOW = 16
BLOCK = 128
VOCAB = 24

TINY = ModelConfig(
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    head_dim=16,
    qk_rope_head_dim=8,
    q_lora_rank=16,
    o_groups=2,
    o_lora_rank=8,
    sliding_window=WINDOW,
    index_n_heads=2,
    index_head_dim=16,
    index_topk=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    vocab_size=VOCAB,
    compress_ratios=(0, 4, 128),
    num_hash_layers=1,
    max_position_embeddings=4096,
    bos_token_id=None,
    eos_token_id=None,
)


def tiny_model(seed: int, **changes) -> DeepseekV4:
    """Random weights large enough that a wrong or missing cache entry changes the tokens."""
    config = replace(TINY, **changes)
    model = DeepseekV4(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("tid2eid"):
            scores = torch.rand(parameter.shape[0], config.n_routed_experts, generator=generator)
            parameter.copy_(scores.argsort(-1)[:, : parameter.shape[1]])
            continue
        values = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            values = 1 + 0.2 * values
        elif name == "head.weight":
            values *= 2 * config.hidden_size**-0.5
        elif name.endswith("weight") and "embed" not in name:
            values *= 1.5 * parameter.shape[-1] ** -0.5
        elif name.endswith("_fn"):
            values *= parameter.shape[-1] ** -0.5
        elif name.endswith(("_base", "bias")):
            values *= 0.3
        parameter.copy_(values)
    return model


def tokens(generator: torch.Generator, length: int) -> list[int]:
    """A random prompt."""
    return torch.randint(VOCAB, (length,), generator=generator).tolist()


def assert_same_tokens(
    model: DeepseekV4,
    prompt: list[int],
    actual: list[int],
    expected: list[int],
    sampling: SamplingParams | None = None,
) -> None:
    """Two continuations are equal, or part at a choice too close for fp32 to make the same twice.

    Forwards of other shapes round differently; among some ten thousand choices that a test run
    compares, one in a hundred runs has one whose best two candidates differ by no more than that.
    """
    sampling = sampling or SamplingParams()
    pairs = zip(actual, expected)
    parting = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if parting is None:
        assert len(actual) == len(expected)
        return
    known = prompt + actual[:parting]
    scores = model(torch.tensor([known]))[0, -1]
    if sampling.temperature:
        seed, position = torch.tensor([[sampling.seed]]), torch.tensor([[len(known)]])
        noise = exponential(*philox_words(seed, position, VOCAB))
        scores = scores / sampling.temperature - noise[0, 0].log()
    gap = abs(scores[actual[parting]] - scores[expected[parting]]).item()
    best = scores.max() - max(scores[actual[parting]], scores[expected[parting]])
    assert max(gap, best.item()) < 1e-4, f"token {parting} of {actual}, expected {expected}"


class PlannedDrafter:
    """Stands in for a model's MTP block: drafts the true tokens, except where told to miss.

    A random model's MTP block hardly ever hits; rolling back correctly is about the many ways to
    hit and miss. It knows the one sequence that is generated, by position.

    Args:
        truth: prompt and continuation.
        misses: positions whose draft shall be wrong.
    """

    def __init__(self, truth: list[int], misses: set[int]) -> None:
        self.truth = truth
        self.misses = misses
        self.fed: dict[int, int] = {}  # position -> the next token it was last given

    def unwritten_streams(
        self, streams: Tensor, next_ids: Tensor, cache: ModelCache, step: Step
    ) -> Streams:
        assert (step.positions[step.valid] < step.capacity).all()
        for row, valid in zip(range(step.batch), step.valid):
            positions = step.positions[row, valid].tolist()
            self.fed.update(zip(positions, next_ids[row, valid].tolist()))
        # The streams carry the position they predict to `outputs`.
        return Streams((step.positions + 2.0)[:, :, None, None].expand(streams.shape))

    def outputs(self, pending: Streams) -> tuple[Tensor, Tensor]:
        streams = pending.values
        draft = torch.tensor(
            [self._draft(int(position)) for position in streams[..., 0, 0].flatten()]
        )
        logits = torch.nn.functional.one_hot(draft, VOCAB).float()
        return logits.view(*streams.shape[:2], VOCAB), streams

    def best(self, pending: Streams) -> None:
        """As of a head without a kernel."""

    def _draft(self, position: int) -> int:
        true = self.truth[position] if position < len(self.truth) else 0
        return (true + 1) % VOCAB if position in self.misses else true
