"""Dumps of a call: every stage as raw bytes under a prefix, with a JSON description.

`PREFIX.NAME.bin` is little-endian and row-major, heads before rows ("BHSd"); `PREFIX.meta` names
dtype, shape, order and checksum of each. A file that does not say what its description says is
refused, not reordered: a buffer of another order of dimensions has the same number of bytes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.kernels.lowp.config import QuantizedAttentionConfig
from dsv4.ops.quantized_attention import quantizers as q8
from dsv4.ops.quantized_attention.knobs import LOG, dump_prefixes, overrides, warn_once
from dsv4.ops.quantized_attention.layouts import heads_first
from dsv4.ops.quantized_attention.torch_path import attend
from dsv4.quoting import quoted

ORDER = "BHSd"
# Options that say how a dump was made.
OPTIONS = ("qk", "pv", "qk_quant_gran", "pv_accum_dtype", "smooth_k", "smooth_v")
INPUTS, OUTPUTS = ("q", "k", "v"), ("o", "lse")
CODES = ("q_codes", "q_scale", "k_codes", "k_scale")


def write(prefix: str | Path, arrays: Mapping[str, Tensor], about: Mapping[str, Any]) -> list[Path]:
    """Write arrays and their description; the files.

    Args:
        prefix: path whose last part the names of files begin with.
        arrays: by name.
        about: further entries of the description: knobs, seed, case.
    """
    prefix, described, files = Path(prefix), {}, []
    prefix.parent.mkdir(parents=True, exist_ok=True)
    for name, tensor in arrays.items():
        dense = tensor.detach().cpu().contiguous()
        data = dense.flatten().view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        path = prefix.with_name(f"{prefix.name}.{name}.bin")
        path.write_bytes(data)
        files.append(path)
        described[name] = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "order": ORDER,
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    meta = {**about, "arrays": described}
    path = prefix.with_name(f"{prefix.name}.meta")
    path.write_text(json.dumps(meta, indent=1) + "\n")
    return [*files, path]


def read(prefix: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Arrays and description of a dump.

    Raises:
        FileNotFoundError: there is no description, or one of its files.
        ValueError: a file is not what the description says.
    """
    prefix = Path(prefix)
    meta = json.loads(prefix.with_name(f"{prefix.name}.meta").read_text())
    found = {}
    for name, entry in meta["arrays"].items():
        path = prefix.with_name(f"{prefix.name}.{name}.bin")
        data = path.read_bytes()
        if entry["order"] != ORDER:
            raise ValueError(f"{path}: got order {quoted(entry['order'])}, needs {quoted(ORDER)}")
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise ValueError(f"{path}: got other bytes than its description was written for")
        dtype = getattr(torch, entry["dtype"])
        flat = (
            torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        )
        found[name] = flat.view(entry["shape"])
    return found, meta


def load_buffer(
    path: str | Path, shape: tuple[int, ...], strides: tuple[int, ...] | None = None
) -> Tensor:
    """A float32 buffer without description, as other programs dump them, as [B, H, S, d].

    Raises:
        ValueError: another number of elements; or strides, in elements, of another order.
    """
    flat = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.float32)
    tensor = torch.empty(shape, device="meta")
    if flat.numel() != tensor.numel():
        raise ValueError(f"{path}: got {flat.numel()} elements, {shape} has {tensor.numel()}")
    if strides is not None and tuple(strides) != tensor.stride():
        raise ValueError(
            f"{path}: got strides {tuple(strides)}, {ORDER} of {shape} has {tensor.stride()}"
        )
    return flat.view(shape)


def stages(
    config: QuantizedAttentionConfig,
    queries: Tensor,
    codes: Mapping[str, Tensor | None],
    attn_mask: Tensor | None = None,
) -> dict[str, Tensor]:
    """Every stage of a call by name, from queries [b, Hq, L, d] and codes.

    `s_raw` products of codes, `s` scores in units of log2, `p` weights, `p_codes` as the second
    product gets them, `m` and `d` running maxima and sums by tile, `o_tile` weighted values of a
    tile [b, Hq, tiles, L, dp], `o_sum` the sum of all, `o`, `lse`; `q_mean` and `delta_s` of
    smoothed queries.
    """
    given = {name: tensor for name, tensor in codes.items() if tensor is not None}
    found = dict(given)
    attend(config, queries, given, attn_mask, found)
    return {name: tensor for name, tensor in found.items() if tensor.numel()}


