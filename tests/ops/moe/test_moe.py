"""`moe` in torch: against the reference, edges, refusals, and what prepared weights give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4 import ops
from dsv4.kernels.moe.layer_config import MoeConfig
from dsv4.ops.moe import forms, op, torch_path
from dsv4.ops.moe import weights as weights_module
from dsv4.ops.moe.weights import GatedWeights, choose_form, prepare_, restore_
from dsv4.ops.quantize import quantize_e4m3
from dsv4.ops.runtime.backend import Device
from dsv4.reference import moe as oracle
from dsv4.reference.quantize import fake_quantize_e4m3, fake_quantize_nvfp4
from dsv4.reference.router import route
from dsv4.testing.moe import Case, Inputs, Weight

pytestmark = pytest.mark.stage("moe")

TOP_K, SCALING, LIMIT, VOCABULARY = 3, 1.7, 4.0, 40
HIDDEN, INNER, EXPERTS = 256, 384, 8


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def gated(weights: dict[str, Weight]) -> GatedWeights:
    parts = [weights[name] for name in ("w1", "w3", "w2")]
    scales = [None if p.scale is None else p.scale.clone() for p in parts]
    rows = [p.whole for p in parts] + [p.inputs for p in parts]
    rows = [row for row in rows if row is not None]
    whole = torch.stack(rows) if rows else None
    return GatedWeights(*(p.codes.clone() for p in parts), *scales, whole)


def plain(weights: dict[str, Weight], dtype: torch.dtype) -> GatedWeights:
    """The same, decoded."""
    stacked = [weights[name] for name in ("w1", "w3", "w2")]

    def dense(weight: Weight) -> Tensor:
        if weight.codes.dim() == 2:
            return weight.dense().to(dtype)
        return torch.stack([weight.dense(e) for e in range(len(weight.codes))]).to(dtype)

    return GatedWeights(*map(dense, stacked))


class Layer:
    """Tensors of a layer and how it is called."""

    def __init__(self, case: Case, seed: int, is_hashed: bool = False) -> None:
        self.inputs = Inputs.make(case, seed)
        generator = torch.Generator().manual_seed(seed)
        self.x = self.inputs.x.clone()
        self.gate = torch.randn(case.experts, case.hidden, generator=generator) / 10
        self.bias = torch.randn(case.experts, generator=generator)
        self.experts, self.shared = gated(self.inputs.routed), gated(self.inputs.shared)
        self.form = "released"
        self.choice = {"bias": self.bias}
        if is_hashed:
            order = torch.rand(VOCABULARY, case.experts, generator=generator).argsort(1)
            ids = torch.randint(0, VOCABULARY, (case.tokens,), generator=generator)
            self.choice = {"table": order[:, :TOP_K].contiguous(), "input_ids": ids}

    def __call__(self, x: Tensor | None = None, **options) -> Tensor:
        arguments = {
            "top_k": TOP_K, "scaling": SCALING, "limit": LIMIT, "form": self.form,
            **self.choice, **options,
        }  # fmt: skip
        x = self.x if x is None else x
        return ops.moe(x, self.gate, self.experts, self.shared, **arguments)

    def expected(self) -> Tensor:
        """[T, D] by the reference, which evaluates every expert."""
        ids, weights = route(self.x, self.gate, top_k=TOP_K, scaling=SCALING, **self.choice)
        routed = plain(self.inputs.routed, torch.float32)
        shared = plain(self.inputs.shared, torch.float32)
        matrices = (routed.w1, routed.w2, routed.w3)
        dense = oracle.dense_weights(ids, weights, len(self.gate))
        y = oracle.routed_experts(self.x, *matrices, dense, LIMIT, fake_quantize_e4m3)
        matrices = (shared.w1, shared.w2, shared.w3)
        return y + oracle.shared_expert(self.x, *matrices, LIMIT, fake_quantize_e4m3)


def case_of(tokens: int, **changes) -> Case:
    return Case(tokens, HIDDEN, INNER, EXPERTS, TOP_K, **changes)


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("is_hashed", [False, True], ids=["scores", "table"])
@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8"])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_equals_the_reference(tokens, expert_dtype, is_hashed, seed) -> None:
    layer = Layer(case_of(tokens, expert_dtype=expert_dtype), seed, is_hashed)
    wide = layer(layer.x.float())
    assert wide.dtype == torch.float32
    assert relative(wide, layer.expected()) < 2e-2  # a code or two tip
    # Gate, up and h are rounded to bf16: one in twenty codes of h tips, by 9 % of its value.
    assert relative(layer(), layer.expected()) < 8e-2
    assert relative(layer(out_dtype=torch.float32), layer.expected()) < 8e-2


@pytest.mark.parametrize("tokens", [3, 20])
def test_plain_weights(tokens, seed) -> None:
    layer = Layer(case_of(tokens), seed)
    layer.experts, layer.shared = (
        plain(weights, torch.float32) for weights in (layer.inputs.routed, layer.inputs.shared)
    )
    ids, weights = route(layer.x, layer.gate, top_k=TOP_K, scaling=SCALING, bias=layer.bias)
    dense = oracle.dense_weights(ids, weights, EXPERTS)
    w1, w3, w2 = layer.experts.codes
    expected = oracle.routed_experts(layer.x, w1, w2, w3, dense, LIMIT)
    w1, w3, w2 = layer.shared.codes
    expected = expected + oracle.shared_expert(layer.x, w1, w2, w3, LIMIT)
    assert relative(layer(layer.x.float()), expected) < 1e-5
    # Where no kernel runs, there are no rows to hand on.
    assert torch.equal(layer(combine=False), layer())


def test_nvfp4_weights_with_activations_that_are_not_rounded(seed) -> None:
    layer = Layer(case_of(6), seed)
    generator = torch.Generator().manual_seed(seed)

    def nvfp4(codes: Tensor) -> tuple[Tensor, Tensor]:
        shape = (*codes.shape[:-1], codes.shape[-1] // 8)
        scale = (torch.rand(shape, generator=generator) + 0.5).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8), scale

    codes, scales = zip(*map(nvfp4, layer.experts.codes))
    whole = torch.rand(3, EXPERTS, generator=generator) * 0.02 + 0.01
    layer.experts = GatedWeights(*codes, *scales, whole)
    packed = layer(layer.x.float())
    dense = [
        torch_path.decoded(c, s, "released", (128, 128), torch.float32, w)
        for c, s, w in zip(codes, scales, whole)
    ]
    layer.experts = GatedWeights(*dense)
    assert relative(packed, layer(layer.x.float())) < 1e-6


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("spread", [11, 14])
@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8"])
def test_prepared_weights_are_the_same_weights(
    expert_dtype, spread, arch, seed, monkeypatch
) -> None:
    case = case_of(20, expert_dtype=expert_dtype, spread=spread)
    layer = Layer(case, seed)
    before = [t.view(torch.uint8).clone() for t in (*layer.experts, *layer.shared) if t is not None]
    expected = layer()
    layer.form = choose_form(layer.experts, op.FORMS[arch])
    is_fp4 = expert_dtype == "fp4"
    hopper = ("raw" if spread > 11 else "row_packed") if is_fp4 else "packed"
    assert layer.form == (hopper if arch == "sm_90a" else "tiled")
    # Several parts, the last of them smaller.
    monkeypatch.setattr(weights_module, "MAX_MOVED", 3 * HIDDEN * INNER)
    for weights in (layer.experts, layer.shared):
        prepare_(weights, layer.form)
    assert torch.equal(layer(), expected)
    assert torch.equal(layer(layer.x[:7]), expected[:7])
    for weights in (layer.experts, layer.shared):
        restore_(weights, layer.form)
    after = [t.view(torch.uint8) for t in (*layer.experts, *layer.shared) if t is not None]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("expert_dtype", ["nvfp4", "bfloat16"])
def test_weights_multiplied_in_bf16_are_prepared(expert_dtype, seed, monkeypatch) -> None:
    layer = Layer(case_of(20, expert_dtype=expert_dtype, shared_dtype="fp8"), seed)
    before = [t.view(torch.uint8).clone() for t in layer.experts if t is not None]
    expected, few = layer(), layer(layer.x[:7])
    layer.form = choose_form(layer.experts, op.FORMS["sm_90a"])
    assert layer.form == "packed"
    monkeypatch.setattr(weights_module, "MAX_MOVED", 3 * HIDDEN * INNER)
    for weights in (layer.experts, layer.shared):
        prepare_(weights, layer.form)
    assert torch.equal(layer(), expected)
    assert torch.equal(layer(layer.x[:7]), few)
    for weights in (layer.experts, layer.shared):
        restore_(weights, layer.form)
    after = [t.view(torch.uint8) for t in layer.experts if t is not None]
    assert all(map(torch.equal, before, after))


def test_float32_weights_have_one_form(seed) -> None:
    """The form says how the quantised ones beside them lie."""
    weight = torch.randn(3, 32, 128)
    for form in ("released", "packed", "row_packed", "raw", "tiled"):
        found = weights_module.decoded(weight, None, form, (128, 128), torch.float32)
        assert torch.equal(found, weight)


@pytest.mark.parametrize("dtypes", [("nvfp4", "float32"), ("float32", "bfloat16")])
def test_widths_that_no_weights_are_prepared_of_are_refused(dtypes) -> None:
    sizes = {"hidden": 128, "inner": 64, "experts": 4, "top_k": 2}
    named = dict(zip(("expert_dtype", "shared_dtype"), dtypes))
    MoeConfig(**sizes, **named)
    with pytest.raises(ValueError, match="inner must be a multiple of 128 for prepared experts"):
        MoeConfig(**sizes, **named, form="packed")


@pytest.mark.parametrize("tokens", [5, 40])
def test_nvfp4_activations_equal_the_reference(tokens, seed) -> None:
    """Both torch paths; x with the largest scale of all experts, h with each one's own."""
    case = case_of(tokens, expert_dtype="nvfp4", shared_dtype="bfloat16", is_tiled=True)
    layer = Layer(case, seed)
    scales = layer.experts.global_scales
    ids, weights = route(layer.x, layer.gate, top_k=TOP_K, scaling=SCALING, bias=layer.bias)
    dense = oracle.dense_weights(ids, weights, EXPERTS)
    w1, w3, w2 = plain(layer.inputs.routed, torch.float32).codes
    of_x, of_h = scales[3:5].amax()[None], scales[5]
    expected = oracle.routed_experts(
        layer.x, w1, w2, w3, dense, LIMIT,
        lambda x: fake_quantize_nvfp4(x, of_x), lambda h: fake_quantize_nvfp4(h, of_h),
    )  # fmt: skip
    w1, w3, w2 = plain(layer.inputs.shared, torch.float32).codes
    expected = expected + oracle.shared_expert(layer.x, w1, w2, w3, LIMIT)
    wide = layer(layer.x.float())
    assert relative(wide, expected) < 2e-2  # a code or two tip
    assert relative(layer(), expected) < 8e-2
    plain_inputs = layer.experts.without_input_scales()
    assert len(plain_inputs.global_scales) == 3 and not plain_inputs.rounds_to_nvfp4
    layer.experts = plain_inputs
    assert relative(layer(layer.x.float()), expected) > 2e-2


