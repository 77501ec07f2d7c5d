"""The layers one by one: against the reference, and the rules that a whole model would blur."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

from dsv4.cache.entries import EntryPool
from dsv4.cache.index_keys import IndexKeyPool
from dsv4.cache.layer_cache import LayerCache
from dsv4.cache.model_cache import ModelCache
from dsv4.cache.rings import Ring
from dsv4.cache.step import Step
from dsv4.config.layer_schedule import LayerKind, LayerSpec
from dsv4.config.model_config import ModelConfig, RopeScaling
from dsv4.layers import linear as linear_module
from dsv4.layers.compressor import Compressor
from dsv4.layers.head import Embedding
from dsv4.layers.hyper_connection import HyperConnection
from dsv4.layers.indexer import Indexer
from dsv4.layers.linear import GroupedLinear, Linear, are_chained, project, project_twice
from dsv4.layers.norm import RMSNorm, rms_normalize
from dsv4.layers.rope import Rope
from dsv4.layers.router import Router
from dsv4.model.model import DeepseekV4
from dsv4.ops import compress, index_topk, merged_linear
from dsv4.ops.code_terms import to_terms
from dsv4.ops.kv_insert import rotate_rows_
from dsv4.ops.moe.torch_path import swiglu
from dsv4.ops.quantize import qdq_e4m3
from dsv4.reference import compressor as oracle_compressor
from dsv4.reference import mhc as oracle_mhc
from dsv4.reference import rope as oracle_rope
from dsv4.reference import router as oracle_router
from tests.model.tiny import quantized_config, random_model, relative_error, tiny_config

YARN = RopeScaling(factor=16.0, original_max_position_embeddings=65536)


def _fill(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.dtype.is_floating_point:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5)


@pytest.mark.stage("embedding")
def test_embedding_looks_up_rows_and_starts_equal_streams(seed: int) -> None:
    embed, ids = Embedding(11, 6, torch.float32), torch.tensor([[3, 0], [10, 3]])
    _fill(embed)
    streams = HyperConnection(3, 20, 1e-6, 1e-6).start(embed(ids))
    assert streams.shape == (2, 2, 3, 6)
    for stream in streams.unbind(2):
        assert torch.equal(stream, embed.weight[ids])


def test_norm_multiplies_its_weight_before_the_only_rounding(seed: int) -> None:
    x = torch.randn(5, 64).bfloat16() * 3
    norm = RMSNorm(64, 1e-6)
    norm.weight.data.uniform_(0.5, 1.5)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(norm(x), (exact * norm.weight.double()).bfloat16())
    torch.testing.assert_close(rms_normalize(x, 1e-6), exact.bfloat16())


def _rotated(x: torch.Tensor, rope: Rope, positions: torch.Tensor) -> torch.Tensor:
    """x [..., d] with its last channels turned by positions [...]."""
    rotation, turned = rope.at(positions), x.clone()
    rotate_rows_(turned, torch.cat((rotation.real, rotation.imag), -1))
    return turned


@pytest.mark.stage("rope")
@pytest.mark.parametrize("scaling", [None, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("dim", [8, 64])
def test_rotation_equals_the_reference(dim: int, scaling: RopeScaling | None, seed: int) -> None:
    rope = Rope(160000.0, dim, scaling)
    positions = torch.randint(0, 200_000, (2, 7))
    x = torch.randn(2, 7, 3, 80)
    freqs = oracle_rope.frequencies(dim, 160000.0, scaling)
    expected = oracle_rope.rotate(x, positions[..., None], freqs)
    turned = _rotated(x, rope, positions[..., None])
    # An angle of 2e5 radians has a spacing of 1.6e-2 in fp32: both sides must multiply alike.
    torch.testing.assert_close(turned, expected, atol=2e-2, rtol=0)
    near = positions % 1000
    turned = _rotated(x, rope, near[..., None])
    expected = oracle_rope.rotate(x, near[..., None], freqs)
    torch.testing.assert_close(turned, expected, atol=2e-4, rtol=0)
    back = _rotated(turned, rope, -near[..., None])
    torch.testing.assert_close(back, x, atol=1e-5, rtol=0)


@pytest.mark.stage("rope")
def test_published_yarn_leaves_fast_pairs_and_divides_slow_ones() -> None:
    plain, yarn = (Rope(160000.0, 64, s).at(torch.tensor(1)).angle() for s in (None, YARN))
    ratio = plain / yarn
    torch.testing.assert_close(ratio[:16], torch.ones(16))
    torch.testing.assert_close(ratio[25:], torch.full((7,), 16.0))
    assert (ratio[16:25].diff() > 0).all()


@pytest.mark.stage("rope")
def test_only_layers_with_a_compressor_use_its_base_and_yarn() -> None:
    config = ModelConfig.flash()
    ropes = {spec.kind: Rope.of_layer(config, spec) for spec in config.schedule}
    assert ropes[LayerKind.SWA] == Rope(10000.0, 64, None)
    assert ropes[LayerKind.CSA] == ropes[LayerKind.HCA] == Rope(160000.0, 64, config.rope_scaling)


@pytest.mark.stage("rope")
def test_rotation_touches_the_last_channels_only(seed: int) -> None:
    x = torch.randn(4, 20)
    turned = _rotated(x, Rope(10000.0, 8), torch.arange(1, 5))
    assert torch.equal(turned[:, :12], x[:, :12])
    assert (turned[:, 12:] != x[:, 12:]).all()


@pytest.mark.stage("projections")
def test_grouped_linear_is_one_linear_per_group(seed: int) -> None:
    grouped = GroupedLinear(6, 5, 3)
    _fill(grouped)
    x = torch.randn(2, 4, 18)
    y = grouped(x)
    assert y.shape == (2, 4, 15)
    for g in range(3):
        rows = grouped.weight[5 * g : 5 * g + 5]
        part = x[..., 6 * g : 6 * g + 6] @ rows.T
        torch.testing.assert_close(y[..., 5 * g : 5 * g + 5], part)


@pytest.mark.stage("projections")
def test_two_projections_of_codes_have_the_bits_of_those_of_values(seed: int) -> None:
    first = GroupedLinear(512, 256, 2, scheme="fp8")
    second = Linear(512, 128, scheme="fp8")
    for linear in (first, second):
        linear.weight.data = torch.randn(linear.weight.shape).to(torch.float8_e4m3fn)
        exponents = torch.randint(118, 122, linear.scale.shape, dtype=torch.uint8)
        linear.scale.data = exponents.view(torch.float8_e8m0fnu)
    x = torch.randn(11, 1024).bfloat16()
    assert not are_chained(first, second, x)
    for given in (x, to_terms(x)):
        assert torch.equal(project_twice(given, first, second), second(first(x)))


@pytest.mark.stage("projections")
@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32])
def test_fp8_linear_with_a_ragged_last_block(scale_dtype: torch.dtype, seed: int) -> None:
    linear = Linear(256, 200, scheme="fp8", scale_dtype=scale_dtype)
    linear.weight.data.copy_(torch.randn(200, 256))
    linear.scale.data.copy_(torch.tensor([[0.5, 2.0], [1.0, 0.25]]))
    # Inputs of few bits pass the rounding unchanged.
    x = torch.randint(-8, 9, (3, 256)).float()
    weight = linear.weight.double()
    weight[:128, :128] *= 0.5
    weight[:128, 128:] *= 2
    weight[128:, 128:] *= 0.25
    torch.testing.assert_close(linear(x), (x.double() @ weight.T).float())


@pytest.mark.stage("projections")
@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_linear_by_the_operator(dtype, scale_dtype, seed: int) -> None:
    """Wide layers call the operator; on the CPU it has the bits of the narrow ones' formula."""
    linear = Linear(512, 200, scheme="fp8", scale_dtype=scale_dtype)
    linear.weight.data.copy_(torch.randn(200, 512))
    linear.scale.data.copy_(torch.exp2(torch.randint(-6, 3, (2, 4)).float()))
    x = torch.randn(2, 3, 512).to(dtype)
    compute = dtype if scale_dtype == torch.float8_e8m0fnu else torch.float32
    expected = F.linear(qdq_e4m3(x, 128).to(compute), linear.dense_weight(compute)).to(dtype)
    found = linear(x)
    assert found.dtype == dtype
    assert torch.equal(found, expected)
    assert linear(x[1, 2]).shape == (200,)


