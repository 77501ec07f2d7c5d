"""Key spans of work tiles: a kernel of one warp a token, against the contract in plain Python."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

cutlass = pytest.importorskip("cutlass")

from cutlass import cute  # noqa: E402

from dsv4.kernels.attention.key_span import (  # noqa: E402
    KeyRules,
    KeySpan,
    SeqlenInfo,
    key_span,
)
from dsv4.kernels.attention.sm90.plan import SPAN_WORDS  # noqa: E402
from dsv4.simulator import simulate  # noqa: E402
from tests.simulator.helpers.support import compile_kernel  # noqa: E402

pytestmark = pytest.mark.stage("H")

KEYS = 64
TOKENS, BATCH = 200, 5
TOP_K, WINDOW_ROWS, SLIDING_WINDOW = 150, 100, 20
SPLITS = 3


class Spans:
    """spans[token, split] = key_span(...), one CTA of one warp a token."""

    def __init__(self, is_causal: bool):
        self.is_causal = is_causal

    @cute.jit
    def __call__(self, spans, swa_lens, request_ids, compressed_lens, stream):
        divisors = (
            cute.fast_divmod_create_divisor_v2(cutlass.Int32(SPLITS)),
            cute.fast_divmod_create_divisor_v2(cutlass.Int32(TOKENS // BATCH)),
        )
        self.kernel(spans, swa_lens, request_ids, compressed_lens, *divisors).launch(
            grid=[TOKENS, 1, 1], block=[32, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        spans: cute.Tensor,
        swa_lens: cute.Tensor,
        request_ids: cute.Tensor,
        compressed_lens: cute.Tensor,
        by_splits: cute.FastDivmodDivisorV2,
        by_request_tokens: cute.FastDivmodDivisorV2,
    ):
        token, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        sizes = (cutlass.Int32(x) for x in (TOKENS, TOP_K, BATCH, WINDOW_ROWS))
        seqlens = SeqlenInfo(*sizes, swa_lens, request_ids, compressed_lens, by_request_tokens)
        for split in cutlass.range_constexpr(SPLITS):
            likely = cutlass.Int32(token // by_request_tokens)
            span = key_span(
                *(seqlens, token, cutlass.Int32(split), by_splits, likely),
                KeyRules(KEYS, self.is_causal, SLIDING_WINDOW),
            )
            words = spans[token, split, None]
            if lane == 0:
                span.store(words)


@functools.cache
def compiled(is_causal: bool):
    example = torch.zeros(TOKENS, dtype=torch.int32)
    spans = torch.zeros(TOKENS, SPLITS, SPAN_WORDS, dtype=torch.int32)
    lens = torch.zeros(BATCH, dtype=torch.int32)
    return compile_kernel(Spans(is_causal), "sm_90a", spans, lens, example, example)


def expected(is_causal, swa_lens, request_ids, compressed_lens, token, split) -> KeySpan:
    """The contract, clause by clause."""
    request = request_ids[token]
    compressed, begin, end = 0, 0, 0
    if 0 <= request < BATCH:
        compressed = min(max(compressed_lens[token], 0), TOP_K)
        end = min(max(swa_lens[request], 0), WINDOW_ROWS)
        if is_causal:
            same = itertools.takewhile(lambda other: other == request, request_ids[token + 1 :])
            end = max(end - len(list(same)), 0)
            begin = max(end - SLIDING_WINDOW, 0)
    compressed_tiles = -(-compressed // KEYS)
    tiles = compressed_tiles - (begin - end) // KEYS
    counts = [tiles // SPLITS + (i < tiles % SPLITS) for i in range(SPLITS)]
    first = sum(counts[:split])
    return KeySpan(counts[split], 0, first, compressed, compressed_tiles, begin, end, request)


REQUESTS = {
    "decode": [token % 7 - 1 for token in range(TOKENS)],
    # One request longer than a step of the search, one longer than two.
    "prefill": [0] * 40 + [1] * 100 + [3] * 58 + [2] * 2,
    "one request": [4] * TOKENS,
    "ids that name no request": ([-1] * 30 + [BATCH] * 10 + [2**31 - 1] * 5 + [-(2**31)] * 5) * 4,
    "padding behind": [0] * 60 + [1] * 33 + [-1] * 107,
}


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_spans_follow_the_contract(seed, is_causal, requests) -> None:
    generator = torch.Generator().manual_seed(seed)

    def lengths(count: int, most: int) -> torch.Tensor:
        # Past both ends of the range: they are clamped.
        return torch.randint(-20, most + 40, (count,), generator=generator, dtype=torch.int32)

    swa_lens, compressed_lens = lengths(BATCH, WINDOW_ROWS), lengths(TOKENS, TOP_K)
    request_ids = torch.tensor(REQUESTS[requests], dtype=torch.int32)
    spans = torch.full((TOKENS, SPLITS, SPAN_WORDS), -7, dtype=torch.int32)
    simulate(compiled(is_causal), spans, swa_lens, request_ids, compressed_lens, races=False)
    for token, split in itertools.product(range(TOKENS), range(SPLITS)):
        want = expected(
            is_causal, swa_lens.tolist(), request_ids.tolist(), compressed_lens.tolist(),
            token, split,
        )  # fmt: skip
        assert KeySpan(*spans[token, split].tolist()) == want, f"token {token}, split {split}"


def test_a_span_takes_as_many_words_as_shared_memory_holds_for_it() -> None:
    assert len(KeySpan._fields) == SPAN_WORDS
