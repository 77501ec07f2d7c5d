"""The host side of decode graphs, with stand-ins for CUDA graphs that run on the CPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
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
from dsv4.engine.engine import Engine
from dsv4.engine.forward import decode, verify
from dsv4.engine.graphs import DecodeForward, decode_forward, padded_rows
from dsv4.engine.inputs import ForwardInputs
from dsv4.engine.request import Output, Request
from dsv4.engine.request_state import DecodeShape, RequestState
from dsv4.engine.results import RowResult
from dsv4.engine.sampler import SamplingBatch
from dsv4.engine.sampling_params import SamplingKind, SamplingParams
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

GREEDY = SamplingParams()


class Reruns:
    """Calls the forward again: enough where only the bookkeeping is looked at."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def warm_up(self, forward: Callable[[], object]) -> None:
        self.events.append("warm-up")
        forward()

    def capture(self, forward: Callable[[], object]) -> Callable[[], object]:
        self.events.append("capture")
        return forward


class TracedGraphs(Reruns):
    """Graphs as lists of operators: whatever Python knew while tracing is a constant in them."""

    def capture(self, forward: Callable[[], object]) -> Callable[[], object]:
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
        self.model, self.chunk = model, 1 + drafts
        blocks = 1 + max(lengths) // BLOCK + 1
        self.cache = model.new_cache(len(lengths), blocks * len(lengths), blocks, max_draft=drafts)
        self.manager = CacheManager(self.cache)
        self.state = RequestState(self.cache, self.chunk)
        self.backend = backend()
        self.forwards = DecodeForward(model, self.cache, self.state, self.backend)
        for length in lengths:
            slot = self.manager.admit(blocks * BLOCK)
            self.manager.step([slot], [length], length)  # counts as written
        self.state.change_table(self.manager.table_changes())

    def place(self, slots: list[int], rows: int, *sampling: SamplingParams) -> DecodeShape:
        """Seat requests of random tokens in some slots; where they stand stays as it is."""
        lengths = [self.manager.length(slot) for slot in slots]
        sampling = sampling or [GREEDY] * len(slots)
        for slot, length, params in zip(slots, lengths, sampling):
            known = torch.randint(VOCAB, (length + 1,)).tolist()
            request = Request(slot, known, length, 1000, frozenset(), params, 7 * slot, slot)
            self.state.prepare(request)
            self.state.seat(request)
            self.state.ints[slot, : self.chunk] = torch.randint(VOCAB, (self.chunk,))
            self.state.ints[slot, self.chunk] = length
        self.state.place(slots, rows)
        capacity = self.manager.advance(slots, [self.chunk] * len(slots))
        self.manager._lengths.update(zip(slots, lengths))
        return DecodeShape(rows, self.chunk, capacity, SamplingKind.of(sampling))

    def check(self, slots: list[int], rows: int, *sampling: SamplingParams) -> DecodeShape:
        """On a cache of noise, a graph gives what `decode` gives, and writes what it writes."""
        shape = self.place(slots, rows, *sampling)
        for tensor in cache_tensors(self.cache):
            tensor.normal_()
        memory = [*cache_tensors(self.cache), self.state.ints]
        if self.state.history is not None:
            memory.append(self.state.history.generated)
        before = [tensor.clone() for tensor in memory]
        expected = decode(self.model, self.cache, self.state, self.state.rows(rows), shape)
        written = [tensor.clone() for tensor in memory]
        for tensor, old in zip(memory, before):
            tensor.copy_(old)
        result = self.forwards(shape).read()
        used = len(slots)
        assert torch.equal(torch.from_numpy(result)[:used], expected[:used])
        assert any(not torch.equal(new, old) for new, old in zip(written, before))
        for tensor, new in zip(memory, written):
            # The last row of the state is that of padding.
            end = -1 if tensor is self.state.ints else None
            assert torch.equal(tensor[:end], new[:end]), "a replay wrote something else"
        assert self.state.ints[-1, self.chunk] == 0, "padding moves on"
        return shape


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
    engines = [
        Engine(model, 2, 2 * BLOCK, num_draft_tokens=drafts, async_scheduling=lag)
        for lag in (False, True)
    ]
    backend = TracedGraphs()
    forwards = engines[1]._decoder = DecodeForward(
        model, engines[1]._cache, engines[1]._state, backend
    )
    found, expected = (run(engine, requests) for engine in engines[::-1])
    # Tracing takes operators apart, whose parts may round differently.
    for number, (prompt, sampling) in enumerate(requests):
        assert_same_tokens(model, prompt, found[number], expected[number], sampling)
    # One row; two rows, sampling, in one block and in two; two greedy rows.
    assert len(forwards) >= 3
    captured = list(backend.events)
    assert len(captured) == 2 * len(forwards)
    run(engines[1], requests)
    assert backend.events == captured, "shapes that occurred before were captured again"


@pytest.mark.parametrize("drafts", [0, 1])
def test_replays_follow_the_state(seed: int, drafts: int) -> None:
    """One graph, whichever requests are in its rows, how many, and wherever they stand."""
    decoding = Decoding(tiny_model(seed), (70, 131, 3, BLOCK), drafts, TracedGraphs)
    # In each case some request has reached its second block: the capacity stays the same.
    for slots in ([1, 0, 2, 3], [3, 1], [1], [2, 3, 0]):
        decoding.check(slots, 4)
    assert decoding.backend.events == ["warm-up", "capture"]


