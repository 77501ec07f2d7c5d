"""The sampler draws from the distribution it claims, per request, whatever else is in the batch."""

from __future__ import annotations

import math

import pytest
import torch

from dsv4.engine.logprobs import packed_logprobs, unpacked_logprobs
from dsv4.engine.sampler import FAILED, Penalties, SamplingBatch, sample
from dsv4.engine.sampling_params import MAX_LOGIT_BIAS, SamplingKind, SamplingParams

pytestmark = pytest.mark.stage("sampler")


def batch_of(rows: list[tuple[float, float, int]], **more) -> SamplingBatch:
    """A batch from (temperature, top_p, seed) per row, and what else it shall have."""
    temperature, top_p, seed = zip(*rows)
    return SamplingBatch(
        torch.tensor(temperature),
        torch.tensor(top_p),
        torch.tensor(seed),
        greedy=not any(temperature),
        nucleus=any(p < 1 for p in top_p),
        **more,
    )


def draw(logits: torch.Tensor, positions: torch.Tensor, temperature=1.0, top_p=1.0, seed=0, **more):
    """Sample [N] tokens from [V] logits at [N] positions of one request."""
    batch = batch_of([(temperature, top_p, seed)], **more)
    return sample(logits.expand(1, len(positions), -1), positions[None], batch)[0]


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, float]:
    """Pearson's statistic and a bound that a true sampler passes with overwhelming probability."""
    expected = probabilities * counts.sum()
    statistic = ((counts - expected) ** 2 / expected)[expected > 0].sum().item()
    freedom = int((expected > 0).sum()) - 1
    # Mean + 6 standard deviations of chi-square, plus slack for its right tail at few degrees of
    # freedom.
    return statistic, freedom + 6 * math.sqrt(2 * freedom) + 20


def test_temperature_zero_and_below_the_floor_take_the_argmax(seed: int) -> None:
    logits = torch.randn(4, 3, 1000) * 100  # no two nearly equal
    positions = torch.arange(12).view(4, 3)
    greedy = batch_of([(0.0, 1.0, row) for row in range(4)])
    assert torch.equal(sample(logits, positions, greedy), logits.argmax(-1))
    tiny = batch_of([(1e-39, 0.5, row) for row in range(4)])
    assert torch.equal(sample(logits, positions, tiny), logits.argmax(-1))


def test_temperatures_below_the_floor_count_as_the_floor() -> None:
    nearly_equal = torch.tensor([0.0, 1e-6])
    assert set(draw(nearly_equal, torch.arange(200), temperature=1e-9).tolist()) == {0, 1}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_distribution(seed: int, temperature: float) -> None:
    logits = torch.randn(50) * 2
    draws = draw(logits, torch.arange(60_000), temperature, seed=seed)
    counts = torch.bincount(draws, minlength=50).double()
    statistic, bound = chi_square(counts, torch.softmax(logits.double() / temperature, -1))
    assert statistic < bound


def test_distribution_over_seeds_and_consecutive_positions(seed: int) -> None:
    """Draws are independent across seeds 0, 1, 2 ... and from one position to the next."""
    logits = torch.randn(8)
    rows = 50_000
    batch = batch_of([(1.0, 1.0, seed + row) for row in range(rows)])
    positions = torch.tensor([[17, 18]]).expand(rows, 2)
    pairs = sample(logits.expand(rows, 2, -1), positions, batch)
    counts = torch.bincount(pairs[:, 0] * 8 + pairs[:, 1], minlength=64).double()
    single = torch.softmax(logits.double(), -1)
    statistic, bound = chi_square(counts, torch.outer(single, single).flatten())
    assert statistic < bound


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.6, 0.95])
def test_nucleus_is_the_smallest_set_with_the_mass(seed: int, top_p: float) -> None:
    logits = torch.randn(30)
    probabilities = torch.softmax(logits.double(), -1)
    ranked, order = probabilities.sort(descending=True)
    size = int((ranked.cumsum(0) < top_p).sum()) + 1
    nucleus = set(order[:size].tolist())
    draws = draw(logits, torch.arange(100_000), top_p=top_p, seed=seed)
    inside = torch.zeros(30, dtype=torch.double)
    inside[order[:size]] = ranked[:size] / ranked[:size].sum()
    counts = torch.bincount(draws, minlength=30).double()
    assert set(draws.tolist()) <= nucleus
    if size > 1:
        statistic, bound = chi_square(counts, inside)
        assert statistic < bound


