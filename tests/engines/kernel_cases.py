"""Inputs of the kernels that vLLM's CPU build is asked about, the same bits on every machine."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from dsv4.reference import rope
from dsv4.reference.cache_entry import pack_pages
from dsv4.reference.weights import encode_fp4
from tests.engines.checkpoint import ENGINE, normal

Inputs = dict[str, Tensor]
HEADS, DIM, ROPE = 8, 512, 64
PAGE = 64
EPS = 1e-6


def inputs() -> dict[str, Inputs]:
    """Of every kernel, by its name."""
    g = torch.Generator().manual_seed(20)
    return {
        "kv_insert": _kv_insert(g),
        "attention, CSA": _attention(g, PAGE),
        "attention, HCA": _attention(g, 2),
        "index_logits": _index_logits(g),
        "index_query": _index_query(g),
        "topk": _topk(g),
        "compress, CSA": _compress(g, 4, 512),
        "compress, HCA": _compress(g, 128, 512),
        "compress, index": _compress(g, 4, 128),
        "hash_router": _hash_router(g),
        "score_router": {"logits": normal((40, 256), g), "bias": 0.3 * normal((256,), g)},
        "experts": _experts(g),
        "streams": _streams(g),
        "inverse_rope": _inverse_rope(g),
    }


def frequencies() -> Tensor:
    """Of layers with a compressor."""
    return rope.frequencies(ROPE, ENGINE.compress_rope_theta, ENGINE.rope_scaling)


def cos_sin(positions: int) -> Tensor:
    """The table [positions, 64] that engines read: cosines, then sines."""
    angles = torch.arange(positions)[:, None].float() * frequencies()
    return torch.cat((angles.cos(), angles.sin()), -1)


def integers(g: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    """Uniform int64."""
    return torch.randint(low, high, shape, generator=g)


def _kv_insert(g: torch.Generator) -> Inputs:
    """Tokens of two requests into pages out of order; vectors of very different sizes.

    None of less than 0.04 though, which normed vectors are not: vLLM's scales end at 2^-13, the
    official ones at that of an amax of 1e-4.
    """
    tokens = 30
    sizes = torch.exp2(integers(g, -4, 9, tokens, 1).float())
    return {
        "q": normal((tokens, 2, DIM), g).bfloat16(),
        "kv": (normal((tokens, DIM), g) * sizes).bfloat16(),
        "positions": torch.cat((torch.arange(20), torch.arange(700, 710))),
        "slots": torch.randperm(3 * PAGE, generator=g)[:tokens],
        "cos_sin": cos_sin(1024),
        "pool": torch.zeros(3, 37440, dtype=torch.uint8),
    }


def _attention(g: torch.Generator, entries: int) -> Inputs:
    """Ragged lists of rows, invalid ones among them; one token without any."""
    tokens, rows = 4, 256
    window = pack_pages(normal((4, PAGE, DIM), g).bfloat16().float())
    compressed = pack_pages(normal((rows // entries, entries, DIM), g).bfloat16().float())
    lens = torch.tensor([128, 1, 60, 0])
    counts = torch.tensor([300, 512, 0, 0])
    chosen = integers(g, 0, 4 * PAGE, tokens, 128)
    best = integers(g, 0, rows, tokens, 512)
    best[0, 5] = -1
    return {
        "q": (2 * normal((tokens, HEADS, DIM), g)).bfloat16(),
        "window": window,
        "window_slots": torch.where(torch.arange(128) < lens[:, None], chosen, -1),
        "compressed": compressed,
        "compressed_slots": torch.where(torch.arange(512) < counts[:, None], best, -1),
        "entries": torch.tensor(entries),
        # About as heavy as all keys together.
        "sink": 7 + normal((HEADS,), g),
    }


def _index_logits(g: torch.Generator) -> Inputs:
    """Keys of 132 bytes: 128 e4m3 codes, one fp32 scale; pages out of order."""
    tokens, pages = 5, 12
    codes = normal((pages * PAGE, 128), g).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.exp2(integers(g, -3, 4, pages * PAGE).float())
    data = codes.view(pages, PAGE * 128)
    factors = scales.view(torch.uint8).view(pages, PAGE * 4)
    return {
        "q": normal((tokens, 4, 128), g).to(torch.float8_e4m3fn).view(torch.uint8),
        "cache": torch.cat((data, factors), 1),
        "weights": normal((tokens, 4), g),
        "lens": torch.tensor([30, 64, 100, 400, 700], dtype=torch.int32),
        "table": torch.stack([torch.randperm(pages, generator=g) for _ in range(tokens)]).int(),
    }


def _index_query(g: torch.Generator) -> Inputs:
    tokens, heads = 6, 4
    return {
        "q": normal((tokens, heads, 128), g).bfloat16().float(),
        "weights": normal((tokens, heads), g),
        "positions": integers(g, 0, 1024, tokens),
        "cos_sin": cos_sin(1024),
    }


def _topk(g: torch.Generator) -> Inputs:
    rows, entries = 8, 650
    scores = torch.stack([torch.randperm(entries, generator=g) for _ in range(rows)])
    lens = torch.tensor([1, 500, 512, 513, 520, 600, 649, 650], dtype=torch.int32)
    return {"scores": scores.float() - 300, "lens": lens}


def _compress(g: torch.Generator, rate: int, dim: int) -> Inputs:
    """Three entries of a request and a token more, after the projections."""
    blocks = 2 if rate == 4 else 1
    tokens = 3 * rate + (4 if rate == 4 else 128)
    return {
        "kv": normal((tokens, blocks * dim), g),
        "score": 2 * normal((tokens, blocks * dim), g),
        "ape": normal((rate, blocks * dim), g),
        "norm": 1 + 0.2 * normal((dim,), g),
        "blocks": torch.tensor(blocks),
        "cos_sin": cos_sin(1024),
    }


def _hash_router(g: torch.Generator) -> Inputs:
    order = integers(g, 0, 2**40, 50, 256).argsort(-1)
    logits = normal((40, 256), g)
    return {"logits": logits, "table": order[:, :6], "ids": integers(g, 0, 50, 40)}


def _experts(g: torch.Generator) -> Inputs:
    """Inputs that FP8 with a scale per 128 holds exactly: rounding them changes nothing."""
    tokens, count, hidden, inner = 6, 8, 256, 128
    found: Inputs = {"x": normal((tokens, hidden), g).to(torch.float8_e4m3fn).bfloat16()}
    for name, shape in (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden))):
        codes, scales = encode_fp4(normal((count, *shape), g) * shape[1] ** -0.5)
        found |= {name: codes, f"{name}_scale": scales.view(torch.uint8)}
    table = integers(g, 0, 2**40, tokens, count).argsort(-1)[:, :2]
    gate = normal((count, hidden), g) * hidden**-0.5
    # As `route` has them, in FP64: the last bits of an FP32 product depend on the CPU.
    scores = softplus(found["x"].double() @ gate.double().T).sqrt().gather(-1, table)
    weights = (1.5 * scores / scores.sum(-1, keepdim=True)).float()
    return found | {"gate": gate, "table": table, "chosen": table.int(), "weights": weights}


def _streams(g: torch.Generator) -> Inputs:
    tokens, n, hidden = 6, 4, 256
    mixes = n * (2 + n)
    return {
        "streams": normal((tokens, n, hidden), g).bfloat16(),
        "y": normal((tokens, hidden), g).bfloat16(),
        "fn": normal((mixes, n * hidden), g) * (n * hidden) ** -0.5,
        "base": 0.3 * normal((mixes,), g),
        "scale": normal((3,), g),
        "head_fn": normal((n, n * hidden), g) * (n * hidden) ** -0.5,
        "head_base": 0.3 * normal((n,), g),
        "head_scale": normal((1,), g),
    }


def _inverse_rope(g: torch.Generator) -> Inputs:
    tokens = 3
    return {
        "o": normal((tokens, HEADS, DIM), g).bfloat16(),
        "positions": integers(g, 0, 1024, tokens),
        "cos_sin": cos_sin(1024),
    }
