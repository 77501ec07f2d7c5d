"""A whole decode step on a GPU: time of replays, of its layers by kind, launches and kernels."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.bench.kernel_times import kernel_times
from dsv4.bench.machine import Machine
from dsv4.bench.random_model import MODELS, RandomModel, fitting_model, random_cache, truncated
from dsv4.bench.report import layers_cell
from dsv4.bench.step_floor import Load, StepFloor
from dsv4.bench.timing import captured, elapsed_microseconds
from dsv4.cache.manager import CacheManager
from dsv4.cache.model_cache import ModelCache
from dsv4.cache.step import Step
from dsv4.config.layer_schedule import LayerKind
from dsv4.config.model_config import ModelConfig
from dsv4.engine.forward import verify
from dsv4.engine.inputs import ForwardInputs
from dsv4.engine.memory_plan import MemoryPlan, plan_memory
from dsv4.engine.sampler import GREEDY
from dsv4.layers.hyper_connection import Streams
from dsv4.layers.linear import Rounded
from dsv4.layers.moe import MoE
from dsv4.layers.reductions import full_precision_sums
from dsv4.model.model import DeepseekV4

BATCHES = (1, 4, 16, 64, 256)
# Replays are timed together, as an engine starts a step while the one before runs: one by itself
# took up to 4 % longer, in a process that had measured another number of requests before.
WARM_UP, ROUNDS, TOGETHER = 3, 7, 3
STEPS = WARM_UP + ROUNDS * TOGETHER + 4  # of a model, those of the profiler among them
LAYERS_OF_A_KIND = 8  # of a timed chain: more than L2 holds at one token
KINDS = (LayerKind.CSA, LayerKind.HCA, LayerKind.SWA)
COLUMNS = (
    *("model", "layers", "B", "context", "drafts", "experts"),
    *("step ms", "floor ms", "of floor", "tokens/s", "launches"),
    *(f"{kind.name} us (floor), launches" for kind in KINDS),
)


@dataclass(frozen=True)
class Shape:
    """A decode step.

    Attributes:
        model: of `MODELS`; layers: its first so many, None: all.
        batch: requests; context: tokens of each when the last timed step ends.
        drafts: draft tokens a step verifies, of which a share of `acceptance` counts as accepted.
        batch_invariant: attention splits a token's keys by their number alone.
        kv_format: of keys, "bf16" or "fp8"; None: the model's own.
    """

    model: str
    layers: int | None
    batch: int
    context: int
    drafts: int = 0
    acceptance: float = 0.0
    batch_invariant: bool = False
    kv_format: str | None = None


@dataclass(frozen=True)
class LayerTime:
    """Mean time of a kind's layers in microseconds, its floor, and a graph's nodes for one more."""

    microseconds: float
    floor: float
    launches: float | None


@dataclass(frozen=True)
class Result:
    """Medians of replays, in microseconds.

    Attributes:
        layers: layers of the model that was run; aliased_layers: those with experts of others.
        distinct: routed experts of a layer that some token used, mean over layers.
        launches: nodes of the step's graph; None: this torch cannot tell.
        kinds: of the layers, by name of their kind.
        kernels: name, calls and microseconds of the step's kernels, the slowest first.
    """

    shape: Shape
    layers: int
    aliased_layers: int
    distinct: float
    microseconds: float
    floor: float
    launches: int | None
    kinds: dict[str, LayerTime]
    kernels: list[tuple[str, int, float]]

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together, accepted drafts included."""
        tokens = 1 + self.shape.acceptance * self.shape.drafts
        return self.shape.batch * tokens / self.microseconds * 1e6


def measure(
    shapes: Sequence[Shape], machine: Machine, is_aliased: bool, trace: Path | None = None
) -> Iterator[Result]:
    """Measure each shape; models are made once for shapes that follow each other.

    Args:
        is_aliased: let layers share experts where they do not fit.
        trace: also write a timeline of the last shape's step, for Perfetto.

    Raises:
        ValueError: a model does not fit; the message says how much is missing.
    """
    made: RandomModel | None = None
    key = None
    for place, shape in enumerate(shapes):
        config = truncated(MODELS[shape.model](), shape.layers, shape.drafts > 0)
        same = [other for other in shapes if _model_of(other) == _model_of(shape)]
        is_new = key != _model_of(shape)
        if is_new:
            made = None
        # What the shape before left in pieces may be missing in one.
        gc.collect()
        torch.cuda.empty_cache()
        if is_new:
            made, key = fitting_model(config, _plans(config, same), is_aliased), _model_of(shape)
        is_last = place == len(shapes) - 1
        with torch.no_grad():
            yield _Bench(made, shape).measure(machine, trace if is_last else None)