def test_nucleus_keeps_exactly_the_boundary_token() -> None:
    """Mass 0.5 is reached by the first token alone; the slightest bit more needs the second."""
    logits = torch.tensor([0.5, 0.25, 0.25]).log()
    positions = torch.arange(2000)
    assert set(draw(logits, positions, top_p=0.5).tolist()) == {0}
    assert set(draw(logits, positions, top_p=0.51).tolist()) == {0, 1}  # ties: the lower id first
    assert set(draw(logits, positions, top_p=0.76).tolist()) == {0, 1, 2}


def test_nucleus_keeps_the_likeliest_token_whatever_top_p(seed: int) -> None:
    logits = torch.randn(100)
    draws = draw(logits, torch.arange(100), top_p=1e-60)  # 0 in fp32
    assert set(draws.tolist()) == {int(logits.argmax())}


def test_rows_do_not_see_each_other(seed: int) -> None:
    """Each row of a mixed batch of greedy, nucleus and plain rows draws what it draws alone."""
    rows = [
        (0.0, 1.0, 5),
        (1.0, 1.0, 5),
        (0.7, 0.9, 5),
        (1.3, 0.2, -(2**63)),
        (1e-3, 1.0, 2**63 - 1),
    ]
    logits = torch.randn(len(rows), 4, 5000)
    positions = torch.randint(0, 1 << 20, (len(rows), 4))
    together = sample(logits, positions, batch_of(rows))
    for i, row in enumerate(rows):
        alone = sample(logits[i : i + 1], positions[i : i + 1], batch_of([row]))
        assert torch.equal(alone[0], together[i]), row
        for j in range(4):
            at = slice(j, j + 1)
            one = sample(logits[i : i + 1, at], positions[i : i + 1, at], batch_of([row]))
            assert one.item() == together[i, j], (row, j)


def test_seed_and_position_both_matter(seed: int) -> None:
    logits = torch.zeros(10_000)
    positions = torch.arange(64)
    first, again = (draw(logits, positions, seed=seed) for _ in range(2))
    assert torch.equal(first, again)
    assert (first != draw(logits, positions, seed=seed + 1)).sum() > 60
    assert (first != draw(logits, positions + 1, seed=seed)).sum() > 60
    assert torch.equal(first[1:], draw(logits, positions + 1, seed=seed)[:-1])


def test_masked_tokens_are_never_drawn(seed: int) -> None:
    logits = torch.randn(100)
    logits[::2] = -math.inf
    assert (draw(logits, torch.arange(5000), temperature=3.0, seed=seed) % 2 == 1).all()


def assert_drawn_from(kept: dict[int, float], draws: torch.Tensor) -> None:
    """Draws have the distribution of these tokens' probabilities, which need not sum to 1."""
    size = int(draws.max()) + 1
    expected = torch.zeros(max(size, *(token + 1 for token in kept)), dtype=torch.double)
    for token, probability in kept.items():
        expected[token] = probability / sum(kept.values())
    counts = torch.bincount(draws, minlength=len(expected)).double()
    assert set(draws.tolist()) <= kept.keys()
    statistic, bound = chi_square(counts, expected)
    assert statistic < bound


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 1}, 1),
        ({"top_k": 3}, 3),
        ({"top_k": 300}, 5),
        ({"min_p": 0.4}, 3),  # of 0.4
        ({"min_p": 1.0}, 1),
        ({"top_p": 0.7}, 3),
        ({"top_k": 3, "top_p": 0.7}, 2),  # of 0.85
        ({"top_k": 2, "top_p": 0.7}, 2),
        ({"min_p": 0.4, "top_p": 0.45}, 1),  # of 0.85
        ({"top_k": 4, "min_p": 0.2, "top_p": 0.85}, 3),  # of 0.95
    ],
    ids=str,
)
def test_what_is_left_to_draw_from(seed: int, options: dict[str, float], kept: int) -> None:
    """By shares of mass that no rounding moves over a bound; ids are not in order."""
    shares = {4: 0.4, 2: 0.25, 0: 0.2, 3: 0.1, 1: 0.05}
    logits = torch.tensor([shares[token] for token in range(5)]).log()
    given = {
        name: torch.tensor([value]) if name != "top_p" else value for name, value in options.items()
    }
    draws = draw(logits, torch.arange(20_000), seed=seed, **given)
    assert_drawn_from(dict(list(shares.items())[:kept]), draws)


def test_top_k_takes_the_lower_ids_of_equals() -> None:
    logits = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0])
    draws = draw(logits, torch.arange(500), top_k=torch.tensor([3]))
    assert set(draws.tolist()) == {0, 1, 2}


