"""`sample_tokens` without a kernel: noise, sets of tokens, the oracle, messages, tracing."""

from __future__ import annotations

import math

import pytest
import torch

from dsv4 import ops
from dsv4.kernels.sampling.config import MAX_CLUSTER, SampleTokensConfig, has_kernel, tiling_of
from dsv4.ops.sampling_torch import exponential, philox, philox_words, probabilities, truncated
from dsv4.reference.sampling import sampling_scores
from dsv4.testing.sample_tokens import Case, Inputs

pytestmark = pytest.mark.stage("sampler")


def words(*numbers: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([number]) for number in numbers)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_words_are_those_of_philox_4x32_10(counter, key, expected) -> None:
    """The published vectors."""
    assert tuple(map(int, philox(words(*counter), words(*key)))) == expected


def test_words_of_a_token_are_its_own() -> None:
    """Of seed and position, whatever else is asked for; the refining word is the block's next."""
    seeds = torch.tensor([[5], [-(1 << 63)], [(1 << 63) - 1]])
    positions = torch.tensor([[0, 7], [1 << 40, 3], [9, 1]])
    first, refining = philox_words(seeds, positions, 11)
    assert first.shape == refining.shape == (3, 2, 11)
    assert len(first.unique()) == first.numel()
    assert torch.equal(refining[..., :3], first[..., 1:4])
    assert torch.equal(refining[..., 3], first[..., 0])
    alone, _ = philox_words(seeds[1:2], positions[1:2, 1:], 6)
    assert torch.equal(alone[0, 0], first[1, 1, :6])
    block = philox(words(1, 0, 1 << 8, 0), words(0, 1 << 31))
    assert torch.equal(torch.cat(block), first[1, 0, 4:8])


def test_noise_is_exponential_down_to_its_smallest_values(seed: int) -> None:
    """The smallest noise decides which rare token wins: no zeros, no coarse grid near 0."""
    given = philox_words(torch.tensor([[seed]]), torch.arange(100)[None], 50_000)
    noise = exponential(*given).flatten()
    total = noise.numel()
    assert noise.min() > 0
    for bound in (2.0**-14, 2.0**-7, 0.5, 1.0, 4.0):
        share = -math.expm1(-bound)
        deviation = math.sqrt(total * share * (1 - share))
        assert abs((noise < bound).sum().item() - total * share) < 6 * deviation, bound
    small = noise[noise < 2.0**-14]
    assert (small * 2**24 % 1 != 0).double().mean() > 0.9


def test_noise_is_the_logarithm_of_its_words(seed: int) -> None:
    """To a few units in the last place, where words are small and where they are large."""
    first = torch.randint(1 << 32, (10_000,)) >> torch.randint(33, (10_000,))
    first[::2] = (1 << 32) - 1 - first[::2]
    second = torch.randint(1 << 32, (10_000,))
    u = (first.double() + second.double() * 2.0**-32) * 2.0**-32
    u = u.clamp_max(1 - 2.0**-24)
    expected = -torch.log1p(-u)
    # Of u, fp32 has 24 digits.
    tolerance = 3e-7 * expected + 2.0**-23 * u / (1 - u)
    assert ((exponential(first, second) - expected).abs() < tolerance).all()
    edges = exponential(torch.tensor([0, 0, (1 << 32) - 1]), torch.tensor([0, 1, 0]))
    assert edges[0] == edges[1] == 2.0**-64 and 16.6 < edges[2] < 16.7


def test_probabilities_are_exponentials() -> None:
    exponents = -torch.arange(0, 44, 1e-4)
    expected = exponents.double().exp()
    found = probabilities(exponents)
    assert found[0] == 1
    assert ((found - expected).abs() < 3e-6 * expected).all()
    assert probabilities(torch.tensor([-44.5, -1e30, -math.inf])).tolist() == [0, 0, 0]