def test_nvfp4_for_blackwell_is_the_same_weights(seed, monkeypatch) -> None:
    layer = Layer(case_of(20, expert_dtype="nvfp4", is_tiled=True), seed)
    before = [t.view(torch.uint8).clone() for t in layer.experts if t is not None]
    expected, few = layer(), layer(layer.x[:7])
    layer.form = choose_form(layer.experts, op.FORMS["sm_100a"])
    assert layer.form == "tiled"
    monkeypatch.setattr(weights_module, "MAX_MOVED", 3 * HIDDEN * INNER)
    for weights in (layer.experts, layer.shared):
        prepare_(weights, layer.form)
    assert torch.equal(layer(), expected)
    assert torch.equal(layer(layer.x[:7]), few)
    # The kernels' arithmetic goes with the order of the weights.
    layer.experts = layer.experts.without_input_scales()
    with pytest.raises(ValueError, match="global_scales"):
        layer()
    layer.experts = layer.experts._replace(global_scales=None)
    layer.form = "released"
    with pytest.raises(ValueError, match="global_scales: got 0 rows, needs 3, or 6"):
        layer()
    for weights in (layer.experts, layer.shared):
        restore_(weights, "tiled")
    after = [t.view(torch.uint8) for t in layer.experts if t is not None]
    assert all(map(torch.equal, before, after))


