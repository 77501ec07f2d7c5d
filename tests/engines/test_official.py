"""Our models against the forward pass that DeepSeek ships, quantisation included.

One layer: nearly every row agrees to the rounding of fp32, and a row in which a rounded activation
tips is off as far as that. Through several layers such a row reaches all later ones: then they must
be no further from the official rows than those of its decode are from those of its prefill.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dsv4
import dsv4.reference.model as reference
from dsv4.loader import save
from dsv4.reference.model import ReferenceModel
from tests.engines import goldens
from tests.engines.checkpoint import digest
from tests.engines.official_cases import CASES, LENGTH, PREFILLED, Case, kept
from tests.model.tiny import Session

pytestmark = pytest.mark.stage("model")
LAYERS = ("window", "CSA", "HCA")
SOURCES = [
    "recorded",
    pytest.param(
        "asked now",
        marks=pytest.mark.skipif(
            "DSV4_OFFICIAL" not in os.environ,
            reason="set DSV4_OFFICIAL to the inference folder of a released checkpoint",
        ),
    ),
]
EQUAL = 1e-5  # relative error of a row without a rounding that tips
# Share of such rows; MTP is one layer further.
BARS = {"prefill": 0.9, "decode": 0.7, "mtp": 0.4}

Results = dict[str, Tensor]
Ask = Callable[[str], Results]


@pytest.fixture(scope="module", params=SOURCES)
def official(request: pytest.FixtureRequest) -> Ask:
    """What the official forward says of a case."""
    if request.param == "recorded":
        tensors = goldens.load("official")
        return lambda name: {
            key.partition("/")[2]: tensor
            for key, tensor in tensors.items()
            if key.startswith(name + "/")
        }
    folder = Path(os.environ["DSV4_OFFICIAL"])
    return functools.cache(lambda name: CASES[name].ask(folder))


@pytest.fixture(scope="module", params=["reference", "model"])
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """What our implementations say of a case."""
    if request.param == "reference":
        return functools.cache(lambda name: _of_reference(CASES[name]))
    folder = tmp_path_factory.mktemp("checkpoints")
    return functools.cache(lambda name: _of_model(CASES[name], folder / name))


@pytest.mark.parametrize("name", CASES)
def test_recorded_for_these_tensors(name: str) -> None:
    assert goldens.about("official")[name] == digest(CASES[name].tensors)


@pytest.mark.parametrize("part", ["prefill", "decode", "mtp"])
@pytest.mark.parametrize("name", LAYERS)
def test_one_layer(name: str, part: str, official: Ask, ours: Ask) -> None:
    share = _equal_rows(ours(name)[part], official(name)[part])
    assert share >= BARS[part], f"{share:.0%} of the rows are equal"


def test_all_layers(official: Ask, ours: Ask) -> None:
    theirs, found = official("all"), ours("all")
    noise = _own_noise(theirs)
    assert 1e-5 < noise < 1e-2
    for part, most in (("prefill", 3), ("decode", 3), ("mtp", 6)):
        divergence = _divergence(found[part], theirs[part])
        assert divergence <= most * noise, f"{part}: KL {divergence:.1e}, noise {noise:.1e}"


def _doubled(scale: Tensor) -> Tensor:
    return (2 * scale.float()).to(scale.dtype)


def _without_rounding(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(reference, name, lambda x, *_, **__: x)


# What is left out of the reference, and the case in which that must show.
CONTROLS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], object]]] = {
    "FP8 inputs and KV": ("window", lambda m: _without_rounding(m, "fake_quantize_e4m3")),
    "FP4 index keys": ("CSA", lambda m: _without_rounding(m, "fake_quantize_e2m1")),
    "Hadamard": ("CSA", lambda m: _without_rounding(m, "hadamard")),
    "compressed entries, CSA": ("CSA", lambda m: {"compressed_branch": False}),
    "compressed entries, HCA": ("HCA", lambda m: {"compressed_branch": False}),
    "sink": ("window", lambda m: {"changes": ("attn_sink", lambda t: torch.full_like(t, -30))}),
    "hash routing": ("window", lambda m: {"changes": ("tid2eid", lambda t: t.roll(1, 0))}),
    "router bias": ("CSA", lambda m: {"changes": ("gate.bias", torch.zeros_like)}),
    "FP4 experts": ("HCA", lambda m: {"changes": ("experts.1.w2.weight", lambda t: t ^ 1)}),
    "FP8 scales": ("window", lambda m: {"changes": ("wo_b.scale", _doubled)}),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_what_is_left_out_shows(
    control: str, official: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, leave_out = CONTROLS[control]
    found = _of_reference(CASES[name], **(leave_out(monkeypatch) or {}))
    shares = [_equal_rows(found[part], official(name)[part]) for part in ("prefill", "decode")]
    assert min(shares) < 0.5, f"{shares} of the rows are equal all the same"


@pytest.mark.parametrize(
    "leave_out",
    [{"compressed_branch": False}, {"changes": ("attn_sink", lambda t: torch.full_like(t, -30))}],
    ids=["compressed entries", "sink"],
)
def test_what_is_left_out_of_all_layers_shows(leave_out: dict, official: Ask) -> None:
    theirs = official("all")
    found = _of_reference(CASES["all"], **leave_out)
    assert _divergence(found["prefill"], theirs["prefill"]) > 5 * _own_noise(theirs)


def test_shifted_mtp_shows(official: Ask) -> None:
    """The block reads the token after the one whose streams it gets."""
    case = CASES["window"]
    model = ReferenceModel(case.config, case.tensors)
    with torch.no_grad():
        streams = model.forward(case.ids[None]).streams[:, :-1]
        shifted = model.head(model.mtp(streams, case.ids[None, :-1]), "mtp.0.")[0]
    assert _equal_rows(kept(shifted), official("window")["mtp"]) < 0.1


def _of_reference(
    case: Case, changes: tuple[str, Callable[[Tensor], Tensor]] | None = None, **options: bool
) -> Results:
    """What the reference says; `changes` replaces all tensors whose names end so."""
    tensors = case.tensors
    if changes is not None:
        ending, change = changes
        changed = {name: change(t) for name, t in tensors.items() if name.endswith(ending)}
        assert changed
        tensors = tensors | changed
    with torch.no_grad():
        output = ReferenceModel(case.config, tensors, **options).forward(case.ids[None])
    rows = output.logits[0]
    mtp = kept(output.mtp_logits[0][0])
    return {"prefill": kept(rows), "decode": rows[PREFILLED:], "mtp": mtp}


def _of_model(case: Case, folder: Path) -> Results:
    """What the model says, in float32, loaded from files."""
    save(folder, case.config, case.tensors)
    model = dsv4.load(folder, device="cpu", dtype=torch.float32)
    ids = case.ids
    session = Session(model, 1, LENGTH)
    session.logits({0: ids[:PREFILLED].tolist()})
    decoded = [session.logits({0: [token]})[0] for token in ids[PREFILLED:].tolist()]
    session = Session(model, 1, LENGTH)
    padded, step = session.prepare({0: ids[:-1].tolist()})
    streams = model.streams(padded, session.cache, step)
    drafted = model.mtp[0](streams, ids[None, 1:], session.cache, step)
    return {
        "prefill": kept(model(ids[None])[0]),
        "decode": torch.cat(decoded),
        "mtp": kept(model.mtp[0].logits(drafted)[0]),
    }


def _equal_rows(found: Tensor, expected: Tensor) -> float:
    """Share of rows without a rounding that tipped."""
    assert found.shape == expected.shape
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float((errors < EQUAL).float().mean())


def _divergence(found: Tensor, expected: Tensor) -> float:
    """Mean KL divergence of rows of logits."""
    p, q = expected.double().log_softmax(-1), found.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def _own_noise(official: Results) -> float:
    """Divergence of its decode from its prefill, which differ by the order of sums alone."""
    decoded = official["decode"]
    return _divergence(decoded, official["prefill"][-len(decoded) :])