@pytest.mark.parametrize("drafts", [0, 2])
def test_replays_advance_by_themselves(seed: int, drafts: int) -> None:
    """Nothing is sent between them: tokens, positions and lengths are those of the replay before;
    a request that has all its tokens stands still."""
    decoding = Decoding(tiny_model(seed), (20, 5), drafts)
    shape, state, chunk = decoding.place([1, 0], 2), decoding.state, decoding.chunk
    lengths = state.ints[:2, chunk].tolist()
    last = state.ints[0, chunk + 1] = lengths[0] + 3
    newest = [0, 0]
    # Two forwards are always under way.
    letters = [decoding.forwards(shape) for _ in range(2)]
    for number in range(8):
        found = letters[number].read()
        if number < 6:
            letters.append(decoding.forwards(shape))
        for row, slot in enumerate((1, 0)):
            result = RowResult.of(found[row], chunk, drafts)
            kept = min(result.accepted + 1, last - lengths[0] if slot == 0 else chunk)
            if kept:
                lengths[slot] += kept
                newest[slot] = result.sampled[kept - 1]
    assert lengths[0] == last
    assert state.ints[:2, chunk].tolist() == lengths
    assert state.ints[1, 0] == newest[1]


def test_a_graph_per_shape_and_way_of_sampling(seed: int) -> None:
    decoding = Decoding(tiny_model(seed), (10, 20, 140))
    warm = SamplingParams(temperature=0.7, seed=5)
    nucleus = SamplingParams(temperature=0.7, top_p=0.5)
    several = SamplingParams(
        temperature=0.7, top_k=5, min_p=0.1, presence_penalty=1.0, logit_bias={2: 3.0}, logprobs=2
    )
    kind = SamplingKind
    cases = {
        DecodeShape(1, 1, BLOCK, kind()): ([0], 1),
        DecodeShape(2, 1, BLOCK, kind()): ([0, 1], 2),
        DecodeShape(1, 1, 2 * BLOCK, kind()): ([2], 1),
        DecodeShape(2, 1, BLOCK, kind(False)): ([1], 2, warm),
        DecodeShape(2, 1, BLOCK, kind(False, True)): ([0, 1], 2, GREEDY, nucleus),
        DecodeShape(2, 1, BLOCK, kind(False, False, *[True] * 4, 20)): ([0, 1], 2, warm, several),
    }
    for count, (shape, case) in enumerate(cases.items(), start=1):
        for _ in range(2):
            assert decoding.check(*case) == shape
        assert len(decoding.forwards) == count
    assert decoding.backend.events.count("capture") == len(cases)


def test_warm_up_leaves_no_trace(seed: int) -> None:
    decoding = Decoding(tiny_model(seed), (10, 140), drafts=1)
    shape = decoding.place([0, 1], 2)
    state = decoding.state
    memory = [*cache_tensors(decoding.cache), state.ints[:-1], state.table, state.rows(2)]
    before = [tensor.clone() for tensor in memory]
    decoding.forwards._make(shape)
    assert decoding.backend.events == ["warm-up", "capture"]
    for tensor, old in zip(memory, before):
        assert torch.equal(tensor, old)


def test_rows_come_in_few_sizes() -> None:
    sizes = {padded_rows(count, 1000) for count in range(1, 1001)}
    assert sizes == {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, *range(256, 1000, 128), 1000}
    for count in range(1, 1001):
        assert count <= padded_rows(count, 1000) <= max(2 * count - 1, count + 127, 1)
    assert [padded_rows(count, 5) for count in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 5]


class CalledOperators(TorchDispatchMode):
    """Notes what attention and its writers are called for: operator, runner, number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("dsv4::sparse_fmha_paged", "dsv4::latent_rows"):
            runner = next(value for value in args if isinstance(value, int))
            self.calls.append((func._schema.name, runner, len(args[0])))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("drafts", [0, 1, 2])
def test_the_warm_up_calls_what_the_capture_calls(seed: int, drafts: int) -> None:
    """For as many rows: one eager call of a size is all that a launch in a capture needs."""
    model = random_model(TINY, torch.bfloat16)
    decoding = Decoding(model, (10, 140), drafts)
    eager, captured = CalledOperators(), CalledOperators()
    shape = decoding.place([0, 1], 2)
    with eager:
        made = decoding.forwards._make(shape)
    assert decoding.backend.events == ["warm-up", "capture"]
    with captured:
        made.run()
    assert captured.calls == eager.calls
    # Attention and what it reads of every layer, MTP once per draft.
    assert len(captured.calls) == 2 * (3 + drafts)
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
    assert not engine._decoder.is_captured, "captured on the CPU"
    assert not engine.async_scheduling
    with pytest.raises(ValueError, match="use_cuda_graphs: needs a model on a CUDA device"):
        Engine(model, 1, BLOCK, use_cuda_graphs=True)
    with pytest.raises(ValueError, match="use_cuda_graphs: needs a model on a CUDA device"):
        model.generate([[1, 2]], max_new_tokens=1, use_cuda_graphs=True)

    monkeypatch.setattr(graphs, "CudaGraphs", lambda device: Reruns())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    on_gpu = SimpleNamespace(device=torch.device("cuda"))

    def is_graphed(drafts: int, wanted: bool | None) -> bool:
        state = SimpleNamespace(chunk=1 + drafts)
        return decode_forward(model, on_gpu, state, wanted).is_captured

    assert is_graphed(0, True) and is_graphed(15, True)
    assert not is_graphed(0, False)
    assert is_graphed(15, None) and not is_graphed(16, None)
    # Longer chunks read their routing back.
    with pytest.raises(ValueError, match="num_draft_tokens must be at most 15"):
        is_graphed(16, True)