def test_input_scales_beside_weights_for_hopper_are_refused(seed) -> None:
    layer = Layer(case_of(20, expert_dtype="nvfp4", is_tiled=True), seed)
    layer.form = "packed"
    with pytest.raises(ValueError, match="global_scales"):
        layer()


@pytest.mark.parametrize(
    ("arch", "has_scales", "served"),
    [("sm_90a", True, True), ("sm_90a", False, True), ("sm_100a", True, True),
     ("sm_100a", False, False), ("sm_103a", True, True)],
)  # fmt: skip
def test_forms_of_nvfp4(arch, has_scales, served, seed, monkeypatch) -> None:
    """Blackwell's kernels need scales of inputs."""
    monkeypatch.setattr(forms, "kernel_device", lambda tensor: Device(arch, 1))
    layer = Layer(Case(2, 512, 256, 32, 2, expert_dtype="nvfp4", is_tiled=True), seed)
    experts = layer.experts if has_scales else layer.experts.without_input_scales()
    found = forms.prepared_forms(layer.gate.bfloat16(), experts, layer.shared, (128, 128), 2)
    assert found == (op.FORMS[arch] if served else ())


def test_nvfp4_that_blackwell_does_not_multiply_is_refused(seed) -> None:
    experts = Layer(case_of(2, expert_dtype="nvfp4", is_tiled=True), seed).experts
    experts.w1_scale.view(torch.uint8)[1, 5, 3] = 0x81
    assert choose_form(experts, op.FORMS["sm_90a"]) == "packed"
    with pytest.raises(ValueError, match=r"^w1_scale: got a negative scale"):
        choose_form(experts, op.FORMS["sm_100a"])
    experts.w1_scale.view(torch.uint8)[1, 5, 3] = 0
    for value in (0.0, torch.nan, torch.inf, -1.0):
        experts.global_scales[4, 2] = value
        with pytest.raises(ValueError, match="global_scales: got a scale of inputs that is no"):
            choose_form(experts, op.FORMS["sm_100a"])


