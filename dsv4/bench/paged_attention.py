"""`sparse_fmha_paged` on a GPU: time in both modes beside the floor, and beside FlashMLA's kernels.

All gather keys by index from the same pools inside what is timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4 import ops
from dsv4.bench.flash_mla import DECODE_HEADS, PREFILL_HEADS, Library
from dsv4.bench.machine import Machine
from dsv4.bench.paged_shapes import Inputs, Shape, make_sets
from dsv4.bench.shapes import HEAD_DIM
from dsv4.bench.timing import graph_microseconds
from dsv4.ops.attention.sparse_fmha_paged import SPARSE_FMHA_PAGED
from dsv4.ops.runtime.runner import runner_config
from dsv4.testing.accuracy import BFLOAT16, Accuracy

SINK_MODE = "softmax"
# Relative errors that are not timed: of our kernels, and of one term of FP8 products, whose codes
# of q and P alone err by a few percent.
MAX_ERROR = {"bf16": BFLOAT16.relative, "fp8x2": BFLOAT16.relative, "fp8": 8e-2}
PEER_ERROR = 6e-3
CHECKED_TOKENS = 2  # so many of the first, and of the last
PEER = "FlashMLA"
COLUMNS = (
    *("shape", "T", "heads", "keys", "pool", "compute", "us", "batch-invariant us"),
    *("error", "GB/s", "floor us", "of floor", f"{PEER} us"),
)


@dataclass(frozen=True)
class Result:
    """Times in microseconds.

    Attributes:
        invariant: with `batch_invariant`.
        floor: larger of bytes over bandwidth and FLOPs over the bf16 rate.
        error: of our output, relative.
        peer: FlashMLA's kernel for these pools, None where it serves no such shape.
        failure: why a peer that should has no time.
    """

    shape: Shape
    microseconds: float
    invariant: float
    floor: float
    error: float
    peer: float | None = None
    failure: str = ""


def measure(
    shapes: Sequence[Shape], machine: Machine, library: Library | None = None
) -> Iterator[Result]:
    """Measure each shape; nothing is timed that is not right.

    Args:
        library: FlashMLA, from `dsv4.bench.flash_mla.find`.

    Raises:
        RuntimeError: our output differs from the torch implementation's.
    """
    for shape in shapes:
        yield _measure(shape, machine, library)
        # The next shape needs the memory, in blocks of other sizes.
        torch.cuda.empty_cache()


@torch.inference_mode()
def _measure(shape: Shape, machine: Machine, library: Library | None) -> Result:
    sets = make_sets(shape)
    times, error = [], 0.0
    for batch_invariant in (False, True):
        calls = our_calls(shape, sets, batch_invariant)
        calls[0]()
        error = relative_error(shape, sets[0], sets[0].o)
        if not error <= MAX_ERROR[shape.compute]:
            bound = MAX_ERROR[shape.compute]
            raise RuntimeError(f"{shape}: the output is off by {error:.2e}, allowed are {bound}")
        times.append(graph_microseconds(calls))
    peer, failure = None, ""
    if library is not None and serves(shape):
        try:
            peer = _peer_microseconds(shape, sets, library)
        except Exception as problem:  # a peer's fault must not end the benchmark
            failure = f"{type(problem).__name__}: {problem}".splitlines()[0]
    floor = machine.floor(shape.bytes, shape.flops)
    return Result(shape, times[0], times[1], floor, error, peer, failure)


def runner_id(shape: Shape, batch_invariant: bool = False) -> int:
    """Configuration of our calls."""
    return ops.sparse_fmha_paged_runner_id(
        HEAD_DIM,
        shape.heads,
        shape.kv_format,
        sink_mode=SINK_MODE,
        batch_invariant=batch_invariant,
        compute=shape.compute,
    )


def our_calls(shape: Shape, sets: Sequence[Inputs], batch_invariant: bool) -> list[partial]:
    """The operator on each set."""
    identity = runner_id(shape, batch_invariant)
    op = torch.ops.dsv4.sparse_fmha_paged.default
    return [partial(op, *each, identity) for each in sets]


def relative_error(shape: Shape, inputs: Inputs, output: Tensor) -> float:
    """Frobenius error against the torch implementation, on the first and last tokens."""
    every = torch.arange(shape.tokens, device=inputs.q.device)
    some = torch.cat((every[:CHECKED_TOKENS], every[-CHECKED_TOKENS:])).unique()
    tokens = ("q", "window_indices", "window_lens", "compressed_indices", "compressed_lens", "o")
    part = inputs._replace(**{name: getattr(inputs, name)[some].clone() for name in tokens})
    config = runner_config(runner_id(shape))
    absent = (None,) * (len(SPARSE_FMHA_PAGED.tensors) - len(part) - 1)
    SPARSE_FMHA_PAGED.torch(config, *part, *absent)
    return Accuracy.of(output[some], part.o).relative


# ---- FlashMLA ------------------------------------------------------------------------------------


def serves(shape: Shape) -> bool:
    """Whether FlashMLA has a kernel for a shape."""
    if shape.kv_format == "bf16":
        return shape.heads in PREFILL_HEADS and shape.keys % 128 == 0
    return shape.heads <= max(DECODE_HEADS) and shape.top_k % 64 == shape.window % 64 == 0


def _peer_microseconds(shape: Shape, sets: Sequence[Inputs], library: Library) -> float:
    prepare = _prefill_call if shape.kv_format == "bf16" else _decode_call
    calls = [prepare(shape, each, library) for each in sets]
    error = relative_error(shape, sets[0], calls[0]())
    if not error <= PEER_ERROR:
        raise ValueError(f"its output is off by {error:.2e}, allowed are {PEER_ERROR}")
    return graph_microseconds(calls)


def _prefill_call(shape: Shape, each: Inputs, library: Library):
    """The kernel for bf16 rows, which takes one pool and one list."""
    rows = each.compressed_pool.shape[0] * each.compressed_pool.shape[1]
    windows = each.window_pool.shape[0] * each.window_pool.shape[1]
    # Both pools are parts of one tensor.
    pool = each.compressed_pool.as_strided((rows + windows, 1, HEAD_DIM), (HEAD_DIM, HEAD_DIM, 1))
    indices = torch.cat((each.compressed_indices, each.window_indices + rows), 1).unsqueeze(1)
    arguments = (each.q, pool, indices, HEAD_DIM**-0.5, HEAD_DIM, each.sink_logits)
    return lambda: library.flash_mla_sparse_fwd(*arguments)[0]


def _decode_call(shape: Shape, each: Inputs, library: Library):
    """The kernel for FP8 entries, which is made for 64 and 128 heads."""
    heads = min(heads for heads in DECODE_HEADS if heads >= shape.heads)
    missing = heads - shape.heads
    q = torch.nn.functional.pad(each.q, (0, 0, 0, missing)).unsqueeze(1)
    sink = torch.nn.functional.pad(each.sink_logits, (0, missing))
    schedule = library.get_mla_metadata()[0]
    positional = (q, each.window_pool.unsqueeze(2), None, None, HEAD_DIM, schedule)
    options = {
        "softmax_scale": HEAD_DIM**-0.5,
        "is_fp8_kvcache": True,
        "indices": each.window_indices.unsqueeze(1),
        "attn_sink": sink,
        "extra_k_cache": each.compressed_pool.unsqueeze(2),
        "extra_indices_in_kvcache": each.compressed_indices.unsqueeze(1),
    }

    def call() -> Tensor:
        return library.flash_mla_with_kvcache(*positional, **options)[0][:, 0, : shape.heads]

    return call


# ---- records -------------------------------------------------------------------------------------


def as_row(result: Result) -> dict[str, Any]:
    """A result as records keep it."""
    rate = result.shape.bytes / result.microseconds / 1e3
    return {**asdict(result), "gigabytes_per_second": rate}


def cells(row: Mapping[str, Any], is_bold: bool = False) -> list[str]:
    """A row of a record under `COLUMNS`."""
    time, shape = row["microseconds"], row["shape"]
    return [
        shape["name"],
        f"{shape['tokens']}",
        f"{shape['heads']}",
        f"{shape['top_k']} + {shape['window']}",
        shape["kv_format"],
        shape["compute"],
        f"**{time:.2f}**" if is_bold else f"{time:.2f}",
        f"{row['invariant']:.2f}",
        f"{row['error']:.1e}",
        f"{row['gigabytes_per_second']:.0f}",
        f"{row['floor']:.2f}",
        f"{row['floor'] / time:.0%}",
        "-" if row["peer"] is None else f"{row['peer']:.1f}",
    ]