def _step(start: int, chunk: int, capacity: int = 1024) -> Step:
    one = torch.zeros(1, dtype=torch.int64)
    table = torch.arange(8)[None]
    return Step(one, one + start, one + chunk, table, chunk, capacity)


def _cache(config: ModelConfig) -> LayerCache:
    return ModelCache(config, 1, 8, 8, torch.float32, "cpu").layers[0]


@pytest.mark.stage("projections")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_projections_of_one_input_are_those_of_each(dtype, seed: int, monkeypatch) -> None:
    """By one launch where the weights allow it, with the values of each linear by itself."""
    calls = []

    def counted(*args, **options):
        calls.append(len(args[1]))
        return merged_linear(*args, **options)

    monkeypatch.setattr(linear_module, "merged_linear", counted)
    options = {"scheme": "fp8", "dtype": dtype}
    fp8 = [Linear(512, rows, **options) for rows in (136, 64)]
    plain = [Linear(512, 72, dtype=dtype, is_wide=True), Linear(512, 8, dtype=dtype)]
    for linear in fp8:
        linear.weight.data.copy_(torch.randn(linear.weight.shape))
        linear.scale.data.copy_(torch.exp2(torch.randint(-6, 3, linear.scale.shape).float()))
    for linear in plain:
        _fill(linear)
    x = torch.randn(2, 3, 512).to(dtype)
    for linears in ([*fp8, *plain], fp8, fp8[:1], plain, [fp8[0], *plain * 3]):
        for y, linear in zip(project(x, linears), linears, strict=True):
            assert torch.equal(y, linear(x))
            assert y.dtype == (torch.float32 if linear.is_wide else dtype)
    assert calls == [4, 2], "one FP8 linear, none, and too many go one by one"