def test_nvfp4_scales_that_are_not_numbers_are_refused(seed) -> None:
    experts = Layer(case_of(2, expert_dtype="nvfp4"), seed).experts
    experts.w3_scale.view(torch.uint8)[1, 5, 3] = 0xFF
    with pytest.raises(ValueError, match=r"^w3_scale: got NaN"):
        choose_form(experts, op.FORMS["sm_90a"])


def test_scales_of_bf16_weights_are_refused_by_name(seed) -> None:
    layer = Layer(case_of(2, expert_dtype="bfloat16"), seed)
    scale = torch.ones(EXPERTS, 1, 1).to(torch.float8_e8m0fnu)
    names = ("w1_scale", "w3_scale", "w2_scale")
    layer.experts = layer.experts._replace(**dict.fromkeys(names, scale))
    with pytest.raises(ValueError, match=r"^w1_scale: got \d+ rows, the weights are bfloat16"):
        layer()


def test_both_torch_paths_agree(seed, monkeypatch) -> None:
    layer = Layer(case_of(12), seed)
    few = layer(layer.x.float())
    monkeypatch.setattr(torch_path, "MAX_GATHERED_ELEMENTS", 2 * TOP_K * HIDDEN * INNER)
    assert torch.equal(layer(layer.x.float()), few)
    monkeypatch.setattr(op, "MAX_GATHERED_TOKENS", 0)
    assert relative(layer(layer.x.float()), few) < 1e-6


