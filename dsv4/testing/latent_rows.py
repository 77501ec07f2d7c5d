"""`latent_rows` under test: a step's tasks with shared requests, and what each must leave."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.kernels.rows.latent_rows_config import (
    COMPRESSOR,
    INDEXER,
    QUERY,
    REQUESTS,
    LatentRowsConfig,
)
from dsv4.ops.compress import COMPRESS
from dsv4.ops.kv_insert import KV_INSERT
from dsv4.ops.latent_rows import LATENT_ROWS, WINDOW, Compression, Requests
from dsv4.testing import compress, kv_insert, rms_norm_fp8
from dsv4.testing.accuracy import assert_same_bits
from dsv4.testing.harness import Target
from dsv4.testing.kernel_call import OpInputs, OpKernels

EPS = compress.EPS
# Of a compressor's inputs, in the order of the operator's names for them.
OWN = ("values", "scores", "ape", "state", "weight", "pool")
_SHARED = ("rope", "state_rows", "starts", "lens", "slots")


@dataclass(frozen=True)
class Case:
    """Sizes and options of a step.

    Attributes:
        starts, lens, chunk: of the requests, as in `compress.Case`; T is their tokens with padding.
        dim, kv_format, is_rounded, page: of keys and of pages.
        query_dim: of query latents; 0: none.
        ratio, overlap: of the compressor; 0: there is none.
        index_dim: of the indexer's keys; 0: there is none; index_format: of their pages.
    """

    starts: tuple[int, ...]
    lens: tuple[int, ...]
    chunk: int = 1
    dim: int = 512
    kv_format: str = "fp8"
    is_rounded: bool = True
    query_dim: int = 1024
    ratio: int = 4
    overlap: bool = True
    index_dim: int = 128
    page: int = 8
    rope_dim: int = 64
    index_format: str = "fp8"

    @property
    def config(self) -> LatentRowsConfig:
        return LatentRowsConfig(
            self.dim, EPS, self.kv_format, self.is_rounded, False, self.rope_dim, self.query_dim,
            self.ratio, self.overlap and self.ratio > 0, "bf16", self.index_dim,
            self.index_format if self.is_rounded else "bf16",
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.starts) * self.chunk

    def compressor(self, is_index: bool) -> compress.Case:
        """Of the compressor, or of the indexer's."""
        packed = self.index_format if self.is_rounded else "bf16"
        return compress.Case(
            self.starts, self.lens, self.chunk, (self.index_dim or 128) if is_index else self.dim,
            self.ratio or 4, self.overlap, packed if is_index else self.kv_format, is_index,
            self.is_rounded, self.rope_dim, self.page,
        )  # fmt: skip


# A layer of each kind: fields of a case that differ from the first one's.
KINDS: dict[str, dict] = {
    "CSA": {},
    "HCA": {"ratio": 128, "overlap": False, "index_dim": 0},
    "SWA": {"ratio": 0, "index_dim": 0},
}


@dataclass(frozen=True)
class Inputs(OpInputs):
    """Inputs of each task alone, as its own operator takes them; requests and table are shared."""

    op = LATENT_ROWS

    case: Case
    window: kv_insert.Inputs
    query: rms_norm_fp8.Inputs | None
    entries: compress.Inputs | None
    keys: compress.Inputs | None

    @classmethod
    def make(cls, case: Case, seed: int, device: torch.device | str = "cpu") -> Inputs:
        """Random inputs with what those of each task have: NaN in padding, tokens without slots."""
        # Rows of the states are drawn first: with one seed they are those of both.
        first, second = (
            compress.Inputs.make(case.compressor(is_index), seed, device)
            for is_index in (False, True)
        )
        shared = {name: first.tensors[name] for name in _SHARED}
        second = replace(second, tensors={**second.tensors, **shared})
        own = (case.tokens, case.dim, case.kv_format, case.is_rounded)
        given = kv_insert.Case(*own, page=case.page, rope_dim=case.rope_dim)
        window = kv_insert.Inputs.make(given, seed, device)
        query = None
        if case.query_dim:
            given = rms_norm_fp8.Case(case.tokens, case.query_dim, kind="special")
            query = rms_norm_fp8.Inputs.make(given, seed, device)
        return cls(
            case,
            replace(window, rope=shared["rope"]),
            query,
            first if case.ratio else None,
            second if case.index_dim else None,
        )

    @property
    def config(self) -> LatentRowsConfig:
        return self.case.config

    @property
    def wanted(self) -> tuple[str, ...]:
        return QUERY[2:] if self.query is not None else ()

    @property
    def arguments(self) -> dict[str, Tensor]:
        """By the table's names, with states and pools of their own."""
        found = dict(zip(WINDOW, self.window.arguments.values(), strict=True))
        if self.query is not None:
            found |= dict(zip(QUERY, self.query.arguments.values()))
        if self.entries is not None:
            tensors = self.entries.tensors
            found |= {name: tensors[_SHARED[1 + i]] for i, name in enumerate(REQUESTS)}
        for names, part in ((COMPRESSOR, self.entries), (INDEXER, self.keys)):
            if part is not None:
                own = part.arguments
                found |= dict(zip(names, (own[name] for name in OWN), strict=True))
        return found

    def options(self, arguments: dict[str, Tensor]) -> dict:
        """Arguments of the public function, by name."""
        case, found = self.case, {name: arguments[name] for name in WINDOW}
        found |= {"eps": EPS, "is_rounded": case.is_rounded}
        if self.query is not None:
            found |= {name: arguments[name] for name in QUERY[:2]}
        if self.entries is not None:
            found["requests"] = Requests(*(arguments[name] for name in REQUESTS))
            found["entries"] = Compression(*(arguments[name] for name in COMPRESSOR))
        if self.keys is not None:
            found["index_keys"] = Compression(*(arguments[name] for name in INDEXER))
        return found

    def compressions(self) -> list[tuple[compress.Inputs, tuple[str, ...]]]:
        """Inputs of each compressor, and what `latent_rows` calls those of `OWN`."""
        names = (self.entries, COMPRESSOR), (self.keys, INDEXER)
        return [(part, own) for part, own in names if part is not None]


def assert_tasks(inputs: Inputs, outputs: dict[str, Tensor]) -> None:
    """Compare what a step left with the torch implementations: bits of codes and of keys of the
    window; entries as `compress.assert_step` does.

    Args:
        outputs: by the table's names, states and pools among them.
    """
    window = inputs.window
    pool = window.pool()
    KV_INSERT.torch(window.config, *window.tensors, pool)
    assert_same_bits("pool", outputs["pool"].cpu(), pool.cpu())
    if inputs.query is not None:
        for name, wanted in zip(QUERY[2:], inputs.query.expected().values(), strict=True):
            rms_norm_fp8.assert_same_codes(name, outputs[name].cpu(), wanted.cpu())
    for part, names in inputs.compressions():
        own = dict(zip(OWN, names, strict=True))
        compress.assert_step(part, {name: outputs[own[name]] for name in ("state", "pool")})


def assert_same_as_separate(
    target: Target, inputs: Inputs, outputs: dict[str, Tensor], seed: int
) -> None:
    """Compare bits of entries and states with those that the compressors' own kernels leave."""
    kernels = OpKernels(COMPRESS, target)
    for part, names in inputs.compressions():
        own, alone = dict(zip(OWN, names, strict=True)), kernels.run(part, seed).scratch
        for name in ("state", "pool"):
            what = f"{own[name]} (fused against separate)"
            assert_same_bits(what, outputs[own[name]].cpu(), alone[name])