def _model_of(shape: Shape) -> tuple:
    return shape.model, shape.layers, shape.drafts > 0


def _plans(config: ModelConfig, shapes: Sequence[Shape]) -> list[MemoryPlan]:
    return [
        plan_memory(
            config, s.context, s.batch, max_draft=s.drafts, chunk=s.batch, kv_format=s.kv_format
        )
        for s in shapes
    ]


class _Bench:
    """One shape's inputs, which advance on the device from replay to replay."""

    def __init__(self, made: RandomModel, shape: Shape) -> None:
        self.made, self.shape = made, shape
        self.model: DeepseekV4 = made.model
        rows, tokens = shape.batch, 1 + shape.drafts
        if shape.context <= STEPS * tokens:
            raise ValueError(
                f"context: got {shape.context}, the {STEPS} steps that are run need at least "
                f"{STEPS * tokens + 1}"
            )
        options = {"batch_invariant": shape.batch_invariant}
        self.model.kv_format = shape.kv_format
        self.cache = random_cache(self.model, rows, shape.context, shape.drafts, **options)
        # Replays of the step, of its warm-up and of the profiler move on: the last ends at context.
        start = shape.context - STEPS * tokens
        self.inputs = _inputs(self.cache, rows, tokens, start)
        self.inputs.tokens.random_(self.model.config.vocab_size)
        device = self.inputs.tokens.device
        # Step i of request b accepts its drafts as number b + i of a fixed sequence says.
        self.clock = torch.arange(rows, device=device)
        numbers = (torch.arange(STEPS + rows + 1) * shape.acceptance).floor()
        self.accepted = (numbers.diff() * shape.drafts).long().to(device)

    def measure(self, machine: Machine, trace: Path | None) -> Result:
        distinct = self._count_experts()
        graph = captured(self._step)
        time = _median(graph)
        kernels = kernel_times(graph.replay, trace)
        floor = StepFloor(self.model.config, machine)
        tokens = 1 + self.shape.drafts
        load = Load(self.shape.batch, tokens, self.shape.context, distinct)
        return Result(
            shape=self.shape,
            layers=self.model.config.num_hidden_layers,
            aliased_layers=self.made.aliased_layers,
            distinct=distinct,
            microseconds=time,
            floor=floor.step(load),
            launches=_nodes(graph),
            kinds=dict(self._kinds(floor, load)),
            kernels=kernels,
        )

    def _step(self) -> None:
        """Verify the newest tokens, then put what follows them in their place."""
        inputs, drafts = self._fresh(), self.shape.drafts
        found = verify(self.model, self.cache, inputs, drafts)
        inputs.step.starts.add_(1)
        if drafts:
            accepted = self.accepted[self.clock]
            self.clock.add_(1)
            inputs.step.starts.add_(accepted)
            inputs.tokens[:, 1:] = found[:, drafts + 2 :]
            found = found.gather(1, accepted[:, None])
        inputs.tokens[:, :1] = found

    def _fresh(self) -> ForwardInputs:
        # A step keeps what was derived from it, which a graph must derive itself.
        return replace(self.inputs, step=replace(self.inputs.step))

    def _count_experts(self) -> float:
        """Distinct experts of a layer, mean over layers, of a step that nothing advances."""
        counts: list[int] = []

        def count(layer: MoE, given: tuple[Tensor, ...]) -> None:
            x, ids = given[:2]
            x = x.values if isinstance(x, Rounded) else x
            counts.append(layer.gate(x.flatten(0, 1), ids.flatten())[0].unique().numel())

        hooks = [layer.ffn.register_forward_pre_hook(count) for layer in self.model.layers]
        try:
            inputs = self._fresh()
            self.model.streams(inputs.tokens, self.cache, inputs.step)
        finally:
            for hook in hooks:
                hook.remove()
        return statistics.mean(counts)

    def _kinds(self, floor: StepFloor, load: Load) -> Iterator[tuple[str, LayerTime]]:
        """Layers of each kind: what a chain twice as long takes more, since what layers share is
        launched once, and a graph takes its time to begin."""
        specs = [spec for spec in self.model.config.schedule if not spec.is_mtp]
        for kind in KINDS:
            chosen = [spec.index for spec in specs if spec.kind is kind][:LAYERS_OF_A_KIND]
            if not chosen:
                continue
            repeats = -(-LAYERS_OF_A_KIND // len(chosen))
            once, twice = (
                captured(lambda indices=chosen * times: self._chain(indices))
                for times in (repeats, 2 * repeats)
            )
            layers = repeats * len(chosen)
            time = (_median(twice) - _median(once)) / layers
            nodes = _nodes(once), _nodes(twice)
            launches = None if None in nodes else (nodes[1] - nodes[0]) / layers
            yield kind.name, LayerTime(time, floor.layer(specs[chosen[0]], load), launches)

    @full_precision_sums
    def _chain(self, indices: Sequence[int]) -> None:
        inputs = self._fresh()
        step = self.cache.prepared(inputs.step)
        streams = Streams(self.model.hyper.start(self.model.embed(inputs.tokens)))
        for index in indices:
            layer, cache = self.model.layers[index], self.cache.layers[index]
            streams = layer(streams, inputs.tokens, cache, step)


def _median(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of a replay."""

    def replay_some() -> None:
        for _ in range(TOGETHER):
            graph.replay()

    for _ in range(WARM_UP):
        graph.replay()
    return statistics.median(elapsed_microseconds(replay_some) for _ in range(ROUNDS)) / TOGETHER


def _inputs(cache: ModelCache, rows: int, tokens: int, start: int) -> ForwardInputs:
    """Greedy inputs of requests that are `start` tokens long, in memory of their own."""
    manager = CacheManager(cache)
    slots = [manager.admit(cache.max_context) for _ in range(rows)]
    manager.step(slots, [start] * rows, start)
    staged = manager.step(slots, [tokens] * rows, tokens)
    blocks = torch.randperm(cache.num_blocks, device=cache.device)[
        : rows * staged.block_table.shape[1]
    ]
    step = Step(
        staged.slots.clone(),
        staged.starts.clone(),
        staged.lens.clone(),
        blocks.view(rows, -1),
        tokens,
        staged.capacity,
    )
    ids = torch.zeros(rows, tokens, dtype=torch.int64, device=cache.device)
    return ForwardInputs(step, ids, ids, GREEDY)


def _nodes(graph: torch.cuda.CUDAGraph) -> int | None:
    """Nodes of a captured graph, each a launch; None without NVIDIA's bindings."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    error, _, count = runtime.cudaGraphGetNodes(runtime.cudaGraph_t(graph.raw_cuda_graph()))
    return None if error != runtime.cudaError_t.cudaSuccess else int(count)


def as_row(result: Result) -> dict[str, Any]:
    """A result as records keep it."""
    return {**asdict(result), "tokens_per_second": result.tokens_per_second}


def cells(row: Mapping[str, Any], is_bold: bool = False) -> list[str]:
    """A row of a record under `COLUMNS`."""
    time, shape = row["microseconds"], row["shape"]
    found = f"{time / 1e3:.2f}"
    model = shape["model"]
    if shape.get("batch_invariant"):
        model += ", invariant"
    if shape.get("kv_format"):
        model += f", {shape['kv_format']} keys"
    line = [
        model,
        layers_cell(row),
        f"{shape['batch']}",
        f"{shape['context']}",
        f"{shape['drafts']}",
        f"{row['distinct']:.1f}",
        f"**{found}**" if is_bold else found,
        f"{row['floor'] / 1e3:.2f}",
        f"{row['floor'] / time:.0%}",
        f"{row['tokens_per_second']:.0f}",
        _launches(row["launches"]),
    ]
    for kind in KINDS:
        part = row["kinds"].get(kind.name)
        line.append(
            "-"
            if part is None
            else f"{part['microseconds']:.0f} ({part['floor']:.0f}), {_launches(part['launches'])}"
        )
    return line


def _launches(count: float | None) -> str:
    return "?" if count is None else f"{count:.0f}"