def penalties_of(logits: torch.Tensor, prompt: list[int], continuation: list[int], *values: float):
    """Penalties of one row: repetition, presence, frequency."""
    vocab = logits.shape[-1]
    return Penalties(
        *(torch.tensor([value]) for value in values),
        prompted=torch.tensor([[token in prompt for token in range(vocab)]]),
        generated=torch.tensor([[continuation.count(token) for token in range(vocab)]]).int(),
    )


def penalised(scores: list[float], prompt, continuation, repetition, presence, frequency):
    """The definition, token by token."""
    found = list(scores)
    for token, score in enumerate(scores):
        count = continuation.count(token)
        if count or token in prompt:
            score = score / repetition if score > 0 else score * repetition
        found[token] = score - frequency * count - presence * (count > 0)
    return found


def test_penalties(seed: int) -> None:
    """Of each column after the tokens of the columns before it."""
    logits = torch.randn(1, 3, 12) * 3
    prompt, continuation, following = [1, 2, 2, 5], [5, 7, 7, 7], [2, 9]
    penalties = penalties_of(logits, prompt, continuation, 1.5, 0.25, -0.5)
    found = penalties.apply(logits, torch.tensor([following]))
    for column in range(3):
        known = continuation + following[:column]
        expected = penalised(logits[0, column].tolist(), prompt, known, 1.5, 0.25, -0.5)
        assert torch.allclose(found[0, column], torch.tensor(expected), atol=1e-6)
    later = penalties.after(torch.tensor([following]), torch.tensor([[True, False]]))
    assert torch.equal(later.apply(logits[:, 1:2], None), found[:, 1:2])


def test_penalties_change_the_best_token() -> None:
    logits = torch.tensor([[[3.0, 2.9, 0.0]]])
    penalties = penalties_of(logits, [], [0], 1.0, 0.2, 0.0)
    greedy = batch_of([(0.0, 1.0, 0)])
    assert sample(logits, torch.zeros(1, 1).long(), greedy).item() == 0
    greedy = batch_of([(0.0, 1.0, 0)], penalties=penalties)
    assert sample(logits, torch.zeros(1, 1).long(), greedy).item() == 1


def test_bias_promotes_and_bans(seed: int) -> None:
    logits = torch.randn(1, 2, 50)
    positions = torch.arange(2)[None]
    ids = torch.tensor([[7, 9, 0, 0]])  # the others of a row hold nothing: token 0, and 0
    promoted = batch_of([(0.0, 1.0, 0)], bias=(ids, torch.tensor([[50.0, 40.0, 0.0, 0.0]])))
    assert sample(logits, positions, promoted).tolist() == [[7, 7]]
    best = logits.argmax(-1)
    ban = torch.stack([best[0, 0], best[0, 1]])[None]
    banned = batch_of([(1.0, 1.0, 0)], bias=(ban, torch.full((1, 2), -math.inf)))
    draws = sample(logits[:, :1].expand(1, 500, -1), torch.arange(500)[None], banned)
    assert not set(draws[0].tolist()) & set(ban[0].tolist())


BAD = {
    "NaN": lambda row: row.index_fill_(0, torch.tensor([3]), math.nan),
    "NaN and infinity": lambda row: row.copy_(torch.tensor([math.inf, math.nan] * 8)),
    "all masked": lambda row: row.fill_(-math.inf),
}


@pytest.mark.parametrize("spoil", BAD.values(), ids=list(BAD))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_bad_row_fails_alone(seed: int, temperature: float, spoil) -> None:
    rows = [(temperature, 0.9, seed + i) for i in range(4)]
    logits = torch.randn(4, 2, 16)
    positions = torch.randint(1000, (4, 2))
    expected = sample(logits, positions, batch_of(rows))
    spoil(logits[2, 1])
    found = sample(logits, positions, batch_of(rows))
    expected[2, 1] = FAILED
    assert torch.equal(found, expected)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_infinite_logit_is_the_best(seed: int, temperature: float) -> None:
    """It has no probability; that is no reason to fail."""
    logits = torch.randn(16)
    logits[11] = math.inf
    assert set(draw(logits, torch.arange(50), temperature).tolist()) == {11}


