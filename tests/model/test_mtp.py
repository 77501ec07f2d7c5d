"""The multi-token-prediction block against the reference, and its own cache."""

from __future__ import annotations

import pytest
import torch

from tests.model.tiny import (
    Session,
    ids_away_from_ties,
    random_model,
    reference_of,
    relative_error,
    tiny_config,
    with_mtp,
)

pytestmark = pytest.mark.stage("mtp")


def _drafted(session: Session, tokens: list[int], following: list[int], **options):
    """Run main model and MTP block over the same step; return logits of both."""
    model = session.model
    ids, step = session.prepare({0: tokens}, **options)
    next_ids = torch.zeros_like(ids)
    next_ids[0, : len(following)] = torch.tensor(following)
    streams = model.streams(ids, session.cache, step)
    drafted = model.mtp[0](streams, next_ids, session.cache, step)
    return model.logits(streams)[0, : len(tokens)], model.mtp[0].logits(drafted)[0, : len(tokens)]


@pytest.mark.parametrize("cuts", [[40], [1, 2, 9, 10, 18], [7] + [1] * 33], ids=str)
def test_drafts_equal_the_reference(cuts: list[int], seed: int) -> None:
    model = random_model(with_mtp(tiny_config("SCH")))
    ids = ids_away_from_ties(model, 1, 41)
    expected = reference_of(model).forward(ids)
    session, tokens, done, main, drafts = Session(model, 1, 128), ids[0].tolist(), 0, [], []
    for cut in cuts:
        following = tokens[done + 1 : done + 1 + cut]
        for parts, logits in zip(
            (main, drafts), _drafted(session, tokens[done : done + cut], following)
        ):
            parts.append(logits)
        done += cut
    assert relative_error(torch.cat(main), expected.logits[0, :40]) < 1e-5
    assert relative_error(torch.cat(drafts), expected.mtp_logits[0][0]) < 1e-5


def test_a_chain_of_drafts_extends_the_block_by_its_own_streams(seed: int) -> None:
    """Draft i takes the streams of draft i - 1 at the position after it."""
    model = random_model(with_mtp(tiny_config("SH")))
    prompt = ids_away_from_ties(model, 1, 20)
    guesses = torch.randint(0, model.config.vocab_size, (4,)).tolist()
    reference = reference_of(model)
    ids, block = prompt[0].tolist(), model.mtp[0]

    session = Session(model, 1, 128, max_draft=4)
    padded, step = session.prepare({0: ids})
    streams = model.streams(padded, session.cache, step)
    chained = block(streams, torch.tensor([ids[1:] + guesses[:1]]), session.cache, step)
    known, following = reference.forward(prompt).streams, ids[1:] + guesses[:1]
    for guess in guesses[1:]:
        _, step = session.prepare({0: [0]})
        chained = block(chained[:, -1:], torch.tensor([[guess]]), session.cache, step)
        # The oracle has no cache: it sees X up to here, then its own outputs.
        output = reference.mtp(known, torch.tensor([following]))
        known, following = torch.cat((known, output[:, -1:]), dim=1), [*following, guess]
        expected = reference.head(reference.mtp(known, torch.tensor([following])), "mtp.0.")
        assert relative_error(block.logits(chained)[0, -1], expected[0, -1]) < 1e-5


def test_a_second_block_continues_the_first(seed: int) -> None:
    """Block i predicts token t + 2 + i from the streams of block i - 1, with a cache of its own."""
    model = random_model(with_mtp(tiny_config("S"), layers=2))
    ids = ids_away_from_ties(model, 1, 30)
    expected = reference_of(model).forward(ids).mtp_logits[1][0]
    session, tokens, parts = Session(model, 1, 128), ids[0].tolist(), []
    for begin, stop in ((0, 20), (20, 21), (21, 28)):
        padded, step = session.prepare({0: tokens[begin:stop]})
        streams = model.streams(padded, session.cache, step)
        for index, block in enumerate(model.mtp):
            following = torch.tensor([tokens[begin + 1 + index : stop + 1 + index]])
            streams = block(streams, following, session.cache, step)
        parts.append(model.mtp[1].logits(streams)[0])
    assert relative_error(torch.cat(parts), expected) < 1e-5


def test_embedding_and_head_are_shared(seed: int) -> None:
    model = random_model(with_mtp(tiny_config("S")))
    names = set(model.state_dict())
    assert not {n for n in names if n.startswith("mtp.") and ("embed" in n or ".head." in n)}
    session = Session(model, 1, 128)
    _, before = _drafted(session, [5, 6], [6, 7])
    model.head.weight.data.mul_(2)
    session = Session(model, 1, 128)
    _, after = _drafted(session, [5, 6], [6, 7])
    torch.testing.assert_close(after, 2 * before)
