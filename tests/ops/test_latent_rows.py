"""`latent_rows` on the CPU: what the separate operators do, its operator, its errors."""

from __future__ import annotations

import pytest
import torch

from dsv4.ops import Compression, Requests, latent_rows
from dsv4.ops.latent_rows import LATENT_ROWS
from dsv4.ops.runtime.backend import Device
from dsv4.testing.latent_rows import KINDS, Case, Inputs, assert_tasks

pytestmark = pytest.mark.stage("rows")
QUERY = ("codes", "scales", "norm_out")
SMALL = {"dim": 128, "query_dim": 128, "page": 4}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def small(kind: str, **fields) -> Inputs:
    ratio = KINDS[kind].get("ratio", 4) or 4
    case = Case((ratio - 1, 5, 0), (3, 2, -1), 3, **{**KINDS[kind], **SMALL, **fields})
    return Inputs.make(case, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fields", [{}, {"kv_format": "bf16"}, {"query_dim": 0}], ids=str)
def test_tasks_are_those_of_the_separate_operators(kind, fields) -> None:
    inputs = small(kind, **fields)
    arguments = inputs.arguments
    found = latent_rows(**inputs.options(arguments))
    assert (found is None) == (inputs.query is None)
    assert_tasks(inputs, {**arguments, **dict(zip(QUERY, found or ()))})


def test_operator_is_sound_for_torch() -> None:
    call = small("CSA").call(Device("sm_90a", 1))
    options = [call.options[arg.name] for arg in LATENT_ROWS.tensors[LATENT_ROWS.num_required :]]
    identity = LATENT_ROWS.runner_id(*vars(small("CSA").config).values())
    with torch.inference_mode(False):
        torch.library.opcheck(
            LATENT_ROWS.overload,
            tuple(
                x.clone() if isinstance(x, torch.Tensor) else x
                for x in (*call.args, identity, *options)
            ),
            # Not test_schema: it compares float8 tensors with what torch cannot compute in float8.
            test_utils=("test_faketensor", "test_autograd_registration"),
        )
    schema = LATENT_ROWS.overload._schema.arguments
    written = [arg.name for arg in schema if arg.alias_info is not None]
    entries = ["state", "entry_pool", "index_state", "index_pool"]
    assert written == ["pool", *QUERY, *entries]


@pytest.mark.slow
def test_whole_graph_compilation() -> None:
    inputs = small("CSA")

    def step(x: torch.Tensor, **options) -> list[torch.Tensor]:
        return [tensor.float() for tensor in latent_rows(x, **options)]

    with torch.inference_mode(False), torch.no_grad():
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        found, wanted = (run(**inputs.options(inputs.arguments)) for run in (compiled, step))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


BASE = small("CSA")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": None}, TypeError, "x: got None"),
        ({"query_weight": None}, ValueError, "query_weight: got nothing"),
        ({"requests": None}, ValueError, "state_rows: got nothing"),
        ({"entries": None}, ValueError, "ratio: got 0, an indexer needs"),
        ({"entries": (1, 2)}, TypeError, "entries: got a tuple, needs a Compression"),
        ({"slots": BASE.window.slots[:-1]}, ValueError, "slots: got shape"),
        ({"rope": BASE.window.rope[:0]}, ValueError, "rope: got no rows"),
        ({"eps": 0.0}, ValueError, "eps must be at least 1e-18, got 0.0"),
    ],
)
def test_wrong_arguments_are_named(changes, error, message) -> None:
    with pytest.raises(error, match=f"^{message}"):
        latent_rows(**{**BASE.options(BASE.arguments), **changes})


def test_wrong_tensors_of_a_compressor_are_named() -> None:
    options = BASE.options(BASE.arguments)
    for label, kind, field, wrong, message in (
        ("entries", Compression, "state", lambda x: x[:, :7], "state: got rings of 7 tokens"),
        ("entries", Compression, "ape", lambda x: x[0, 0].item(), "entries.ape: got a float"),
        ("index_keys", Compression, "pool", lambda x: x[..., :16], "index_pool: got shape"),
        ("requests", Requests, "lens", lambda x: x[:1], "lens: got shape"),
    ):
        given = options[label]._asdict()
        changed = kind(**{**given, field: wrong(given[field])})
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            latent_rows(**{**options, label: changed})


def test_gradients_are_refused() -> None:
    options = BASE.options(BASE.arguments)
    with torch.inference_mode(False), torch.enable_grad():
        options["query_weight"] = options["query_weight"].clone().requires_grad_()
        with pytest.raises(ValueError, match=r"^query_weight: requires grad"):
            latent_rows(**options)