def padded(config: QuantizedAttentionConfig, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Inputs [b, H, rows, d] as whole tiles of the codes' channels, behind which are zeros, by
    name; and FP8 values transposed, in the order of their codes, `v_tp`."""
    tiles, found = config.tiles, {}
    for name, x, rows in zip(INPUTS, (q, k, v), (tiles.block_q, tiles.block_k, tiles.block_k)):
        wide = F.pad(x, (0, config.padded_dim - x.shape[-1]))
        found[f"{name}_pad"] = q8.pad_rows(wide, rows)
    if config.pv == "fp8":
        found["v_tp"] = q8.in_v_order(found["v_pad"]).transpose(-1, -2)
    return found


def write_dumps(
    config: QuantizedAttentionConfig,
    inputs: tuple[Tensor | None, ...],
    tensor_layout: str,
    queries: Tensor,
    codes: Any,
    attn_mask: Tensor | None,
    out: Tensor,
) -> None:
    """Write and report what the environment asks for of one call; inputs in the order of dumps,
    whatever layout they came in."""
    given = zip(INPUTS, inputs)
    found = {name: heads_first(x, tensor_layout) for name, x in given if x is not None}
    if config.is_varlen:
        warn_once("packed sequences: dumps have inputs and outputs alone, no stage is reported")
    else:
        found |= stages(config, queries, codes.codes, attn_mask)
        if "k" in found:
            found |= padded(config, *(found[name] for name in INPUTS))
    found["o"] = out
    about = {
        "config": asdict(config),
        "overrides": {name: str(value) for name, value in overrides().items()},
    }
    chosen = {"dump": tuple(found), "dump_qkv": INPUTS, "dump_codes": CODES, "dump_out": OUTPUTS}
    for what, prefix in dump_prefixes().items():
        if what in chosen:
            write(prefix, {name: found[name] for name in chosen[what] if name in found}, about)
    if not config.is_varlen:
        _write_sample(found, about)
        _report_tiles(found)


SAMPLED_ROWS, WARP_ROWS = 64, 16  # queries of a sample: of a block, or of a warp of it
OF_QUERIES = (
    *("q", "q_pad", "q_codes", "q_scale", "q_mean", "delta_s", "s_raw", "s", "p", "p_codes", "m"),
    *("d", "o_tile", "o_sum", "o", "lse"),
)
_samples, _lines = itertools.count(), itertools.count()


def _sampled(found: Mapping[str, Tensor]) -> tuple[int, slice]:
    """Head and queries that the environment chooses: ValueError where there are none."""
    given = overrides()
    head, block, warp = (given.get(f"sample_{name}", 0) for name in ("head", "block", "warp"))
    heads, queries = found["s"].shape[1:3]
    first, size = block * SAMPLED_ROWS, SAMPLED_ROWS
    if "sample_warp" in given:
        first, size = first + warp * WARP_ROWS, WARP_ROWS
    if head >= heads or first >= queries or warp >= SAMPLED_ROWS // WARP_ROWS:
        raise ValueError(
            f"DSV4_SAGE_SAMPLE_HEAD, _BLOCK, _WARP: got {head}, {block} and {warp}, there are none"
        )
    return head, slice(first, first + size)


def _write_sample(found: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write the stages of some queries of one head of all sequences, and of its keys."""
    given = overrides()
    if "sample" not in given or next(_samples) >= given.get("sample_limit", 1):
        return
    head, rows = _sampled(found)
    heads, keys = found["s"].shape[1], found["k_codes"].shape[1]
    part = {}
    for name, x in found.items():
        if name not in OF_QUERIES:
            part[name] = x[:, head * keys // heads]
        elif name in ("q_scale", "q_mean"):
            part[name] = x[:, head]
        elif name == "o_tile":
            part[name] = x[:, head, :, rows]
        else:
            part[name] = x[:, head, rows]
    write(given["sample"], part, {**about, "head": head, "first_query": rows.start})


def _report_tiles(found: Mapping[str, Tensor]) -> None:
    """Say what running maxima and sums of the sampled queries are after each tile of keys, as the
    torch code finds them from the call's codes."""
    given = overrides()
    tiles = min(given.get("report_tiles", 0), found["m"].shape[-1])
    if not tiles:
        return
    head, rows = _sampled(found)
    for tile in range(tiles):
        if next(_lines) >= given.get("report_limit", 256):
            return
        (low, high), (least, most) = (
            found[name][:, head, rows, tile].aminmax() for name in ("m", "d")
        )
        LOG.warning(
            "head %d, queries from %d, tile %d: m %g to %g, d %g to %g",
            head, rows.start, tile, low, high, least, most,
        )  # fmt: skip


def report_scales(codes: Mapping[str, Tensor | None]) -> None:
    """Say between what numbers the scales of keys and values lie, which synchronises."""
    for name in ("k_scale", "v_scale"):
        scale = codes.get(name)
        if scale is not None and scale.numel():
            low, high = scale.float().aminmax()
            zeros = int((scale.float() == 0).sum())
            LOG.warning("%s: %g to %g, %d of %d are 0", name, low, high, zeros, scale.numel())
