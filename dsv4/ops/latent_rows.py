"""`latent_rows`: what follows the projections of a layer's input, as function and operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import index
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.arch import ARCHS
from dsv4.kernels.kit.args import required_of
from dsv4.kernels.kit.index_entry import INDEX_FORMATS, MODEL_FORMAT, format_of
from dsv4.kernels.rows.config import GROUP
from dsv4.kernels.rows.latent_rows_config import (
    ARGS,
    COMPRESSOR,
    INDEXER,
    QUERY,
    REQUESTS,
    LatentRowsConfig,
    has_kernel,
    needed,
    values,
)
from dsv4.ops.compress import COMPRESS
from dsv4.ops.kv_insert import KV_INSERT
from dsv4.ops.rms_norm_fp8 import MODEL_DIMS, MODEL_EPS, RMS_NORM_FP8
from dsv4.ops.runtime import tensors as make
from dsv4.ops.runtime.backend import Device
from dsv4.ops.runtime.checks import check_is_tensor
from dsv4.ops.runtime.kernel_op import KernelOp, Sizes
from dsv4.ops.runtime.launch import Launch
from dsv4.ops.runtime.state import State

CTAS_PER_SM = 2  # of norms, and as many of keys of the window
WINDOW = tuple(arg.name for arg in required_of(ARGS))
_FORMATS = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class LatentRows(KernelOp):
    """Norm of query latents, keys of the window, and steps of compressors, in one launch."""

    name = "latent_rows"
    config = LatentRowsConfig
    args = ARGS
    kernels: ClassVar = dict.fromkeys(ARCHS, "dsv4.kernels.rows.latent_rows")
    early = (
        "weight", "query_weight", "ape", "entry_weight", "index_ape", "index_weight", "state_rows",
        "starts", "lens", "entry_slots", "rope", "positions", "slots",
    )  # fmt: skip

    def values(self, config: LatentRowsConfig) -> Mapping[str, int | str]:
        return values(config)

    def has_kernel(self, config: LatentRowsConfig) -> bool:
        return has_kernel(config)

    def plan(self, config: LatentRowsConfig, sizes: Sizes, device: Device) -> tuple[int, ...]:
        """Number of CTAs of a task of rows that run at a time."""
        return (CTAS_PER_SM * device.num_sms,)

    def needs(self, config: LatentRowsConfig, name: str) -> bool | None:
        return name in needed(config) or name in WINDOW

    def check_sizes(self, config: LatentRowsConfig, *tensors: Tensor | None) -> None:
        wanted = {*needed(config), *WINDOW}
        for arg, tensor in zip(self.tensors, tensors):
            if (arg.name in wanted) != (tensor is not None):
                has = "nothing" if tensor is None else "a tensor"
                wants = "the layer's tasks need one" if tensor is None else "no task takes one"
                raise ValueError(f"{arg.name}: got {has}, {wants}")
        given = self._given(*tensors)
        KV_INSERT.check_sizes(config.insertion, *(given[name] for name in WINDOW))
        for part, names in _compressions(config):
            COMPRESS.check_sizes(part, *_of_compressor(given, names))

    def make_launch(self, state: State) -> Launch:
        """The usual launch behind a check of what may be absent: the compiled function takes any
        number of rows there, and reads past the end of too few."""
        launch, place = super().make_launch(state), self.num_required
        rows = needed(state.config)
        # The runner's id stands between required tensors and optional ones.
        optional = [
            (place + 1 + i, arg.name, rows[arg.name])
            for i, arg in enumerate(self.tensors[place:])
            if arg.name in rows
        ]

        def checked(*arguments: Any) -> None:
            sizes = {"T": arguments[0].shape[0]}
            for i, name, size in optional:
                tensor = arguments[i] if i < len(arguments) else None
                found = 0 if tensor is None else tensor.shape[0]
                count = size if isinstance(size, int) else sizes.setdefault(size, found)
                if tensor is None or found != count:
                    got = "nothing" if tensor is None else f"{found} rows"
                    raise ValueError(f"{name}: got {got}, needs {count} rows")
            launch(*arguments)

        return checked

    def _given(self, *tensors: Tensor | None) -> dict[str, Tensor | None]:
        """The tensors of a call by the names of the table."""
        return dict(zip((arg.name for arg in self.tensors), tensors, strict=True))

    def torch(self, config: LatentRowsConfig, *tensors: Tensor | None) -> None:
        given = self._given(*tensors)
        KV_INSERT.torch(config.insertion, *(given[name] for name in WINDOW))
        if config.norm is not None:
            RMS_NORM_FP8.torch(config.norm, *(given[name] for name in QUERY))
        for part, names in _compressions(config):
            COMPRESS.torch(part, *_of_compressor(given, names))

    def probes(
        self, config: LatentRowsConfig, target: Device, device: torch.device
    ) -> Iterator[tuple[Tensor | int, ...]]:
        """One token of one request, no block of which ends."""
        dtypes, rows = self.values(config), needed(config)
        sizes = dict.fromkeys((name for arg in self.tensors for name in arg.shape), 1)
        tensors = [
            make.empty(arg, dtypes, sizes, device).zero_()
            if arg.name in rows or arg.name in WINDOW
            else make.absent(arg, dtypes, device)
            for arg in self.tensors
        ]
        yield (*tensors, *self.plan(config, sizes, target))

    def aot(self) -> Mapping[str, LatentRowsConfig]:
        """Layers of every kind of Flash and Pro, into either cache."""
        csa = {"ratio": 4, "overlap": True, "index_dim": 128}
        kinds = {"CSA": csa, "HCA": {"ratio": 128}, "SWA": {}}
        kinds |= {
            f"CSA, {keys} index keys": {**csa, "index_format": keys}
            for keys in INDEX_FORMATS
            if keys != MODEL_FORMAT
        }
        return {
            f"{model} {kind}, {kv_format}": LatentRowsConfig(
                512,
                MODEL_EPS,
                kv_format,
                query_dim=MODEL_DIMS[f"{model} q"],
                **{"index_format": MODEL_FORMAT, **fields},
            )
            for model in ("Flash", "Pro")
            for kind, fields in kinds.items()
            for kv_format in ("fp8", "bf16")
        }


def _compressions(config: LatentRowsConfig) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Configuration of each compressor of a layer, and the names of its tensors."""
    for part, names in ((config.compressor, COMPRESSOR), (config.indexer, INDEXER)):
        if part is not None:
            yield part, names


