"""The sampler draws from the distribution it claims, per request, whatever else is in the batch."""

from __future__ import annotations

import math

import pytest
import torch

from dsv4.engine.sampler import SamplingBatch, SamplingParams, _exponential, _mix, _nucleus, sample

pytestmark = pytest.mark.stage("sampler")


def batch_of(rows: list[tuple[float, float, int]]) -> SamplingBatch:
    """A batch from (temperature, top_p, seed) per row."""
    temperature, top_p, seed = zip(*rows)
    return SamplingBatch(
        torch.tensor(temperature),
        torch.tensor(top_p),
        torch.tensor(seed),
        greedy=not any(temperature),
        nucleus=any(p < 1 for p in top_p),
    )


def draw(logits: torch.Tensor, positions: torch.Tensor, temperature=1.0, top_p=1.0, seed=0):
    """Sample [N] tokens from [V] logits at [N] positions of one request."""
    batch = batch_of([(temperature, top_p, seed)])
    return sample(logits.expand(1, len(positions), -1), positions[None], batch)[0]


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, float]:
    """Pearson's statistic and a bound that a true sampler passes with overwhelming probability."""
    expected = probabilities * counts.sum()
    statistic = ((counts - expected) ** 2 / expected)[expected > 0].sum().item()
    freedom = int((expected > 0).sum()) - 1
    # Mean + 6 standard deviations of chi-square, plus slack for its right tail at few degrees of
    # freedom.
    return statistic, freedom + 6 * math.sqrt(2 * freedom) + 20


def test_mix_is_splitmix64() -> None:
    """First outputs of SplitMix64 from state 1234567, the published test vector."""
    gamma = 0x9E3779B97F4A7C15
    states = [(1234567 + i * gamma) % 2**64 for i in range(1, 6)]
    signed = torch.tensor([s - 2**64 if s >> 63 else s for s in states])
    unsigned = [z % 2**64 for z in _mix(signed).tolist()]
    assert unsigned == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


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
    draws = draw(logits, torch.arange(200_000), temperature, seed=seed)
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


def test_noise_is_exponential_down_to_its_smallest_values(seed: int) -> None:
    """The smallest noise decides which rare token wins: no zeros, no coarse grid near 0."""
    noise = _exponential(torch.tensor([[seed]]), torch.arange(100)[None], 50_000).flatten()
    total = noise.numel()
    assert noise.min() > 0
    for bound in (2.0**-14, 2.0**-7, 0.5, 1.0, 4.0):
        share = -math.expm1(-bound)
        deviation = math.sqrt(total * share * (1 - share))
        assert abs((noise < bound).sum().item() - total * share) < 6 * deviation, bound
    small = noise[noise < 2.0**-14]
    assert (small * 2**24 % 1 != 0).double().mean() > 0.9


def test_noise_is_positive_where_the_hash_is_zero() -> None:
    """This seed starts position 0 where candidate 0 gets the hash 0: it would win by x / 0."""
    noise = _exponential(torch.tensor([[375401267548542172]]), torch.tensor([[0]]), 3)
    assert 0 < noise[0, 0, 0] < 1e-15


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


def test_top_p_one_keeps_tokens_past_a_sum_that_rounded_up_to_one() -> None:
    probabilities = torch.tensor([0.5, 0.50000006, 1e-12])
    assert torch.equal(_nucleus(probabilities, torch.tensor(1.0)), probabilities)


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
        ("seed", 2**63),
        ("stop_tokens", (3, -1)),
    ],
)
def test_parameters_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("value", ["1", None, True, [0.5]])
@pytest.mark.parametrize("field", ["temperature", "top_p"])
def test_what_is_no_number_is_named(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{field} must be a number, got "):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "value, named", [(3, ""), ("ab", ""), (("a",), r"\[0\]"), ((1, 2.0), r"\[1\]")]
)
def test_stop_tokens_are_integers(value: object, named: str) -> None:
    with pytest.raises(TypeError, match=f"stop_tokens{named} must be a"):
        SamplingParams(stop_tokens=value)


@pytest.mark.parametrize(
    "field, value",
    [("max_new_tokens", True), ("max_new_tokens", 2.5), ("seed", 1.0), ("seed", "1")],
)
def test_counts_that_are_no_integers_are_named(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{field} must be an integer, got {value!r}"):
        SamplingParams(**{field: value})