def test_code_that_others_need_changes_nothing(seed: int) -> None:
    """A row draws beside rows that use every option what it draws without their code."""
    logits = torch.randn(3, 2, 300)
    positions = torch.randint(1000, (3, 2))
    following = torch.randint(300, (3, 1))
    rows = [(0.0, 1.0, 1), (0.9, 1.0, 2), (0.7, 0.8, 3)]
    plain = sample(logits, positions, batch_of(rows), following)
    more = {
        "top_k": torch.tensor([0, 0, 4]),
        "min_p": torch.tensor([0.0, 0.0, 0.1]),
        "penalties": Penalties(
            *(torch.tensor(values) for values in ((1, 1, 1.3), (0, 0, 2.0), (0, 0, 1.0))),
            prompted=torch.rand(3, 300) < 0.5,
            generated=torch.randint(3, (3, 300)).int(),
        ),
        "bias": (torch.randint(300, (3, 1)), torch.tensor([[0.0], [0.0], [5.0]])),
    }
    beside = sample(logits, positions, batch_of(rows, **more), following)
    assert torch.equal(plain[:2], beside[:2])


@pytest.mark.parametrize("alternatives", [0, 3, 9])
def test_logprobs(seed: int, alternatives: int) -> None:
    logits = torch.randn(2, 3, 7)
    tokens = torch.randint(7, (2, 3))
    tokens[1, 2] = FAILED
    rows = packed_logprobs(logits, tokens, alternatives)
    expected = torch.log_softmax(logits, -1)
    for b, c in ((0, 0), (0, 2), (1, 1)):
        found = unpacked_logprobs(rows[b, c].numpy(), alternatives)
        assert found.logprob == expected[b, c, tokens[b, c]].item()
        ranked = expected[b, c].sort(descending=True)
        pairs = list(zip(ranked.indices.tolist(), ranked.values.tolist()))
        assert found.top == pairs[:alternatives]
        # A request beside one that wants more.
        assert unpacked_logprobs(rows[b, c].numpy(), 1).top == pairs[: min(alternatives, 1)]


def test_the_kind_of_a_forward_is_what_its_requests_need() -> None:
    plain = SamplingParams()
    assert SamplingKind.of([plain, plain]) == SamplingKind()
    # Options of draws mean nothing to a request that does not draw.
    assert SamplingKind.of([SamplingParams(top_p=0.5, top_k=3, min_p=0.1)]) == SamplingKind()
    drawn = SamplingParams(temperature=1.0)
    assert SamplingKind.of([plain, drawn]) == SamplingKind(greedy=False)
    cases = {
        "nucleus": {"temperature": 1.0, "top_p": 0.5},
        "top_k": {"temperature": 1.0, "top_k": 3},
        "min_p": {"temperature": 1.0, "min_p": 0.1},
        "penalized": {"repetition_penalty": 1.1},
        "biased": {"logit_bias": {1: 1.0}},
    }
    for field, options in cases.items():
        kind = SamplingKind.of([drawn, SamplingParams(**options)])
        assert kind == SamplingKind(greedy=False)._replace(**{field: True})
    for options in ({"presence_penalty": 0.1}, {"frequency_penalty": -0.1}):
        assert SamplingKind.of([SamplingParams(**options)]).penalized
    for wanted, alternatives in (((None, 0), 0), ((0, 3), 20), ((None,), None)):
        rows = [SamplingParams(logprobs=count) for count in wanted]
        assert SamplingKind.of(rows).logprobs == alternatives


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("temperature", 1e300),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -math.inf),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0)),
        ("seed", 2**63),
        ("stop_tokens", (3, -1)),
    ],
)
def test_parameters_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("value", ["1", None, True, [0.5]])
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty"]
)
def test_what_is_no_number_is_named(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{field} must be a number, got "):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "value, named", [(3, ""), ("ab", ""), (("a",), r"\[0\]"), ((1, 2.0), r"\[1\]")]
)
def test_stop_tokens_are_integers(value: object, named: str) -> None:
    with pytest.raises(TypeError, match=f"stop_tokens{named} must be a"):
        SamplingParams(stop_tokens=value)


@pytest.mark.parametrize("value", [[1], 3, {"1": 2.0}, {1: "2"}, {1: None}])
def test_a_bias_maps_ids_to_numbers(value: object) -> None:
    with pytest.raises(TypeError, match="logit_bias"):
        SamplingParams(logit_bias=value)


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_new_tokens", True),
        ("max_new_tokens", 2.5),
        ("seed", 1.0),
        ("seed", "1"),
        ("top_k", 1.5),
        ("logprobs", True),
    ],
)
def test_counts_that_are_no_integers_are_named(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{field} must be an integer, got {value!r}"):
        SamplingParams(**{field: value})