@pytest.mark.parametrize("tokens", [4, 30])
def test_padding_tokens_touch_nothing(tokens, seed) -> None:
    layer = Layer(case_of(tokens), seed)
    right = layer()
    layer.x[tokens - 2 :] = torch.nan
    out = torch.full_like(layer.x, torch.nan)
    live = torch.tensor([tokens - 2], dtype=torch.int32)
    found = layer(live_tokens=live, out=out)
    assert found is out
    assert torch.equal(found[: tokens - 2], right[: tokens - 2])
    assert (found[tokens - 2 :] == 0).all()


def test_ids_out_of_range_are_no_experts(seed) -> None:
    layer = Layer(case_of(5), seed, is_hashed=True)
    layer.choice["table"][:, 1] = EXPERTS
    layer.choice["input_ids"][2:4] = torch.tensor([-1, VOCABULARY])
    ids, weights = torch_path.route(
        layer.x, layer.gate, top_k=TOP_K, scaling=SCALING, **layer.choice
    )
    assert (ids[:, -1] == -1).all()
    assert (ids[2:4] == -1).all()
    assert (weights[ids < 0] == 0).all()
    torch.testing.assert_close(weights.sum(1), torch.tensor([SCALING] * 2 + [0] * 2 + [SCALING]))
    shared = oracle.shared_expert(
        layer.x, *(plain(layer.inputs.shared, torch.float32)[i] for i in (0, 2, 1)), LIMIT,
        fake_quantize_e4m3,
    )  # fmt: skip
    assert relative(layer()[2:4], shared[2:4]) < 8e-2


def test_nan_scores_come_last(seed) -> None:
    layer = Layer(case_of(2), seed)
    layer.gate[::2, 0] = torch.nan
    ids, _ = torch_path.route(layer.x, layer.gate, top_k=TOP_K, scaling=1.0, bias=layer.bias)
    assert (ids % 2 == 1).all()


@pytest.mark.parametrize("sign", [1, -1], ids=["infinite", "zero"])
def test_scores_without_a_quotient_make_a_token_nan(sign, seed) -> None:
    layer = Layer(case_of(3), seed)
    layer.gate[:, 0] = sign
    layer.x[:, 0] = 0
    right = layer()
    layer.x[1, 0] = torch.inf
    found = layer()
    assert found[1].isnan().all()
    assert torch.equal(found[::2], right[::2])