def _of_compressor(
    given: Mapping[str, Tensor | None], names: tuple[str, ...]
) -> list[Tensor | None]:
    """Arguments of `compress`, in its order."""
    *first, pool = names
    return [given[name] for name in (*first, "rope", *REQUESTS, pool)]


LATENT_ROWS = LatentRows()
_op = LATENT_ROWS.overload


class Compression(NamedTuple):
    """New tokens of a compressor, and the memory that it writes.

    Attributes:
        values, scores: [B, C, w] float32, projections of the new tokens; w is the channels of an
            entry, or twice as many where blocks overlap.
        ape: [m, w] float32, added to scores by position within the block of m tokens.
        state: [S, ring, 2, w] float32: values and biased scores of past tokens. Written.
        weight: [d] float32 of the norm.
        pool: [pages, P, ..] entries, or index keys. Written.
    """

    values: Tensor
    scores: Tensor
    ape: Tensor
    state: Tensor
    weight: Tensor
    pool: Tensor


class Requests(NamedTuple):
    """The B requests whose tokens a step's rows are.

    Attributes:
        state_rows: [B] int32, row of each in the states of compressors; another number: no tokens.
        starts, lens: [B] int32, position of the first new token, and new tokens.
        entry_slots: [B, K] int32, slots of the entries that end within the step, -1 of others. GPUs
            read all four while the launch before may still run: they must not be what a kernel with
            programmatic dependent launch just wrote.
    """

    state_rows: Tensor
    starts: Tensor
    lens: Tensor
    entry_slots: Tensor


