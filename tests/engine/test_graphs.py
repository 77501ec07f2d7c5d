"""The host side of decode graphs, with stand-ins for CUDA graphs that run on the CPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsv4.cache.manager import CacheManager
from dsv4.cache.model_cache import ModelCache
from dsv4.cache.step import Step
from dsv4.config.model_config import ModelConfig
from dsv4.engine import graphs
from dsv4.engine.engine import Engine, Output
from dsv4.engine.forward import verify
from dsv4.engine.graphs import DecodeGraphs, GraphKey, decode_forward
from dsv4.engine.inputs import ForwardInputs, InputStage
from dsv4.engine.sampler import RowSampling, SamplingBatch, SamplingParams
from dsv4.model.model import DeepseekV4
from tests.engine.tiny_model import (
    BLOCK,
    TINY,
    VOCAB,
    WINDOW,
    assert_same_tokens,
    tiny_model,
    tokens,
)
from tests.model.tiny import quantized_config, random_model, tiny_config, with_mtp

pytestmark = pytest.mark.stage("cache")

GREEDY = RowSampling(0.0, 1.0, 0)


class Reruns:
    """Calls the forward again: enough where only the bookkeeping is looked at."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def warm_up(self, forward: Callable[[], Tensor]) -> None:
        self.events.append("warm-up")
        forward()

    def capture(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.events.append("capture")
        return forward


class TracedGraphs(Reruns):
    """Graphs as lists of operators: whatever Python knew while tracing is a constant in them."""

    def capture(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Trace on fake tensors, so that nothing runs, as nothing runs in a capture."""
        forward = super().capture(forward)
        return make_fx(forward, tracing_mode="fake", _allow_non_fake_inputs=True)()


class Decoding:
    """Requests in a cache, and decode forwards over any of them."""

    def __init__(
        self,
        model: DeepseekV4,
        lengths: Sequence[int],
        drafts: int = 0,
        backend: type[Reruns] = Reruns,
    ) -> None:
        self.model, self.drafts = model, drafts
        blocks = 1 + max(lengths) // BLOCK + 1
        self.cache = model.new_cache(len(lengths), blocks * len(lengths), blocks, max_draft=drafts)
        self.manager = CacheManager(self.cache)
        self.stage = InputStage(len(lengths) * (1 + drafts), len(lengths), self.cache.device)
        self.backend = backend()
        self.graphs = DecodeGraphs(model, self.cache, drafts, self.backend)
        for length in lengths:
            slot = self.manager.admit(blocks * BLOCK)
            self.manager.step([slot], [length], length)  # counts as written

    def inputs(self, slots: list[int], rows: int, *sampling: RowSampling) -> ForwardInputs:
        """Random tokens for some slots, whose lengths stay as they are."""
        chunk = 1 + self.drafts
        lengths = [self.manager.length(slot) for slot in slots]
        step = self.manager.step(slots, [chunk] * len(slots), chunk, rows)
        for slot, length in zip(slots, lengths):
            self.manager._lengths[slot] = length
        ids = torch.randint(VOCAB, (len(slots), chunk)).tolist()
        return self.stage.fill(step, sampling or [GREEDY] * len(slots), ids)

    def check(self, inputs: ForwardInputs) -> None:
        """On a cache of noise, a graph gives what `verify` gives, and writes what it writes."""
        valid = inputs.step.slots >= 0
        before = [tensor.normal_().clone() for tensor in cache_tensors(self.cache)]
        fresh = replace(inputs, step=replace(inputs.step))
        expected = verify(self.model, self.cache, fresh, self.drafts)
        written = [tensor.clone() for tensor in cache_tensors(self.cache)]
        for tensor, old in zip(cache_tensors(self.cache), before):
            tensor.copy_(old)
        result = self.graphs(inputs)
        assert torch.equal(result[valid], expected[valid])
        assert any(not torch.equal(new, old) for new, old in zip(written, before))
        for tensor, new in zip(cache_tensors(self.cache), written):
            assert torch.equal(tensor, new), "a replay wrote something else"


def cache_tensors(cache: ModelCache) -> list[Tensor]:
    """All memory of a cache that requests own."""
    tensors = []
    for layer in cache.layers:
        pools = (layer.window, layer.entries, layer.index_keys)
        tensors += [pool.data for pool in pools if pool is not None]
        tensors += [state.data for state in layer.state.rings()]
    return tensors


def run(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> dict[int, list[int]]:
    """Requests that join one by one, at every second step; the tokens of each."""
    new, steps, waiting = defaultdict(list), 0, list(requests)
    while engine.num_requests or waiting:
        if waiting and steps % 2 == 0:
            engine.add(*waiting.pop(0))
        output: Output
        for output in engine.step():
            new[output.request] += output.tokens
        steps += 1
    return dict(new)


@pytest.mark.parametrize("drafts", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_an_engine_gives_the_same_tokens_with_graphs(seed: int, drafts: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    requests = [
        (tokens(generator, length), SamplingParams(max_new_tokens=count, **options))
        for length, count, options in (
            (3, 12, {}),
            (BLOCK - 4, 9, {"temperature": 0.9, "seed": 4}),
            (WINDOW, 5, {}),
        )
    ]
    engines = [Engine(model, 2, 2 * BLOCK, num_draft_tokens=drafts) for _ in range(2)]
    graphs = DecodeGraphs(model, engines[1]._cache, drafts, TracedGraphs())
    engines[1]._verify = graphs
    found, expected = (run(engine, requests) for engine in engines[::-1])
    # Tracing takes operators apart, whose parts may round differently.
    for number, (prompt, sampling) in enumerate(requests):
        assert_same_tokens(model, prompt, found[number], expected[number], sampling)
    # One row; two rows, sampling, in one block and in two; two greedy rows.
    assert len(graphs) >= 3
    captured = list(graphs._backend.events)
    assert len(captured) == 2 * len(graphs)
    run(engines[1], requests)
    assert graphs._backend.events == captured, "shapes that occurred before were captured again"


@pytest.mark.parametrize("drafts", [0, 1])
def test_replays_follow_the_inputs(seed: int, drafts: int) -> None:
    """One graph, whichever requests are in its rows, how many, and wherever they stand."""
    decoding = Decoding(tiny_model(seed), (70, 131, 3, BLOCK), drafts, TracedGraphs)
    # In each case some request has reached its second block: the capacity stays the same.
    for slots in ([1, 0, 2, 3], [3, 1], [1], [2, 3, 0]):
        decoding.check(decoding.inputs(slots, 4))
    assert decoding.backend.events == ["warm-up", "capture"]


def test_a_graph_per_shape_and_way_of_sampling(seed: int) -> None:
    decoding = Decoding(tiny_model(seed), (10, 20, 140))
    warm, nucleus = RowSampling(0.7, 1.0, 5), RowSampling(0.7, 0.5, 6)
    cases = {
        GraphKey(1, 1, BLOCK, True, False): ([0], 1),
        GraphKey(2, 1, BLOCK, True, False): ([0, 1], 2),
        GraphKey(1, 1, 2 * BLOCK, True, False): ([2], 1),
        GraphKey(2, 1, BLOCK, False, False): ([1], 2, warm),
        GraphKey(2, 1, BLOCK, False, True): ([0, 1], 2, GREEDY, nucleus),
    }
    for count, (key, case) in enumerate(cases.items(), start=1):
        for _ in range(2):
            inputs = decoding.inputs(*case)
            assert GraphKey.of(inputs) == key
            decoding.check(inputs)
        assert len(decoding.graphs) == count
    assert decoding.backend.events.count("capture") == len(cases)


def test_inputs_at_other_addresses_are_captured_anew(seed: int) -> None:
    decoding = Decoding(tiny_model(seed), (10, 20))
    decoding.check(decoding.inputs([0, 1], 2))
    first = decoding.stage  # alive, so that its memory is not taken again
    decoding.stage = InputStage(2, 2, decoding.cache.device)
    decoding.check(decoding.inputs([1, 0], 2))
    decoding.check(decoding.inputs([1], 2))
    assert decoding.backend.events.count("capture") == 2
    assert len(decoding.graphs) == 1
    assert first is not decoding.stage


def test_warm_up_leaves_no_trace(seed: int) -> None:
    decoding = Decoding(tiny_model(seed), (10, 140), drafts=1)
    before = [tensor.clone() for tensor in cache_tensors(decoding.cache)]
    inputs = decoding.inputs([0, 1], 2)
    contents = inputs.step.slots.tolist(), inputs.tokens.tolist()
    decoding.graphs._capture(inputs)
    assert decoding.backend.events == ["warm-up", "capture"]
    for tensor, old in zip(cache_tensors(decoding.cache), before):
        assert torch.equal(tensor, old)
    assert contents == (inputs.step.slots.tolist(), inputs.tokens.tolist())


class CalledOperators(TorchDispatchMode):
    """Notes what attention and its writers are called for: operator, runner, number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("dsv4::sparse_fmha_paged", "dsv4::kv_insert", "dsv4::compress"):
            runner = next(value for value in args if isinstance(value, int))
            self.calls.append((func._schema.name, runner, len(args[0])))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("drafts", [0, 1, 2])
def test_the_warm_up_calls_what_the_capture_calls(seed: int, drafts: int) -> None:
    """For as many rows: one eager call of a size is all that a launch in a capture needs."""
    model = random_model(TINY, torch.bfloat16)
    decoding = Decoding(model, (10, 140), drafts)
    eager, captured = CalledOperators(), CalledOperators()
    inputs = decoding.inputs([0, 1], 2)
    with eager:
        replay = decoding.graphs._capture(inputs)
    assert decoding.backend.events == ["warm-up", "capture"]
    with captured:
        replay()
    assert captured.calls == eager.calls
    # Attention and the window of every layer, two kinds of entries and index keys, MTP once per
    # draft.
    assert len(captured.calls) == 2 * 3 + 3 + 2 * drafts
    assert {rows for name, _, rows in captured.calls if name.endswith("paged")} == (
        {2 * (1 + drafts)} | ({2} if drafts > 1 else set())
    )


class _OffTheHost(TorchDispatchMode):
    """Refuses results on the host: they would cost a copy, which no graph can contain."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                assert tensor.device.type != "cpu", f"{func} on the host in a decode forward"
        return result


@pytest.mark.parametrize("make_config", [tiny_config, quantized_config])
@pytest.mark.parametrize("greedy", [True, False])
def test_a_decode_forward_copies_nothing_from_the_host(
    make_config: Callable[..., ModelConfig], greedy: bool
) -> None:
    """On the meta device: it is not the host, and its tensors cannot be read back."""
    config, device = with_mtp(make_config("SCH", index_topk=3)), torch.device("meta")
    model = DeepseekV4(config, device=device)
    cache = model.new_cache(2, 4, 2, max_draft=1)
    rows = torch.zeros(2, dtype=torch.int64, device=device)
    table, grid = (torch.zeros(2, n, dtype=torch.int64, device=device) for n in (1, 2))
    reals = torch.zeros(2, device=device)
    sampling = SamplingBatch(reals, reals, rows, greedy=greedy, nucleus=not greedy)
    for watch in (nullcontext(), _OffTheHost()):  # the first run fills tables that are kept
        step = Step(rows, rows, rows, table, chunk=2, capacity=BLOCK)
        with watch:
            result = verify(model, cache, ForwardInputs(step, grid, grid, sampling), 1)
    assert result.shape == (2, 4)
    assert result.device == device


def test_where_graphs_are_used(seed: int, monkeypatch) -> None:
    model = tiny_model(seed)
    engine = Engine(model, 1, BLOCK)
    assert not isinstance(engine._verify, DecodeGraphs), "captured on the CPU"
    with pytest.raises(ValueError, match="use_cuda_graphs: needs a model on a CUDA device"):
        Engine(model, 1, BLOCK, use_cuda_graphs=True)
    with pytest.raises(ValueError, match="use_cuda_graphs: needs a model on a CUDA device"):
        model.generate([[1, 2]], max_new_tokens=1, use_cuda_graphs=True)

    monkeypatch.setattr(graphs, "CudaGraphs", lambda device: Reruns())
    on_gpu = SimpleNamespace(device=torch.device("cuda"))

    def is_graphed(drafts: int, wanted: bool | None) -> bool:
        return isinstance(decode_forward(model, on_gpu, drafts, wanted), DecodeGraphs)

    assert is_graphed(0, True) and is_graphed(15, True)
    assert not is_graphed(0, False)
    assert is_graphed(15, None) and not is_graphed(16, None)
    # Longer chunks read their routing back.
    with pytest.raises(ValueError, match="num_draft_tokens must be at most 15"):
        is_graphed(16, True)