def test_no_tokens() -> None:
    layer = Layer(case_of(1), 0)
    assert layer(layer.x[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(form="packed2"), r"form must be one of"),
        (dict(top_k=9), r"top_k must be at most 8 experts, got 9"),
        (dict(limit=0.0), r"limit must be positive"),
        (
            dict(table=torch.zeros(4, TOP_K, dtype=torch.int64)),
            r"^bias: got 8 rows, experts",
        ),
        (dict(bias=torch.zeros(7)), r"bias: got shape \(7,\), needs \[8\]"),
        (dict(out=torch.zeros(4, HIDDEN // 2)), r"^out: got shape"),
        (dict(input_ids=torch.zeros(4, dtype=torch.int64)), r"^input_ids: got 4 rows"),
    ],
)
def test_wrong_arguments_are_named(change, message, seed) -> None:
    layer = Layer(case_of(4), seed)
    with pytest.raises((ValueError, TypeError), match=message):
        layer(**change)


def test_wrong_weights_are_named(seed) -> None:
    layer = Layer(case_of(4), seed)
    right = layer.experts
    layer.experts = right._replace(w2_scale=right.w2_scale[:, :-1])
    with pytest.raises(ValueError, match=r"^w2_scale: got shape"):
        layer()
    layer.experts = right._replace(w1_scale=right.w1_scale.view(torch.uint8))
    with pytest.raises(TypeError, match=r"^w1_scale: got torch.uint8, needs torch.float8_e8m0fnu"):
        layer()
    layer.experts = right
    with pytest.raises(ValueError, match=r"^out: shares memory with x"):
        layer(out=layer.x)


@pytest.mark.parametrize("is_hashed", [False, True], ids=["scores", "table"])
def test_operator_is_sound(is_hashed, seed) -> None:
    layer = Layer(case_of(4), seed, is_hashed)
    calls = []
    original = op._op
    try:
        op._op = lambda *arguments: calls.append(arguments) or original(*arguments)
        layer()
    finally:
        op._op = original
    torch.library.opcheck(
        original,
        calls[0],
        # Not test_schema: it compares float8 tensors with what torch cannot compute in float8.
        test_utils=("test_faketensor", "test_autograd_registration"),
    )


def test_compiles_whole(seed) -> None:
    layer = Layer(case_of(4), seed)
    compiled = torch.compile(lambda x: layer(x) + 1, fullgraph=True, backend="eager")
    assert torch.equal(compiled(layer.x), layer() + 1)


def test_kernels_refuse_weights_that_are_not_prepared() -> None:
    config = op.MODEL_LAYERS["Flash"]
    with pytest.raises(ValueError, match=r"^w1: got weights in the order of checkpoints"):
        op.MOE.compile_key(config, "sm_90a")
    assert op.MOE.compile_key(replace(config, form="raw"), "sm_90a")
    assert op.MOE.compile_key(replace(config, form="tiled"), "sm_100a")
    with pytest.raises(ValueError, match=r"^w1: got weights prepared as 'raw', .* need 'tiled'"):
        op.MOE.compile_key(replace(config, form="raw"), "sm_100a")
    with pytest.raises(ValueError, match=r"^w1: got .* 'tiled', .* need 'packed' or .*'raw'"):
        op.MOE.compile_key(replace(config, form="tiled"), "sm_90a")
    wide = replace(config, form="packed")
    sizes = {"T": 3, "V": 0, "S": 0, "bytes": 17}
    device = op.Device("sm_90a", 132)
    with pytest.raises(ValueError, match=r"^scratch: got 17 bytes, needs \d+"):
        op.MOE.plan(wide, sizes, device)
    with pytest.raises(ValueError, match=r"^x: got 40000 tokens, needs at most 32768"):
        op.MOE.plan(wide, {**sizes, "T": 40000}, device)
    with pytest.raises(ValueError, match=r"^table: got 9 rows, experts are chosen by scores"):
        op.MOE.plan(wide, {**sizes, "V": 9}, device)
    hashed = replace(wide, is_hashed=True)
    with pytest.raises(ValueError, match=r"^input_ids: got 2 ids, x has 3 tokens"):
        op.MOE.plan(hashed, {**sizes, "Eb": 0, "V": 9, "S": 2}, device)


def test_codes_of_x_change_nothing_here(seed) -> None:
    layer = Layer(case_of(3), seed)
    codes, scale = quantize_e4m3(layer.x, 128)
    assert torch.equal(layer(x_codes=codes, x_scale=scale), layer())


@pytest.mark.parametrize("name", ["x_codes", "x_scale"])
def test_codes_and_scales_come_together(name, seed) -> None:
    layer = Layer(case_of(3), seed)
    given = dict(zip(("x_codes", "x_scale"), quantize_e4m3(layer.x, 128)))
    with pytest.raises(ValueError, match=f"{name}: got nothing beside "):
        layer(**{**given, name: None})
    with pytest.raises(ValueError, match=name):
        layer(**{**given, name: given[name][:2]})