@pytest.mark.stage("compressor")
@pytest.mark.parametrize("kind, ratio", [("C", 4), ("C", 16), ("H", 4), ("H", 128)])
@pytest.mark.parametrize("cuts", [(300,), (1, 2, 5, 120, 3, 1, 1, 167)], ids=["whole", "cut"])
def test_entries_equal_the_reference(
    kind: str, ratio: int, cuts: tuple[int, ...], seed: int
) -> None:
    """The kind decides overlap, whatever the rate; cuts may fall anywhere."""
    config = tiny_config(kind, rates=(ratio, ratio))
    spec, cache = config.schedule[0], _cache(config)
    rope = Rope.of_layer(config, spec)
    module = Compressor(64, 32, ratio, spec.overlap, 1e-6, torch.float32)
    _fill(module)
    table = rope.table(1024, torch.device("cpu"))
    x, done = torch.randn(1, sum(cuts), 64), 0
    for cut in cuts:
        step = _step(done, cut)
        projected = project(x[:, done : done + cut], module.linears)
        _take_in(module, projected, cache.state.compressor, cache.entries, cache, table, step)
        done += cut
    pooled = oracle_compressor.compress(
        x, module.wkv.weight, module.wgate.weight, module.ape, overlap=kind == "C"
    )
    count = done // ratio
    expected = _rotated(module.norm(pooled), rope, torch.arange(count) * ratio)
    stored = cache.entries.data.flatten(0, 1)[:count]
    assert relative_error(stored, expected) < 1e-5


def _take_in(
    module: Compressor,
    projected: list[torch.Tensor],
    ring: Ring,
    pool: EntryPool | IndexKeyPool,
    cache: LayerCache,
    table: torch.Tensor,
    step: Step,
) -> None:
    """A step of a compressor alone."""
    *given, weight, data = module.step(*projected, ring, pool)
    requests = (*step.requests, cache.entries.completed(step))
    options = {"eps": 1e-6, "dtype": torch.float32, **pool.rounding}
    compress(*given, weight, table, *requests, data, **options)


def _index(indexer: Indexer, projected: list[torch.Tensor], cache: LayerCache, step: Step) -> None:
    """Index keys of a step."""
    table = indexer.rope.table(step.capacity, torch.device("cpu"))
    own = cache.state.indexer, cache.index_keys
    _take_in(indexer.compressor, projected, *own, cache, table, step)


def _indexer(config: ModelConfig) -> Indexer:
    spec = config.schedule[0]
    indexer = Indexer(config, spec, Rope.of_layer(config, spec), torch.float32)
    _fill(indexer)
    return indexer