def test_only_rows_with_an_option_are_rounded() -> None:
    kept = torch.tensor([1.0, 0.3, 1e-12, 1e-16]).expand(3, 1, 4)
    left = truncated(kept, torch.tensor([1.0, 1.0, 0.9]), torch.tensor([0, 3, 0]))
    unit = 2.0**-44
    assert torch.equal(left[0], kept[0])
    assert left[1, 0].tolist() == [1, kept[1, 0, 1], round(1e-12 / unit) * unit, 0]
    assert left[2, 0].tolist() == [1, kept[2, 0, 1], 0, 0]


def test_sums_of_many_small_probabilities_are_exact() -> None:
    """Mass 2 of 1 and 4,194,304 times 2^-22: half of it is reached by the first token alone."""
    kept = torch.full((1, 1, (1 << 22) + 1), 2.0**-22)
    kept[..., 7] = 1.0
    assert truncated(kept, torch.tensor([0.5]), None).count_nonzero() == 1
    more = truncated(kept, torch.tensor([0.5]).nextafter(torch.tensor(1.0)), None)
    assert more.count_nonzero() == 2 and more[..., 0] > 0


@pytest.mark.parametrize("case", [Case(14, 2, 500), Case(21, 1, 33, truncates=True)], ids=str)
def test_tokens_are_the_oracles(case, seed) -> None:
    """But for quotients that rounding may exchange."""
    inputs = Inputs.make(case, seed)
    tokens = ops.sample_tokens(inputs.logits, **inputs.given)
    draws = 0
    for row in range(case.rows):
        options = {
            name: tensor[row].item() for name, tensor in inputs.given.items() if tensor.ndim == 1
        }
        for column in range(case.chunk):
            position = int(inputs.positions[row, column])
            logits = inputs.logits[row, column].tolist()
            scores = sampling_scores(logits, position, **options)
            token = int(tokens[row, column])
            if scores is None:
                assert token == -1
                continue
            assert scores[token] >= max(scores) * (1 - 1e-5)
            draws += options["temperature"] > 0
    assert draws > 4


def test_vocabularies_of_kernels() -> None:
    for size in (4, 2048, 2052, 16_384, 129_280, 131_072, 262_144):
        config = SampleTokensConfig(size)
        tiling = tiling_of(config)
        assert has_kernel(config)
        assert tiling.ranks * tiling.share * 4 >= size and tiling.ranks <= MAX_CLUSTER
    assert not has_kernel(SampleTokensConfig(262_148))
    assert not has_kernel(SampleTokensConfig(129_281))


def arguments(**more) -> dict[str, torch.Tensor]:
    given = {
        "logits": torch.zeros(2, 3, 8),
        "positions": torch.zeros(2, 3).long(),
        "temperature": torch.ones(2),
        "seed": torch.zeros(2).long(),
    }
    return given | more


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": torch.zeros(2, 3, 8).bfloat16()}, TypeError, "logits: got torch.bfloat16"),
        ({"logits": torch.zeros(2, 8)}, ValueError, "logits: got"),
        ({"logits": torch.zeros(2, 3, 8, requires_grad=True)}, ValueError, "logits"),
        ({"positions": torch.zeros(2, 2).long()}, ValueError, "positions: got shape"),
        ({"seed": torch.zeros(3).long()}, ValueError, "seed: got shape"),
        ({"temperature": None}, TypeError, "temperature: got None, needs a torch.Tensor"),
        ({"top_k": torch.zeros(2)}, TypeError, "top_k: got torch.float32"),
        ({"logits": torch.zeros(2, 3, 0)}, ValueError, "vocab_size: got 0"),
    ],
)
def test_arguments_that_do_not_fit(change, error, message) -> None:
    with pytest.raises(error, match=message):
        ops.sample_tokens(**arguments(**change))


@pytest.mark.parametrize("options", [{}, {"top_k": torch.tensor([2, 0])}], ids=["all", "top_k"])
def test_tracing(options) -> None:
    given = arguments(**options)
    traced = torch.compile(ops.sample_tokens, fullgraph=True, backend="aot_eager")
    assert torch.equal(traced(**given), ops.sample_tokens(**given))
    identity = ops.sample_tokens_runner_id(8, bool(options))
    call = *arguments().values(), torch.empty(2, 3).long(), identity, None, options.get("top_k")
    torch.library.opcheck(torch.ops.dsv4.sample_tokens.default, call)
