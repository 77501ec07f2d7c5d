"""`quantized_attention` on a GPU: rates with and without the quantisers, accuracy, peers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsv4.bench.lowp_peers import Peer
from dsv4.bench.timing import graph_microseconds
from dsv4.ops import quantize_kv, quantized_attention
from dsv4.reference.lowp_attention import exact_attention
from dsv4.testing.lowp import Metrics

BATCH, HEADS = 4, 32
ROWS = (1024, 2048, 4096, 8192, 16384, 32768)
CHECKED = 128  # queries of a head that are compared with exact attention, the last ones
COLUMNS = (
    "d", "heads", "causal", "L", "kernel us", "TFLOP/s", "end to end us", "TFLOP/s", "of kernel",
    "cosine", "L1", "RMSE", "target", "of the better",
)  # fmt: skip
# TFLOP/s asked for on an H200, by channels and rows: not causal, causal; of a head of keys each.
TARGETS = {
    (128, 2048): (870, 680),
    (128, 8192): (1030, 900),
    (128, 32768): (1050, 980),
    (64, 2048): (560, 470),
    (64, 8192): (660, 600),
}
# What `of the better` compares with, and how many times the better of them is asked for.
RATED_PEERS, RATE = ("FA3 FP8", "SageAttention"), 1.10
LONG, WHOLE_RATE = 8192, 0.92  # rows from which on so much of the kernel's rate is asked for


@dataclass(frozen=True)
class Shape:
    """Sizes of a call: as many queries as keys.

    Attributes:
        key_heads: that share `HEADS` heads of queries.
    """

    dim: int
    rows: int
    is_causal: bool
    key_heads: int = HEADS

    @property
    def flops(self) -> float:
        """Of both products, without what a causal mask hides."""
        return 4 * BATCH * HEADS * self.rows**2 * self.dim * (0.5 if self.is_causal else 1)


@dataclass(frozen=True)
class Result:
    """Times in microseconds, and the distance from exact attention on the inputs.

    Attributes:
        kernel: of attention over codes of keys and values, queries coded in it.
        end_to_end: with the quantisers of keys and values.
        peers: times of others, by name; None where one cannot run.
    """

    shape: Shape
    kernel: float
    end_to_end: float
    accuracy: Metrics
    peers: Mapping[str, float | None] = field(default_factory=dict)


def model_shapes() -> list[Shape]:
    """Both widths, causal and not, 1k to 32k rows; and four heads of queries to one of keys."""
    return [
        *(Shape(d, n, causal) for d in (128, 64) for causal in (False, True) for n in ROWS),
        *(Shape(128, n, False, 8) for n in ROWS[1:4]),
    ]


def measure(shapes: Sequence[Shape], peers: Sequence[Peer] = ()) -> Iterator[Result]:
    """Measure each shape; nothing is timed that is far from exact attention.

    Raises:
        RuntimeError: it is.
    """
    for shape in shapes:
        yield _measure(shape, peers)
        # The next shape needs the memory, in blocks of other sizes.
        torch.cuda.empty_cache()


def make_inputs(shape: Shape, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a shape, normal, bfloat16."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(heads: int) -> Tensor:
        size = (BATCH, heads, shape.rows, shape.dim)
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

    return normal(HEADS), normal(shape.key_heads), normal(shape.key_heads)


def accuracy_of(shape: Shape, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor) -> Metrics:
    """Distance of the last queries of the first and the last head from exact attention."""
    q, k, v = inputs
    rows = slice(-min(CHECKED, shape.rows), None)
    seen = None
    if shape.is_causal:
        numbers = torch.arange(shape.rows, device=q.device)
        seen = numbers <= numbers[rows, None]
    found, wanted = [], []
    for head in (0, -1):
        exact, _ = exact_attention(q[head, head, rows], k[head, head], v[head, head],
                                   shape.dim**-0.5, seen)  # fmt: skip
        found.append(out[head, head, rows])
        wanted.append(exact)
    return Metrics.of(torch.stack(found), torch.stack(wanted))


def check(shape: Shape, accuracy: Metrics) -> None:
    """Refuse to time what is far from exact attention on normal inputs: RuntimeError."""
    if not (accuracy.cosine >= 0.998 and accuracy.l1 <= 0.06):
        raise RuntimeError(f"quantized_attention of {shape} is off: {accuracy}")


@torch.inference_mode()
def _measure(shape: Shape, peers: Sequence[Peer]) -> Result:
    inputs = q, k, v = make_inputs(shape, "cuda")
    codes = quantize_kv(k, v)
    accuracy = accuracy_of(shape, inputs, quantized_attention(q, codes, is_causal=shape.is_causal))
    check(shape, accuracy)
    kernel = graph_microseconds([lambda: quantized_attention(q, codes, is_causal=shape.is_causal)])
    whole = graph_microseconds([lambda: quantized_attention(q, k, v, is_causal=shape.is_causal)])
    found = {peer.name: _time(peer, inputs, shape.is_causal) for peer in peers}
    return Result(shape, kernel, whole, accuracy, found)


def _time(peer: Peer, inputs: tuple[Tensor, Tensor, Tensor], is_causal: bool) -> float | None:
    """Time of a peer; None where it refuses."""
    try:
        call = peer.prepare(*inputs, is_causal)
        call()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{peer.name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        return None
    return graph_microseconds([call])


def as_row(result: Result) -> dict[str, Any]:
    """A result as records keep it."""
    return asdict(result)


def cells(row: Mapping[str, Any], is_bold: bool = False) -> list[str]:
    """A row of a record under `COLUMNS`, then TFLOP/s of the peers."""
    shape, accuracy = Shape(**row["shape"]), row["accuracy"]

    def rate(time: float | None) -> str:
        return "-" if time is None else f"{shape.flops / time / 1e6:.0f}"

    kernel, whole = row["kernel"], row["end_to_end"]
    own = rate(kernel)
    return [
        f"{shape.dim}",
        f"{HEADS}/{shape.key_heads}",
        "yes" if shape.is_causal else "no",
        f"{shape.rows}",
        f"{kernel:.1f}",
        f"**{own}**" if is_bold else own,
        f"{whole:.1f}",
        rate(whole),
        f"{kernel / whole:.2f}",
        f"{accuracy['cosine']:.5f}",
        f"{accuracy['l1']:.4f}",
        f"{accuracy['rmse']:.1e}",
        f"{target_of(shape) or '-'}",
        "-" if ratio_of(row) is None else f"{ratio_of(row):.2f}",
        *(rate(time) for time in row["peers"].values()),
    ]


def target_of(shape: Shape) -> int | None:
    """TFLOP/s asked for of a shape."""
    found = TARGETS.get((shape.dim, shape.rows)) if shape.key_heads == HEADS else None
    return found and found[shape.is_causal]


def ratio_of(row: Mapping[str, Any]) -> float | None:
    """How many times as fast as the better of `RATED_PEERS` the kernel was, where one ran."""
    times = [row["peers"].get(name) for name in RATED_PEERS]
    return min((time / row["kernel"] for time in times if time is not None), default=None)


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the rows of a record say about what was asked for, in one paragraph."""
    shapes = [Shape(**row["shape"]) for row in rows]
    rates = [shape.flops / row["kernel"] / 1e6 for shape, row in zip(shapes, rows)]
    met = [rate >= target for rate, shape in zip(rates, shapes) if (target := target_of(shape))]
    ratios = [ratio for row in rows if (ratio := ratio_of(row)) is not None]
    wholes = [
        row["kernel"] / row["end_to_end"] for row, shape in zip(rows, shapes) if shape.rows >= LONG
    ]
    said = [f"Targets met: {sum(met)} of {len(met)}."] if met else []
    if ratios:
        said.append(
            f"{min(ratios):.2f} to {max(ratios):.2f} times the better of "
            f"{' and '.join(RATED_PEERS)}, at least {RATE:.2f} times in "
            f"{sum(ratio >= RATE for ratio in ratios)} rows of {len(ratios)}."
        )
    if wholes:
        said.append(
            f"With the quantisers {min(wholes):.2f} to {max(wholes):.2f} of the kernel's rate from "
            f"{LONG} rows on, at least {WHOLE_RATE:.2f} in "
            f"{sum(whole >= WHOLE_RATE for whole in wholes)} rows of {len(wholes)}."
        )
    return " ".join(said)