def latent_rows(
    x: Tensor,
    weight: Tensor,
    rope: Tensor,
    positions: Tensor,
    slots: Tensor,
    pool: Tensor,
    *,
    eps: float,
    is_rounded: bool = True,
    uniform_scale: bool = False,
    query: Tensor | None = None,
    query_weight: Tensor | None = None,
    requests: Requests | None = None,
    entries: Compression | None = None,
    index_keys: Compression | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Take in a step's projections of a layer's input: norms, keys of the window, compression.

    In one launch what `kv_insert` does with `x`, `rms_norm_fp8` with `query`, and `compress` with
    `entries` and with `index_keys`, with their bits; where a layer has no such part, there is no
    such task. Tasks read nothing that another one writes. `kv_insert`, `rms_norm_fp8` and
    `compress` say what the results are.

    Args:
        x: [T, d] bfloat16; or float32, on GPUs too by the torch implementation: latents of the
            window's keys.
        weight, rope, positions, slots, pool, is_rounded, uniform_scale: as in `kv_insert`.
        eps: of all norms.
        query: [T, q] in the dtype of x: query latents; q is a multiple of 128 up to 16,384.
        query_weight: [q] float32.
        requests: of compressors; their tokens are no longer than T together with padding.
        entries: a compressor, which writes entries of d channels in the format of `pool`; means are
            rounded to the dtype of x.
        index_keys: that of the indexer, with the ratio of `entries`.

    Returns:
        (codes [T, q] float8_e4m3fn, scales [T, q / 128] float8_e8m0fnu, y [T, q]) of the query
        latents; None without `query`.

    Raises:
        ValueError, TypeError: an argument does not fit, or requires grad; the message names it.
    """
    given: dict[str, Tensor | None] = dict.fromkeys(arg.name for arg in LATENT_ROWS.tensors)
    given |= dict(zip(WINDOW, (x, weight, rope, positions, slots, pool)))
    given |= {"query": query, "query_weight": query_weight}
    given |= _tensors_of("requests", requests, Requests, REQUESTS)
    given |= _tensors_of("entries", entries, Compression, COMPRESSOR)
    given |= _tensors_of("index_keys", index_keys, Compression, INDEXER)
    try:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            LATENT_ROWS.check_no_gradients(*given.values())
        identity = latent_rows_runner_id(
            index(x.shape[1]),
            eps,
            _FORMATS.get(pool.dtype, "fp8"),
            is_rounded,
            uniform_scale,
            index(rope.shape[1]),
            0 if query is None else index(query.shape[1]),
            0 if entries is None else index(entries.ape.shape[0]),
            entries is not None and entries.ape.shape[1] != x.shape[1],
            _FORMATS.get(x.dtype, "bf16"),
            0 if index_keys is None else index(index_keys.weight.shape[0]),
            "fp8" if index_keys is None else _index_format(index_keys),
        )
        normalized = None
        if query is not None:
            normalized = _outputs(query)
            given |= dict(zip(QUERY[2:], normalized))
        first, rest = [given[name] for name in WINDOW], list(given.values())[len(WINDOW) :]
        _op(*first, identity, *rest)
    except Exception:
        LATENT_ROWS.explain(*given.values())
        for name in ("pool", *((COMPRESSOR[3], COMPRESSOR[5]) if entries is not None else ())):
            check_is_tensor(name, given[name])  # outputs, but no call makes them
        raise
    return normalized


def _index_format(keys: Compression) -> str:
    """Format of a pool of index keys."""
    dim, row = index(keys.weight.shape[0]), index(keys.pool.shape[2])
    return _FORMATS.get(keys.pool.dtype) or format_of(dim, row)


def _tensors_of(
    label: str, group: NamedTuple | None, kind: type, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """The tensors of an argument by the names of the table."""
    if group is None:
        return {}
    if not isinstance(group, kind):
        raise TypeError(f"{label}: got a {type(group).__name__}, needs a {kind.__name__}")
    for field, tensor in zip(group._fields, group):
        check_is_tensor(f"{label}.{field}", tensor)
    return dict(zip(names, group, strict=True))


def _outputs(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and values of normalised latents, not yet written."""
    count, width = query.shape
    return (
        torch.empty((count, width), dtype=torch.float8_e4m3fn, device=query.device),
        torch.empty((count, width // GROUP), dtype=torch.float8_e8m0fnu, device=query.device),
        torch.empty((count, width), dtype=query.dtype, device=query.device),
    )


@torch.compiler.assume_constant_result
def latent_rows_runner_id(
    dim: int,
    eps: float,
    kv_format: str = "fp8",
    is_rounded: bool = True,
    uniform_scale: bool = False,
    rope_dim: int = 64,
    query_dim: int = 0,
    ratio: int = 0,
    overlap: bool = False,
    latent: str = "bf16",
    index_dim: int = 0,
    index_format: str = "fp8",
) -> int:
    """Id of a configuration: what `torch.ops.dsv4.latent_rows` takes; see `LatentRowsConfig`."""
    return LATENT_ROWS.runner_id(
        dim, eps, kv_format, is_rounded, uniform_scale, rope_dim, query_dim, ratio, overlap, latent,
        index_dim, index_format,
    )  # fmt: skip
