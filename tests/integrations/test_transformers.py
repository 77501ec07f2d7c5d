"""transformers' DeepSeek-V4 with our operator equals itself with its own attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dsv4.integrations.transformers import attention, register
from tests.model.test_transformers import transformers_model
from tests.model.tiny import ids_away_from_ties, random_model, relative_error, tiny_config

transformers = pytest.importorskip("transformers")


@pytest.fixture
def models(seed: int):
    """The same weights twice: (our model, transformers', which starts with eager attention)."""
    model = random_model(tiny_config("SCH", rates=(4, 8), index_topk=3))
    register()
    register()
    return model, transformers_model(model.config, model)


def test_logits_of_all_kinds_of_layers(models) -> None:
    model, theirs = models
    ids = ids_away_from_ties(model, 2, 40)
    with torch.no_grad():
        expected = theirs(ids).logits
        theirs.set_attn_implementation("dsv4")
        actual = theirs(ids).logits
    assert theirs.config._attn_implementation == "dsv4"
    assert relative_error(actual, expected) < 1e-5
    assert relative_error(actual, model(ids)) < 1e-4


def test_every_layer_goes_through_the_operator(models, monkeypatch) -> None:
    _, theirs = models
    theirs.set_attn_implementation("dsv4")
    calls = []
    original = torch.ops.dsv4.sparse_fmha_paged

    def counted(*args, **options):
        calls.append(args[0].shape)
        return original(*args, **options)

    monkeypatch.setattr("dsv4.ops.attention.sparse_fmha_paged._op", counted)
    with torch.no_grad():
        theirs(torch.tensor([[1, 2, 3, 4, 5]]))
    assert calls == [(5, 8, 32)] * 3


@pytest.mark.parametrize("padded", [False, True], ids=["one", "left-padded batch"])
def test_generate_gives_the_same_tokens(models, padded: bool) -> None:
    _, theirs = models
    ids, mask = torch.randint(1, 97, (1, 21)), torch.ones(1, 21, dtype=torch.int64)
    if padded:
        ids, mask = torch.cat([ids, ids.flip(1)]), torch.cat([mask, mask])
        mask[1, :4] = 0
    options = dict(attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
    expected = theirs.generate(ids, **options)
    theirs.set_attn_implementation("dsv4")
    assert torch.equal(theirs.generate(ids, **options), expected)


def test_training_is_refused_by_name(models) -> None:
    _, theirs = models
    theirs.set_attn_implementation("dsv4")
    with pytest.raises(ValueError, match="requires grad"):
        theirs(torch.tensor([[1, 2, 3]]))
    for layer in theirs.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"dropout: got 0\.1"):
        theirs.train()(torch.tensor([[1, 2, 3]]))


def _arguments() -> dict:
    q, kv = torch.randn(1, 8, 3, 32), torch.randn(1, 1, 5, 32)
    module = type("DeepseekV4Attention", (), {})()
    return dict(
        module=module,
        query=q,
        key=kv,
        value=kv,
        attention_mask=torch.zeros(1, 1, 3, 5),
        scaling=0.2,
        s_aux=torch.zeros(8),
    )


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"module": SimpleNamespace()}, TypeError, "serves DeepSeek-V4 alone, got SimpleNamespace"),
        ({"s_aux": None}, TypeError, "serves DeepSeek-V4 alone"),
        ({"key": torch.zeros(1, 2, 5, 32)}, ValueError, "key: got 2 heads"),
        ({"query": torch.zeros(1, 8, 3, 32).half()}, TypeError, "query: got torch.float16"),
        ({"dropout": 0.5}, NotImplementedError, "dropout: got 0.5"),
        ({"output_attentions": True}, NotImplementedError, "output_attentions"),
        ({"attention_mask": torch.zeros(1, 1, 3, 4)}, ValueError, "attention_mask: got shape"),
        ({"attention_mask": torch.full((1, 1, 3, 5), -1.0)}, ValueError, "attention_mask: got a b"),
    ],
)
def test_what_cannot_be_served_is_named(changes: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        attention(**(_arguments() | changes))


def test_without_a_mask_every_key_is_seen(seed: int) -> None:
    arguments = _arguments()
    expected = attention(**arguments)[0]
    assert torch.equal(attention(**(arguments | {"attention_mask": None}))[0], expected)
    assert expected.shape == (1, 3, 8, 32)
