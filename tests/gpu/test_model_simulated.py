"""Decode forwards of the shipped checkpoint whose attention is the sm_90a kernel, simulated.

The kernel gets the tensors that the model makes, as it makes them: the ring itself as the window,
keys that the tokens of a request share by stride 0, no compressed rows at all, padding rows.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import dsv4
from dsv4.cache.manager import CacheManager
from dsv4.engine.forward import prefill, verify
from dsv4.engine.inputs import InputStage
from dsv4.engine.sampler import RowSampling
from dsv4.kernels.attention import launch_plan
from dsv4.loader.tokenizer import load_tokenizer
from dsv4.ops.attention import sparse_fmha as fmha
from dsv4.ops.runtime.runner import runner_config
from dsv4.testing.attention import Inputs, assert_attention_close
from dsv4.testing.attention_kernel import AttentionKernels, config_of
from dsv4.testing.harness import simulator
from tests.gpu.test_model_cuda import NOISE

pytestmark = pytest.mark.stage("H")

FOLDER = Path(__file__).parents[2] / "checkpoints" / "tiny"
LENGTHS = (135, 30)  # past the window, and within it
KERNELS = AttentionKernels(simulator("sm_90a"))
GREEDY = RowSampling(0.0, 1.0, 0)
STEPS = 24


class Call(NamedTuple):
    """What a call of the operator looked like."""

    tokens: int
    rows: int  # compressed rows per token
    is_shared: bool  # by stride 0
    is_causal: bool


class SimulatedOperator:
    """Computes calls of the operator in the simulator and checks them against the oracle."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, *arguments: Tensor | int | None) -> None:
        *tensors, o, runner, lens, _ = arguments
        config = runner_config(runner)
        inputs = Inputs(
            *tensors,
            compressed_lens=lens,
            sink_mode=config.sink_mode,
            is_causal=config.is_causal,
            sliding_window=config.sliding_window,
            softmax_scale=config.softmax_scale,
        )
        q, keys, window = tensors[:3]
        size = (len(q), keys.shape[1], window.shape[1], KERNELS.ctas)
        splits = launch_plan.num_splits(config, *size)
        found = KERNELS.run(KERNELS.compile(config_of(inputs)), inputs, splits, o=o)
        expected_o, expected_lse = inputs.expected()
        # The bounds are for unit-scale inputs, values below about 5. A power of two is exact.
        largest = max(x.abs().max().item() for x in (keys, window) if x.numel())
        scale = 2.0 ** max(0, math.ceil(math.log2(largest / 5)))
        assert_attention_close(o / scale, expected_o / scale, found.lse, expected_lse)
        is_shared = len(q) > 1 and keys.stride(0) == 0
        self.calls.append(Call(len(q), keys.shape[1], is_shared, config.is_causal))


class Decoder:
    """Requests of the held-out text, prefilled, and decode forwards over them."""

    def __init__(self, drafts: int = 0) -> None:
        self.model = dsv4.load(FOLDER, device="cpu", dtype=torch.bfloat16)
        path = FOLDER / "held_out.txt"
        self.text = load_tokenizer(FOLDER).encode(path.read_text(encoding="utf-8"))
        self.drafts = drafts
        self.cache = self.model.new_cache(4, 8, 2, max_draft=drafts)
        self.manager = CacheManager(self.cache)
        self.stage = InputStage(sum(LENGTHS), 4, self.cache.device)
        for length in LENGTHS:
            slot = self.manager.admit(length + STEPS + drafts)
            step = self.manager.step([slot], [length], length)
            inputs = self.stage.fill(step, [GREEDY], [self.text[:length]])
            with torch.inference_mode():
                prefill(self.model, self.cache, inputs, 0, last=True)

    def step(self, slots: tuple[int, ...], rows: int) -> Tensor:
        """`verify` of the text's next tokens: drafts that are right, whatever is sampled."""
        chunk = 1 + self.drafts
        tokens = [self.text[self.manager.length(slot) :][:chunk] for slot in slots]
        step = self.manager.step(slots, [chunk] * len(slots), chunk, rows)
        inputs = self.stage.fill(step, [GREEDY] * len(slots), tokens)
        with torch.inference_mode():
            return verify(self.model, self.cache, inputs, self.drafts)


@pytest.mark.parametrize(
    ("slots", "rows", "drafts"), [((1, 0), 4, 0), ((0,), 1, 2), ((0, 1), 2, 1)]
)
def test_decode_calls(slots: tuple[int, ...], rows: int, drafts: int, monkeypatch) -> None:
    decoder = Decoder(drafts)
    operator = SimulatedOperator()
    monkeypatch.setattr(fmha, "_op", operator)
    result = decoder.step(slots, rows)
    assert ((result >= 0) & (result < decoder.model.config.vocab_size)).all()
    main = operator.calls[: len(decoder.model.layers)]
    assert {call.tokens for call in main} == {rows * (1 + drafts)}
    assert {call.is_causal for call in main} == {drafts > 0}
    # A window alone, the indexer's choice of 32 entries, and one entry per 128 tokens.
    assert [call.rows for call in main] == [0, 32, 2, 32]
    assert any(call.is_shared for call in main) == (rows == 1)
    # Drafts come from the MTP layer, the first from the whole chunk.
    assert len(operator.calls) - len(main) == drafts


@pytest.mark.slow
def test_greedy_tokens_are_the_cpus(monkeypatch) -> None:
    """Wherever the CPU's two best logits differ by more than noise; the text is fed."""
    decoder = Decoder()
    longest = max(LENGTHS) + STEPS
    with torch.inference_mode():
        logits = decoder.model(torch.tensor([decoder.text[:longest]]))[0]
    best = logits.topk(2, dim=-1)
    operator = SimulatedOperator()
    monkeypatch.setattr(fmha, "_op", operator)
    positions = torch.tensor(LENGTHS)
    differing = []
    for _ in range(STEPS):
        tokens = decoder.step((0, 1), 2)[:, 0]
        lead = best.values[positions, 0] - best.values[positions, 1]
        differing += lead[tokens != best.indices[positions, 0]].tolist()
        positions += 1
    print(f"{len(differing)} of {2 * STEPS} tokens differ, at leads of {sorted(differing)}")
    assert len(operator.calls) == STEPS * len(decoder.model.layers)
    assert max(differing, default=0.0) <= NOISE
    assert len(differing) <= STEPS // 4
