"""FlashMLA as a peer: its sparse prefill kernel (bf16 keys), its sparse decode kernel (FP8 keys).

Both gather their keys by index from a pool. The pool, the indices and the decode schedule are made
before the timing, as an engine shares them among layers or gets them with its cache.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dsv4.bench.peers import Peer, Run
from dsv4.bench.shapes import HEAD_DIM, Arguments
from dsv4.reference.cache_entry import entry_bytes, pack_pages, unpack_pages
from dsv4.testing.attention import Case

# vLLM ships FlashMLA as this file, which needs nothing else of vLLM.
EXTENSION = "_flashmla_C.abi3.so"
PAGE = 64  # entries of a page of the FP8 cache
# Head counts and multiples of keys that the kernels are made for.
PREFILL_HEADS = (8, 16, 32, 64, 128)
DECODE_HEADS = (64, 128)
PREFILL_KEYS, DECODE_KEYS = 128, 64


class Library(Protocol):
    """The functions of the `flash_mla` package that are used here."""

    def flash_mla_sparse_fwd(self, q, kv, indices, sm_scale, d_v, attn_sink) -> tuple: ...
    def get_mla_metadata(self) -> tuple: ...
    def flash_mla_with_kvcache(self, q, k_cache, *args: Any, **options: Any) -> tuple: ...


class Extension:
    """`flash_mla`'s functions over the operators that the compiled extension registers.

    Args:
        path: the shared library.

    Raises:
        ValueError: it cannot be loaded or registers other operators.
    """

    def __init__(self, path: Path) -> None:
        try:
            torch.ops.load_library(str(path))
            self._prefill = torch.ops._flashmla_C.sparse_prefill_fwd
            self._decode = torch.ops._flashmla_C.sparse_decode_fwd
        except (OSError, AttributeError) as error:
            raise ValueError(f"flashmla: {path} cannot be used ({error})") from None

    def flash_mla_sparse_fwd(self, q, kv, indices, sm_scale, d_v, attn_sink) -> tuple:
        return tuple(self._prefill(q, kv, indices, sm_scale, d_v, attn_sink, None, None))

    def get_mla_metadata(self) -> tuple[dict, None]:
        return {"schedule": None, "splits": None}, None

    def flash_mla_with_kvcache(
        self,
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        *,
        softmax_scale,
        is_fp8_kvcache,
        indices,
        attn_sink,
        extra_k_cache,
        extra_indices_in_kvcache,
    ) -> tuple:
        known = tile_scheduler_metadata
        out, lse, known["schedule"], known["splits"] = self._decode(
            *(q, k_cache, indices, None, attn_sink, known["schedule"], known["splits"]),
            *(extra_k_cache, extra_indices_in_kvcache, None, head_dim_v, softmax_scale),
        )
        return out, lse


def find(path: Path | None = None) -> Library | None:
    """FlashMLA at `path`, else the package `flash_mla`, else vLLM's copy; None where there is none.

    Raises:
        ValueError: `path` is given and cannot be used.
    """
    if path is not None:
        return Extension(path)
    if importlib.util.find_spec("flash_mla") is not None:
        return importlib.import_module("flash_mla")
    vllm = importlib.util.find_spec("vllm")
    if vllm is not None and vllm.origin is not None:
        extension = Path(vllm.origin).with_name(EXTENSION)
        if extension.exists():
            return Extension(extension)
    return None


def flash_mla_peers(library: Library) -> list[Peer]:
    """The two kernels; the second reads FP8 keys, half the bytes, and is right for those."""
    return [
        Peer(
            "FlashMLA",
            lambda case, inputs: [_prefill_run(library, case, each) for each in inputs],
            lambda case: (
                case.head_dim == HEAD_DIM
                and case.heads in PREFILL_HEADS
                and case.keys % PREFILL_KEYS == 0
            ),
            copies=1.5,
        ),
        Peer(
            "FlashMLA fp8",
            lambda case, inputs: _decode_runs(library, case, inputs),
            lambda case: (
                case.head_dim == HEAD_DIM
                and case.heads <= max(DECODE_HEADS)
                and min(case.top_k, case.window_rows) > 0
                and case.top_k % DECODE_KEYS == case.window_rows % DECODE_KEYS == 0
            ),
            copies=4.0,
            keys=_rounded,
        ),
    ]


def _prefill_run(library: Library, case: Case, inputs: Arguments) -> Run:
    pool = torch.cat((inputs.compressed_kv, inputs.swa_kv), 1).view(-1, 1, case.head_dim)
    indices = _rows(case.tokens, case.keys, pool.device)
    arguments = (inputs.q, pool, indices, case.head_dim**-0.5, case.head_dim, inputs.sink_logits)

    def call() -> Tensor:
        return library.flash_mla_sparse_fwd(*arguments)[0]

    return Run(call, call)


def _decode_runs(library: Library, case: Case, inputs: list[Arguments]) -> list[Run]:
    heads = min(heads for heads in DECODE_HEADS if heads >= case.heads)
    schedule = library.get_mla_metadata()[0]
    device = inputs[0].q.device
    missing = heads - case.heads
    options = {
        "softmax_scale": case.head_dim**-0.5,
        "is_fp8_kvcache": True,
        "indices": _rows(case.tokens, case.window_rows, device),
        "extra_indices_in_kvcache": _rows(case.tokens, case.top_k, device),
    }

    def prepare(each: Arguments) -> Run:
        window, compressed = (
            _as_cache(pack_pages(kv.reshape(-1, PAGE, case.head_dim)))
            for kv in (each.swa_kv, each.compressed_kv)
        )
        q = torch.nn.functional.pad(each.q, (0, 0, 0, missing)).unsqueeze(1)
        sink = torch.nn.functional.pad(each.sink_logits, (0, missing))

        def call() -> Tensor:
            return library.flash_mla_with_kvcache(
                *(q, window, None, None, case.head_dim, schedule),
                attn_sink=sink,
                extra_k_cache=compressed,
                **options,
            )[0]

        return Run(call, lambda: call()[:, 0, : case.heads])

    return [prepare(each) for each in inputs]


def _rows(tokens: int, keys: int, device: torch.device) -> Tensor:
    """[tokens, 1, keys] int32: each token's own consecutive rows of a pool."""
    return torch.arange(tokens * keys, dtype=torch.int32, device=device).view(tokens, 1, keys)


def _rounded(keys: Tensor) -> Tensor:
    """The keys that the FP8 cache holds in the place of these."""
    return unpack_pages(pack_pages(keys.reshape(-1, PAGE, HEAD_DIM)), PAGE).view(keys.shape)


def _as_cache(pages: Tensor) -> Tensor:
    """Packed pages as the [pages, PAGE, 1, bytes] that FlashMLA takes."""
    return pages[:, : PAGE * entry_bytes()].view(len(pages), PAGE, 1, entry_bytes())
