"""`sparse_fmha_with_swa` on a GPU: time, rates, the machine's floor, and the peers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4 import ops
from dsv4.bench import peers
from dsv4.bench.timing import copy_bandwidth, graph_microseconds, host_microseconds, matmul_rate

HEAD_DIM = 512
WINDOW = 128
SINK_MODE = "softmax"
TOKENS = (1, 4, 16, 64, 128, 256, 1024)
# Inputs rotate over more bytes than any GPU's L2 cache holds.
ROTATION_BYTES = 256 << 20
MAX_ROTATION = 64


@dataclass(frozen=True)
class Shape:
    """T tokens of `heads` heads, each over `top_k` compressed and `window` window keys."""

    name: str
    tokens: int
    heads: int
    top_k: int
    window: int = WINDOW
    head_dim: int = HEAD_DIM

    @property
    def keys(self) -> int:
        return self.top_k + self.window

    @property
    def bytes(self) -> int:
        """Compulsory traffic: KV and q read once, o written once."""
        return 2 * self.tokens * self.head_dim * (self.keys + 2 * self.heads)

    @property
    def flops(self) -> int:
        return 4 * self.tokens * self.heads * self.keys * self.head_dim


@dataclass(frozen=True)
class Machine:
    """What this GPU reaches: bytes per second of a copy, FLOP per second of a matrix product."""

    name: str
    bandwidth: float
    rate: float

    @classmethod
    def measure(cls) -> Machine:
        return cls(torch.cuda.get_device_name(), copy_bandwidth(), matmul_rate())

    def floor(self, shape: Shape) -> float:
        """Microseconds that no kernel for `shape` beats: the larger of its two times."""
        return max(shape.bytes / self.bandwidth, shape.flops / self.rate) * 1e6


@dataclass(frozen=True)
class Result:
    """Times in microseconds; a peer that cannot run the shape is absent."""

    shape: Shape
    microseconds: float
    floor: float
    peers: dict[str, float]

    @property
    def teraflops(self) -> float:
        return self.shape.flops / self.microseconds / 1e6

    @property
    def gigabytes(self) -> float:
        return self.shape.bytes / self.microseconds / 1e3


def model_shapes() -> list[Shape]:
    """Decode and prefill chunks of Pro and Flash, and of a rank that holds few heads."""
    shapes = [Shape("Pro", tokens, 128, 1024) for tokens in TOKENS]
    shapes += [Shape("Flash", tokens, 64, 512) for tokens in TOKENS]
    for heads in (8, 16, 32):
        shapes += [Shape(f"Pro/{128 // heads}", tokens, heads, 1024) for tokens in (64, 256)]
    return [*shapes, Shape("Flash/8", 64, 8, 512)]


def run(
    shapes: list[Shape], machine: Machine, *, num_splits: int | None, with_peers: bool
) -> Iterator[Result]:
    """Measure each shape; peers run on the same inputs."""
    for shape in shapes:
        inputs = make_inputs(shape)
        time = graph_microseconds(ours(shape, inputs, num_splits))
        others = {}
        if with_peers:
            for name, make in peers.PEERS.items():
                # The torch peers write their scores to memory: several copies of all keys.
                if 8 * shape.bytes < torch.cuda.mem_get_info()[0]:
                    others[name] = graph_microseconds([make(shape, *each) for each in inputs])
        yield Result(shape, time, machine.floor(shape), others)


def make_inputs(shape: Shape) -> list[tuple[Tensor, ...]]:
    """Sets of (q, compressed_kv, swa_kv, swa_lens, sink_logits, request_ids, o), every token its
    own request; lengths, ids and sinks are shared, as the layers of a model share them."""
    count = min(MAX_ROTATION, max(2, math.ceil(ROTATION_BYTES / shape.bytes)))
    tokens, width = shape.tokens, shape.window
    swa_lens = torch.full((tokens,), width, dtype=torch.int32, device="cuda")
    request_ids = torch.arange(tokens, dtype=torch.int32, device="cuda")
    sink_logits = torch.randn(shape.heads, device="cuda")

    def rows(*size: int) -> Tensor:
        return torch.randn(tokens, *size, shape.head_dim, dtype=torch.bfloat16, device="cuda")

    sets = []
    for _ in range(count):
        q, compressed_kv, swa_kv = rows(shape.heads), rows(shape.top_k), rows(width)
        output = torch.empty_like(q)
        sets.append((q, compressed_kv, swa_kv, swa_lens, sink_logits, request_ids, output))
    return sets


def ours(
    shape: Shape, inputs: list[tuple[Tensor, ...]], num_splits: int | None
) -> list[Callable[[], None]]:
    """One call of the operator per set of inputs, warmed up."""
    runner = runner_id(shape, num_splits)
    ops.warmup(runner, shape.tokens)
    op = torch.ops.dsv4.sparse_fmha_with_swa
    return [lambda each=each: op(*each, runner) for each in inputs]


def runner_id(shape: Shape, num_splits: int | None) -> int:
    return ops.fmha_runner_id(
        shape.head_dim,
        shape.heads,
        shape.window,
        shape.top_k,
        sink_mode=SINK_MODE,
        num_splits=num_splits,
    )


def host_cost() -> tuple[float, float]:
    """Microseconds on the host of one call of the operator, and of the launch alone.

    The launch is what the compiled function takes with its arguments at hand: tensor maps,
    argument checks, and the driver.
    """
    from dsv4.ops import fmha_cuda
    from dsv4.ops.runner import runner_config

    shape = Shape("Pro", 1, 128, 1024)
    arguments = make_inputs(shape)[0]
    call = ours(shape, [arguments], 1)[0]
    config = runner_config(runner_id(shape, 1))
    return host_microseconds(call), host_microseconds(fmha_cuda.bare_launch(config, *arguments))