@pytest.mark.stage("indexer")
def test_equal_scores_choose_the_earlier_entries(seed: int) -> None:
    """Weights of zero give every entry the score 0, also as -0: the first ones are taken."""
    config = tiny_config("C", index_topk=3)
    indexer, cache = _indexer(config), _cache(config)
    indexer.weights_proj.weight.data.zero_()
    x, latent = torch.randn(1, 40, 64), torch.randn(1, 40, 24)
    *projected, weights = project(x, indexer.linears)
    _index(indexer, projected, cache, _step(0, 40))
    lens, step = (torch.arange(1, 41) // 4).int(), _step(0, 40)
    chosen = indexer.select(indexer.wq_b(latent), weights, lens, cache, step)
    first = int(step.block_table[0, 0]) * cache.index_keys.data.shape[1]
    for t in range(40):
        count = min(int(lens[t]), 3)
        assert chosen[t].tolist() == [*range(first, first + count), *[-1] * (3 - count)]


@pytest.mark.stage("indexer")
@pytest.mark.parametrize("batch, chunk", [(1, 40), (5, 12), (7, 1)])
@pytest.mark.parametrize("tokens", [1, 3, 6, 14])
def test_scores_alive_at_once_are_bounded(
    batch: int, chunk: int, tokens: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the batch: a bound of some tokens is kept by every product, and changes nothing."""
    config = tiny_config("C", index_topk=3)
    indexer = _indexer(config)
    cache = ModelCache(config, batch, batch, 1, torch.float32, "cpu")
    rows = torch.arange(batch)
    lens = torch.full_like(rows, 40)
    history = Step(rows, torch.zeros_like(rows), lens, rows[:, None], chunk=40, capacity=128)
    *projected, _ = project(torch.randn(batch, 40, 64), indexer.linears)
    _index(indexer, projected, cache.layers[0], history)
    step = Step(rows, lens - chunk, lens.clamp(max=chunk), rows[:, None], chunk, capacity=128)
    x, latent = torch.randn(batch, chunk, 64), torch.randn(batch, chunk, 24)
    lens = ((step.positions + 1) // 4).flatten().int()
    inputs = indexer.wq_b(latent), indexer.weights_proj(x), lens, cache.layers[0], step
    whole = indexer.select(*inputs)
    assert whole.shape == (batch * chunk, 3)
    sizes, matmul = [], torch.matmul

    def measured(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        found = matmul(a, b)
        if found.shape[-2] == indexer.heads:
            sizes.append(found.numel())
        return found

    module = sys.modules["dsv4.ops.index_topk"]
    monkeypatch.setattr(module, "MAX_PRODUCTS", tokens * 32 * max(indexer.heads, indexer.dim))
    monkeypatch.setattr(torch, "matmul", measured)
    assert torch.equal(indexer.select(*inputs), whole)
    assert max(sizes) <= tokens * 32 * indexer.heads
    assert sum(sizes) == batch * chunk * 32 * indexer.heads


def _router(hash_routed: bool) -> tuple[Router, ModelConfig]:
    config = tiny_config("S")
    router = Router(config, LayerSpec(LayerKind.SWA, 0, hash_routed, 0, "layers.0"))
    _fill(router)
    if hash_routed:
        router.tid2eid.data.copy_(torch.rand(97, 8).argsort(-1)[:, :3])
    return router, config


@pytest.mark.stage("router")
@pytest.mark.parametrize("hash_routed", [False, True], ids=["scores", "hash"])
def test_routing_equals_the_reference(hash_routed: bool, seed: int) -> None:
    router, config = _router(hash_routed)
    x, ids = torch.randn(9, 64), torch.randint(0, 97, (9,))
    experts, weights = router(x, ids)
    choice = dict(table=router.tid2eid, input_ids=ids) if hash_routed else dict(bias=router.bias)
    expected = oracle_router.route(x, router.weight, top_k=3, scaling=1.7, **choice)
    order = expected[0].argsort(-1)
    assert torch.equal(experts, expected[0].gather(-1, order))
    torch.testing.assert_close(weights, expected[1].gather(-1, order))
    torch.testing.assert_close(weights.sum(-1), torch.full((9,), config.routed_scaling_factor))


@pytest.mark.stage("router")
def test_bias_selects_but_does_not_weigh(seed: int) -> None:
    router, _ = _router(hash_routed=False)
    x = torch.randn(6, 64)
    router.bias.data.zero_()
    router.bias.data[[1, 4, 6]] = 100.0
    experts, weights = router(x, torch.zeros(6, dtype=torch.int64))
    assert (experts.sort(-1).values == torch.tensor([1, 4, 6])).all()
    scores = torch.nn.functional.softplus(x @ router.weight.T).sqrt().gather(-1, experts)
    torch.testing.assert_close(weights, 1.7 * scores / scores.sum(-1, keepdim=True))


@pytest.mark.stage("router")
def test_equal_scores_choose_the_lower_experts() -> None:
    router, _ = _router(hash_routed=False)
    for parameter in router.parameters():
        parameter.data.zero_()
    experts, _ = router(torch.randn(4, 64), torch.zeros(4, dtype=torch.int64))
    assert (experts == torch.arange(3)).all()


@pytest.mark.stage("moe")
def test_clamps_bind_the_gate_above_and_the_other_factor_on_both_sides() -> None:
    gate = torch.tensor([-20.0, -1.0, 2.0, 20.0])
    up = torch.tensor([-20.0, -1.0, 2.0, 20.0])
    expected = torch.nn.functional.silu(torch.tensor([-20.0, -1.0, 2.0, 3.0]))
    torch.testing.assert_close(swiglu(gate, torch.ones(4), 3.0), expected)
    torch.testing.assert_close(
        swiglu(torch.ones(4), up, 3.0), up.clamp(-3, 3) * torch.tensor(1.0).sigmoid()
    )


@pytest.mark.stage("head")
def test_logits_are_fp32_products_of_the_normalised_mixture(seed: int) -> None:
    model = random_model(tiny_config("S"), torch.bfloat16)
    streams = torch.randn(1, 3, 4, 64).bfloat16()
    head = (model.hc_head_fn, model.hc_head_base, model.hc_head_scale)
    mixed = oracle_mhc.head(streams, *head, eps=1e-6, norm_eps=1e-6).bfloat16()
    expected = model.norm(mixed).float() @ model.head.weight.float().T
    logits = model.logits(streams)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("config", [ModelConfig.flash(), ModelConfig.pro()], ids=["flash", "pro"])
def test_released_sizes_fit_on_the_meta_device(config: ModelConfig) -> None:
    model = DeepseekV4(config, device="meta")
    assert all(p.is_meta and not p.requires_grad for p in model.parameters())
    assert len(model.layers) == config.num_hidden_layers and len(model.mtp) == 1


def test_a_model_can_be_moved() -> None:
    model = random_model(tiny_config("SCH")).to("meta")
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    "ids, named",
    [
        (torch.zeros(4, dtype=torch.int64), r"\[B, S\]"),
        (torch.zeros(1, 0, dtype=torch.int64), "at least one token"),
        (torch.zeros(1, 2), "int64"),
        (torch.tensor([[0, 97]]), "0 .. 96"),
        (torch.tensor([[-1, 3]]), "0 .. 96"),
    ],
)
def test_bad_input_ids_are_refused(ids: torch.Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        random_model(tiny_config("S"))(ids)


@pytest.mark.stage("indexer")
def test_index_queries_in_codes_change_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded behind their projection, as on GPUs, and by the scores: the same entries."""
    sizes = dict(q_lora_rank=512, index_head_dim=128, index_n_heads=4, index_topk=3)
    model, ids = (
        random_model(quantized_config("C", **sizes), torch.bfloat16),
        torch.arange(60)[None],
    )
    found, given = [], []

    def takes_codes(linear: Linear, x: torch.Tensor) -> bool:
        return linear.scheme is not None and linear.in_features % 512 == 0

    def counted(*args, **options):
        given.append(options["q_scale"] is not None)
        return index_topk(*args, **options)

    monkeypatch.setattr(Linear, "takes_codes", takes_codes)
    monkeypatch.setattr(Indexer, "has_coded_queries", True)
    monkeypatch.setattr(sys.modules["dsv4.layers.indexer"], "index_topk", counted)
    with torch.inference_mode():
        found.append(model(ids, chunk=20))
        monkeypatch.setattr(Indexer, "has_coded_queries", False)
        found.append(model(ids, chunk=20))
    assert given == [True, True, True, False, False, False]
    assert torch.equal(*found)
