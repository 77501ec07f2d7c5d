"""Models with FP8 linears and FP4 or FP8 experts against the reference, roundings included."""

from __future__ import annotations

import pytest
import torch

from dsv4.model.model import DeepseekV4
from tests.model.tiny import (
    Session,
    ids_away_from_ties,
    quantized_config,
    random_model,
    reference_of,
    relative_error,
    with_mtp,
)

SCHEMES = {
    "fp4 experts": dict(expert_scheme="fp4"),
    "fp8 experts": dict(expert_scheme="fp8"),
    "fp8 experts, float32 scales": dict(expert_scheme="fp8", scale_dtype="float32"),
    "plain experts": dict(expert_scheme=None),
}


def _agreement(actual: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Median and largest relative difference of a token's logits."""
    rows = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(rows.median()), float(rows.max())


@pytest.mark.stage("projections")
@pytest.mark.stage("moe")
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
@pytest.mark.parametrize("kinds", ["S", "C", "H"])
def test_layers_equal_the_reference(kinds: str, scheme: dict, seed: int) -> None:
    """One layer: nearly every token agrees to fp32; a value next to a rounding edge may flip."""
    model = random_model(quantized_config(kinds, **scheme))
    ids = ids_away_from_ties(model, 2, 60)
    expected = reference_of(model).forward(ids).logits
    median, largest = _agreement(model(ids), expected)
    assert median < 1e-5, f"median {median:.1e}, seed {seed}"
    assert largest < 0.1, f"largest {largest:.1e}, seed {seed}"


def test_whole_model_stays_with_the_reference(seed: int) -> None:
    """A value that rounds the other way in one token reaches all later ones: close, not equal."""
    model = random_model(with_mtp(quantized_config("SCHC")))
    ids = ids_away_from_ties(model, 2, 90)
    output = reference_of(model).forward(ids)
    median, largest = _agreement(model(ids), output.logits)
    assert median < 0.05 and largest < 1, f"median {median:.1e}, largest {largest:.1e}"
    session = Session(model, 1, 128)
    padded, step = session.prepare({0: ids[0, :-1].tolist()})
    streams = model.streams(padded, session.cache, step)
    drafted = model.mtp[0](streams, ids[:1, 1:], session.cache, step)
    median, _ = _agreement(model.mtp[0].logits(drafted)[0], output.mtp_logits[0][0])
    assert median < 0.05, f"MTP median {median:.1e}"


@pytest.mark.parametrize("kinds", ["S", "C", "H"])
@pytest.mark.parametrize("n", [1, 17])
def test_decode_equals_prefill(n: int, kinds: str, seed: int) -> None:
    """Roundings see the same values step by step, few-token experts included."""
    model = random_model(quantized_config(kinds))
    ids = ids_away_from_ties(model, 1, 50)
    tokens, session = ids[0].tolist(), Session(model, 1, 128)
    parts = [session.logits({0: tokens[:n]})[0]]
    parts += [session.logits({0: [token]})[0] for token in tokens[n:]]
    median, largest = _agreement(torch.cat(parts), model(ids)[0])
    assert median < 1e-5 and largest < 0.2, f"median {median:.1e}, largest {largest:.1e}"


def test_activations_are_rounded_only_if_the_config_says_so(seed: int) -> None:
    """The same weights without a declared quantisation give the logits of exact activations."""
    model = random_model(quantized_config("SCH"))
    exact = DeepseekV4(
        quantized_config("SCH", linear_scheme=None, expert_scheme=None), dtype=torch.float32
    )
    reference = reference_of(model)
    state = {}
    for name, tensor in model.state_dict().items():
        stem = name.removesuffix(".weight")
        if f"{stem}.scale" in model.state_dict():
            tensor = reference.weight(stem)
        if not name.endswith(".scale"):
            state[name] = tensor
    exact.load_state_dict(state)
    ids = ids_away_from_ties(exact, 1, 60)
    plain = exact(ids)
    assert relative_error(plain, reference_of(exact).forward(ids).logits) < 1e-5
    assert relative_error(model(ids), plain) > 1e-3


def test_weights_stay_quantised_in_memory() -> None:
    model = DeepseekV4(quantized_config("SCH"), device="meta")
    state = model.state_dict()
    assert state["layers.0.attn.wq_a.weight"].dtype == torch.float8_e4m3fn
    assert state["layers.0.attn.wo_a.scale"].dtype == torch.float8_e8m0fnu
    assert state["layers.0.ffn.experts.w1.weight"].dtype == torch.int8
    assert state["layers.0.ffn.experts.w1.weight"].shape == (8, 128, 64)
    assert state["layers.0.ffn.experts.w1.scale"].shape == (8, 128, 4)


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(q_lora_rank=96), "in_features"),
        (dict(moe_intermediate_size=96), "must be a multiple of 128"),
    ],
)
def test_what_cannot_be_quantised_is_refused_by_name(changes: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        DeepseekV4(quantized_config("S", **changes), device="meta")
