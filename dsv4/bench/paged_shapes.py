"""The paged decode steps and prefill chunks that are timed, and their inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.bench.shapes import HEAD_DIM, WINDOW
from dsv4.kernels.kit.kv_entry import Fp8Entry, row_elements
from dsv4.reference.cache_entry import pack_pages

PAGE = 64  # entries of a page of either pool
CONTEXT = 8192  # compressed entries of a request
ROTATION_BYTES = 1e9  # keys that the sets of a measurement read together, at least
DISTINCT_PAGES = 512  # pages of different content; a pool repeats them
TOKENS = (1, 4, 16, 64, 128, 256, 1024)
CODES_TOKENS = (64, 128, 256, 1024)  # launches that multiply FP8 codes


@dataclass(frozen=True)
class Shape:
    """One call: every token reads `window` keys and `top_k` of its request's `CONTEXT` entries.

    Attributes:
        name: of the model and the share of its heads.
        requests: the tokens of a request are consecutive positions; 0: each token has its own.
    """

    name: str
    tokens: int
    heads: int
    top_k: int
    window: int = WINDOW
    kv_format: str = "fp8"
    compute: str = "bf16"
    requests: int = 0

    @property
    def contexts(self) -> int:
        """Requests of the call."""
        return self.requests or self.tokens

    @property
    def keys(self) -> int:
        return self.top_k + self.window

    @property
    def entry_bytes(self) -> int:
        return row_elements(self.kv_format, HEAD_DIM) * (1 if self.kv_format == "fp8" else 2)

    @property
    def read_bytes(self) -> int:
        """Bytes of keys that have to be read: shared ones once."""
        context = self.contexts * (CONTEXT + self.tokens // self.contexts + self.window)
        return self.entry_bytes * min(self.tokens * self.keys, context)

    @property
    def bytes(self) -> int:
        """Keys and indices, q read and o written."""
        return self.read_bytes + self.tokens * (4 * self.keys + 4 * self.heads * HEAD_DIM)

    @property
    def flops(self) -> int:
        return 4 * self.tokens * self.heads * self.keys * HEAD_DIM

    @property
    def sets(self) -> int:
        """Sets of inputs in rotation."""
        return max(2, math.ceil(ROTATION_BYTES / self.read_bytes)) if self.requests == 0 else 2

    def __str__(self) -> str:
        products = "" if self.compute == "bf16" else f", {self.compute} products"
        return (
            f"{self.name}, T={self.tokens}, {self.heads} heads, {self.top_k} + {self.window} "
            f"{self.kv_format} keys{products}"
        )


def model_shapes() -> list[Shape]:
    """Pro and Flash in both formats and with products of FP8 codes, ranks with few heads, a long
    context, a prefill chunk."""
    models = (("Pro", 128, 1024), ("Flash", 64, 512))
    shapes = [
        Shape(name, tokens, heads, top_k, kv_format=kv_format)
        for name, heads, top_k in models
        for kv_format in ("bf16", "fp8")
        for tokens in TOKENS
    ]
    shapes += [
        Shape(name, tokens, heads, top_k, compute=compute)
        for name, heads, top_k in models
        for compute in ("fp8x2", "fp8")
        for tokens in CODES_TOKENS
    ]
    for heads in (8, 16, 32):
        shapes += [Shape(f"Pro/{128 // heads}", tokens, heads, 1024) for tokens in (64, 256)]
    shapes += [Shape("Flash long", tokens, 64, CONTEXT) for tokens in (1, 64)]
    for name, heads, top_k in models:
        shapes.append(Shape(f"{name} prefill", 8192, heads, top_k, requests=1))
    return shapes


class Inputs(NamedTuple):
    """Arguments of the operator up to `o`, in its order."""

    q: Tensor
    window_pool: Tensor
    window_indices: Tensor
    window_lens: Tensor
    compressed_pool: Tensor
    compressed_indices: Tensor
    compressed_lens: Tensor
    sink_logits: Tensor
    o: Tensor


def make_sets(shape: Shape, device: str = "cuda", sets: int | None = None) -> list[Inputs]:
    """Sets of inputs in one pair of pools, which neighbour each other in one tensor.

    Pages of a request lie anywhere; its indices are random, without repetition.
    """
    generator = torch.Generator(device).manual_seed(0)
    count = shape.sets if sets is None else sets
    columns = CONTEXT // PAGE
    window_columns = -(-(shape.window + shape.tokens // shape.contexts) // PAGE)
    entry_pages = count * shape.contexts * columns
    window_pages = count * shape.contexts * window_columns
    pool = _pool(shape, entry_pages + window_pages, generator)

    def scattered(pages: int, columns: int) -> Tensor:
        order = torch.randperm(pages, generator=generator, device=device)
        return order.view(count, shape.contexts, columns)

    pages_of_entries = scattered(entry_pages, columns)
    pages_of_windows = scattered(window_pages, window_columns)
    tokens = torch.arange(shape.tokens, device=device)
    request = tokens * shape.contexts // shape.tokens
    # A token's window ends with its own position; positions of a request are consecutive.
    first = tokens - request * (shape.tokens // shape.contexts)
    near = first[:, None] + torch.arange(shape.window, device=device)
    lens = [torch.full_like(tokens, n, dtype=torch.int32) for n in (shape.window, shape.top_k)]
    sinks = torch.randn(shape.heads, generator=generator, device=device)
    found = []
    for entries, windows in zip(pages_of_entries, pages_of_windows, strict=True):
        chosen = _chosen(shape, generator)
        q = torch.randn(
            (shape.tokens, shape.heads, HEAD_DIM), generator=generator, device=device
        ).bfloat16()
        found.append(
            Inputs(
                q,
                pool[entry_pages:],
                _slots(windows[request], near),
                lens[0],
                pool[:entry_pages],
                _slots(entries[request], chosen),
                lens[1],
                sinks,
                torch.full_like(q, torch.nan),
            )
        )
    return found


def _chosen(shape: Shape, generator: torch.Generator) -> Tensor:
    """[T, top_k]: entries of each token's context."""
    rows = []
    for begin in range(0, shape.tokens, 1024):
        tokens = min(1024, shape.tokens - begin)
        scores = torch.rand((tokens, CONTEXT), generator=generator, device=generator.device)
        rows.append(scores.argsort(1)[:, : shape.top_k])
    return torch.cat(rows)


def _slots(pages: Tensor, numbers: Tensor) -> Tensor:
    """[T, k] int32 slots of entries `numbers`, by the pages [T, columns] of each token."""
    return (pages.gather(1, numbers // PAGE) * PAGE + numbers % PAGE).to(torch.int32)


def _pool(shape: Shape, pages: int, generator: torch.Generator) -> Tensor:
    """[pages, PAGE, row] of normal keys in the shape's format; codes that are multiplied as they
    are share a scale."""
    distinct = min(pages, DISTINCT_PAGES)
    size = (distinct, PAGE, HEAD_DIM)
    keys = torch.randn(size, generator=generator, device=generator.device).bfloat16()
    if shape.kv_format == "bf16":
        pool = keys.new_empty((pages, *size[1:]))
        for begin in range(0, pages, distinct):
            pool[begin : begin + distinct] = keys[: pages - begin]
        return pool
    packed = pack_pages(keys, uniform_scale=shape.compute != "bf16")
    pool = packed.new_empty((pages, packed.shape[1]))
    for begin in range(0, pages, distinct):
        pool[begin : begin + distinct] = packed[: pages - begin]
    entry = Fp8Entry(HEAD_DIM)
    return pool[:, : PAGE * entry.bytes].unflatten(1, (PAGE, entry.bytes))
