"""`moe` on a Hopper GPU: each launch for what it was given, bits that no number of tokens changes,
graphs, streams, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4 import ops
from dsv4.kernels.moe.plan import tilings
from dsv4.kernels.moe.routing import MAX_TOKENS
from dsv4.ops.moe.op import MOE
from dsv4.ops.moe.weights import GatedWeights, prepare_
from dsv4.ops.quantize import quantize_e4m3
from dsv4.testing.harness import Device
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.moe import Case
from dsv4.testing.moe_layer import SCALING, LayerInputs, assert_layer_close, layer_config

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.stage("moe")]

TOKENS = (1, 2, 7, 8, 9, 16, 17, 64, 65, 200, 256, 257, 512, 513, 1000, 1500, 2048, 4096, 8192)
FLASH = Case(8192, 4096, 2048, 256, 6)
SMALL = Case(300, 1024, 512, 64, 6)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


class Layer:
    """A layer of prepared weights on the GPU."""

    def __init__(self, case: Case, seed: int, is_hashed: bool = False) -> None:
        self.inputs = LayerInputs.make(case, seed, "cuda", is_hashed)
        self.weights = self.inputs.weights(is_prepared=True)
        self.x, self.case = self.inputs.inputs.x, case

    def __call__(self, tokens: slice | int | None = None, **options) -> torch.Tensor:
        part = tokens if isinstance(tokens, slice) else slice(tokens)
        choice = dict(self.inputs.choice)
        if "input_ids" in choice:
            choice["input_ids"] = choice["input_ids"][part]
        arguments = {
            "top_k": self.case.top_k, "scaling": SCALING, "limit": self.case.limit,
            "form": self.case.scale_form, **choice, **options,
        }  # fmt: skip
        return ops.moe(self.x[part], self.inputs.gate, *self.weights, **arguments)

    def with_codes(self, tokens: slice | int | None = None, **options) -> torch.Tensor:
        """The same with x in FP8 beside it."""
        part = tokens if isinstance(tokens, slice) else slice(tokens)
        codes, scale = quantize_e4m3(self.x[part], 128)
        return self(tokens, x_codes=codes, x_scale=scale, **options)


def check_steps(layer: Layer, tokens: int, is_model: bool = False) -> torch.Tensor:
    """Run the compiled kernels in the open, and compare each launch, and the whole; y."""
    from dsv4.kernels.moe.plan import choose

    inputs = layer.inputs.first(tokens)
    config = inputs.config
    kernels = OpKernels(MOE, Device())
    call = inputs.call_tiled(choose(config.kernels, tokens, config.experts), kernels.planned_for)
    outcome = kernels.target.run(kernels.compile(config), call)
    assert_layer_close(outcome, inputs, is_model)
    return call.outputs["out"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(is_row_packed=True),
        dict(spread=14),
        dict(expert_dtype="fp8"),
        dict(expert_dtype="fp8", scale_dtype="float32"),
        dict(expert_dtype="nvfp4"),
        dict(expert_dtype="bfloat16"),
        dict(expert_dtype="bfloat16", shared_dtype="bfloat16", one_expert=True),
        dict(expert_dtype="nvfp4", live=33, has_special_rows=True),
        dict(one_expert=True),
        dict(live=33, has_special_rows=True, out_dtype="float32"),
        dict(live=0),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_hashed", [False, True], ids=["scores", "table"])
def test_every_step_is_close(changes, is_hashed, seed) -> None:
    case = replace(SMALL, has_missing=is_hashed, **changes)
    layer = Layer(case, seed, is_hashed)
    live = None
    if case.live is not None:
        live = torch.tensor([case.live], dtype=torch.int32, device="cuda")
    for tokens in (5, 40, 300):
        found = check_steps(layer, tokens)
        y = layer(tokens, live_tokens=live, out_dtype=found.dtype)
        assert torch.equal(y.nan_to_num(7), found.nan_to_num(7))
        assert (found[case.num_live :] == 0).all()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(is_row_packed=True),
        dict(spread=14),
        dict(expert_dtype="fp8", scale_dtype="float32"),
        dict(expert_dtype="nvfp4", one_expert=True, live=290),
        dict(expert_dtype="nvfp4", hidden=512, inner=384, experts=32, top_k=3),
        dict(expert_dtype="bfloat16", shared_dtype="bfloat16"),
        dict(one_expert=True, live=290),
        dict(hidden=512, inner=384, experts=32, top_k=3),
    ],
    ids=str,
)
def test_every_tiling_has_the_same_bits(changes, seed) -> None:
    case = replace(SMALL, **changes)
    inputs = Layer(case, seed).inputs
    kernels = OpKernels(MOE, Device())
    compiled = kernels.compile(inputs.config)
    first = None
    for tiling in range(len(tilings(inputs.config.kernels))):
        call = inputs.call_tiled(tiling, kernels.planned_for)
        outcome = kernels.target.run(compiled, call)
        first = outcome["out"] if first is None else first
        assert torch.equal(outcome["out"].nan_to_num(7), first.nan_to_num(7)), f"tiling {tiling}"
    # The last one has the most tokens of a tile.
    assert_layer_close(outcome, inputs)


@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8", "nvfp4", "bfloat16"])
def test_a_flash_layer_has_the_same_bits_for_any_number_of_tokens(expert_dtype, seed) -> None:
    layer = Layer(replace(FLASH, expert_dtype=expert_dtype), seed)
    together = layer()
    assert torch.equal(check_steps(layer, 64, is_model=True), together[:64])
    for tokens in TOKENS:
        assert torch.equal(layer(tokens), together[:tokens]), f"T = {tokens}"
    for place in (5, 100, 3000):
        assert torch.equal(layer(slice(place, place + 1)), together[place : place + 1])
    # Loads still under way when a stage was released to the cluster made one of three calls differ.
    for tokens in (1000, 2048, 8192):
        for _ in range(30):
            assert torch.equal(layer(tokens), together[:tokens])


def test_one_exponent_a_row_changes_no_bit(seed) -> None:
    layer, other = Layer(FLASH, seed), Layer(replace(FLASH, is_row_packed=True), seed)
    for tokens in TOKENS:
        assert torch.equal(layer(tokens), other(tokens)), f"T = {tokens}"
    together = layer()
    for tokens in (1000, 2048, 8192):
        for _ in range(30):
            assert torch.equal(other(tokens), together[:tokens])


@pytest.mark.parametrize("is_hashed", [False, True], ids=["scores", "table"])
def test_more_tokens_than_a_launch_takes(is_hashed, seed) -> None:
    tokens = MAX_TOKENS + 300
    layer = Layer(replace(SMALL, tokens=tokens), seed, is_hashed)
    live = torch.tensor([tokens - 3], dtype=torch.int32, device="cuda")
    found = layer(live_tokens=live)
    for part in (slice(300), slice(MAX_TOKENS, tokens - 3)):
        assert torch.equal(found[part], layer(part))
    assert (found[-3:] == 0).all()
    with pytest.raises(ValueError, match=r"^out: got shape"):
        layer(out=torch.empty(tokens + 1, SMALL.hidden, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.parametrize("tokens", [1, 13, 100])
@pytest.mark.parametrize("expert_dtype", ["fp4", "nvfp4"])
def test_graph_replay_reads_new_inputs(expert_dtype, tokens, seed) -> None:
    layer = Layer(replace(SMALL, tokens=tokens, expert_dtype=expert_dtype), seed)
    other = torch.randn_like(layer.x)
    first = layer.x.clone()
    expected = []
    for x in (first, other):
        layer.x.copy_(x)
        expected.append(layer())
    out = torch.empty_like(expected[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(out=out)
    for x, wanted in ((first, expected[0]), (other, expected[1]), (first, expected[0])):
        layer.x.copy_(x)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("is_hashed", [False, True], ids=["scores", "table"])
def test_codes_change_no_bit(is_hashed, seed) -> None:
    """Up to 256 tokens the router then shares a launch."""
    layer = Layer(FLASH, seed, is_hashed)
    for tokens in (1, 2, 5, 8, 9, 16, 17, 64, 100, 129, 200, 256, 257):
        wanted = layer(tokens)
        for _ in range(3):
            assert torch.equal(layer.with_codes(tokens), wanted)
    live = torch.tensor([3], dtype=torch.int32, device="cuda")
    for tokens in (8, 14, 64, 200):
        wanted = layer(tokens, live_tokens=live)
        assert torch.equal(layer.with_codes(tokens, live_tokens=live), wanted)


def test_codes_without_scales_are_refused(seed) -> None:
    layer = Layer(replace(SMALL, tokens=2), seed)
    codes, scale = quantize_e4m3(layer.x, 128)
    with pytest.raises(ValueError, match="x_scale: got nothing beside x_codes"):
        layer(x_codes=codes)
    with pytest.raises(ValueError, match="x_codes"):
        layer(x_codes=codes[:1], x_scale=scale[:1])


@pytest.mark.parametrize("tokens", [1, 4, 16, 100, 200])
def test_a_chain_of_layers_that_overlap(tokens, seed) -> None:
    """A layer reads what the one before it wrote, though it begins while that one ends."""
    layers = [Layer(replace(SMALL, tokens=tokens), seed + i) for i in range(3)]
    wanted = layers[0].x.clone()
    start = wanted.clone()
    for layer in layers * 2:
        layer.x.copy_(wanted)
        wanted = layer() / 4
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = start
        for layer in layers * 2:
            layer.x.copy_(y)
            y = layer.with_codes() / 4
    for _ in range(20):
        graph.replay()
        assert torch.equal(y, wanted)


@pytest.mark.parametrize("has_codes", [False, True])
def test_two_streams(has_codes, seed) -> None:
    """With codes CTAs of a launch wait for each other, but for none that has no place."""
    layers = [Layer(replace(SMALL, tokens=tokens), seed + tokens) for tokens in (5, 90)]
    expected = [layer() for layer in layers]
    streams = [torch.cuda.Stream() for _ in layers]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for layer, stream, found in zip(layers, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(layer.with_codes() if has_codes else layer())
    torch.cuda.synchronize()
    for found, wanted in zip(results, expected, strict=True):
        assert all(torch.equal(y, wanted) for y in found)


def test_warmup_is_enough_for_a_capture(seed) -> None:
    case = replace(SMALL, tokens=20, limit=3.5)
    layer = Layer(case, seed)
    config = layer_config(case)
    ops.warmup(ops.moe_runner_id(*(getattr(config, n) for n in config.__dataclass_fields__)), 20)
    out = torch.empty_like(layer.x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(out=out)
    graph.replay()
    assert torch.equal(out, layer())


def test_a_cold_capture_is_refused(seed) -> None:
    layer = Layer(replace(SMALL, tokens=4, limit=3.25), seed)
    with pytest.raises(RuntimeError, match="run the layer once before the capture"):  # noqa: SIM117
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            layer()


def test_weights_that_are_not_prepared_are_refused(seed) -> None:
    layer = Layer(replace(SMALL, tokens=4), seed)
    with pytest.raises(ValueError, match=r"^w1: got weights in the order of checkpoints"):
        layer(form="released")


def test_wrong_scales_are_refused_by_name(seed) -> None:
    layer = Layer(replace(SMALL, tokens=4), seed)
    routed, shared = layer.weights
    layer.weights = routed._replace(w2_scale=routed.w2_scale.view(torch.uint8)), shared
    with pytest.raises(TypeError, match=r"^w2_scale: got torch.uint8"):
        layer()
    layer.weights = routed._replace(w1_scale=routed.w1_scale[:, :, :16]), shared
    with pytest.raises(ValueError, match=r"^w1_scale: got shape"):
        layer()


def test_other_experts_take_the_torch_implementation(seed) -> None:
    layer = Layer(replace(SMALL, tokens=6), seed)
    routed = [layer.inputs.inputs.routed[name] for name in ("w1", "w3", "w2")]
    dense = [torch.stack([w.dense(e) for e in range(SMALL.experts)]).bfloat16() for w in routed]
    expected = layer()
    released = layer.inputs.weights(is_prepared=False)[1]
    layer.weights = GatedWeights(*(weight.float() for weight in dense)), released
    found = layer(form="released")
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < 6e-2  # the routed experts round nothing to FP8
    prepared = GatedWeights(*dense)
    prepare_(prepared, "packed")
    layer.weights = prepared, layer.inputs.weights(is_prepared=True)[1]
    error = (layer().float() - found.float()).norm() / found.float().norm()
    assert error < 2e-2  # codes of the shared expert's h tip


def test_no_tokens(seed) -> None:
    layer = Layer(replace(SMALL, tokens=1), seed)
    assert layer(0).shape == (0, SMALL.hidden)
