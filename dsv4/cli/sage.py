"""`dsv4 sage`: one case of quantised attention, compared stage by stage, dumped, or read back."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4.cli.arguments import some_text
from dsv4.quoting import quoted

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4.testing.lowp import Case, Metrics

CASE = re.compile(r"b(\d+)_(causal|full)_seq(\d+)_d(\d+)")
FLASH_L1 = 0.06  # of outputs beside exact attention, heads without outliers
SAGE_L1 = 5e-4  # beside the reference on the same codes
RAW = ("sage_quant", "sage")  # outputs of other programs, by the names of their files
RAW_RMS = 1e-3  # beside another program's output on the same inputs
CALL_L1 = 2e-3  # of the operator beside its stages, which a kernel rounds in another order


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare `dsv4 sage`."""
    parser = subparsers.add_parser(
        "sage", help="quantised attention: a case, its stages, its dumps", description=__doc__
    )
    parser.add_argument(
        "--case",
        default="b1_causal_seq128_d64",
        help="bB_causal|full_seqL_dD (default: %(default)s)",
    )
    parser.add_argument("--heads", type=int, default=12, help="of queries (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=6, help="of keys (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default: %(default)s)")
    parser.add_argument(
        "--compare",
        choices=("sage", "flash"),
        default="sage",
        help="with the reference on the same codes, or with exact attention",
    )
    parser.add_argument("--qk", type=some_text, help="int8, fp8 or nvfp4")
    parser.add_argument("--pv", type=some_text, help="fp8, fp16 or nvfp4")
    parser.add_argument("--granularity", type=some_text, help="rows that share a scale")
    parser.add_argument("--pv-accum", type=some_text, help="accumulation of weighted values")
    for name in ("smooth-k", "smooth-v"):
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument(
        "--dump", type=some_text, metavar="PREFIX", help="write every stage to PREFIX.NAME.bin"
    )
    parser.add_argument(
        "--load", type=some_text, metavar="PREFIX", help="inputs, and stages to compare, of a dump"
    )
    parser.add_argument(
        "--iters",
        type=int,
        default=1,
        help="calls of the operator, all of which must have the same bits (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the operator is called; stages are the torch code's on the CPU",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compute and compare; status 1 when something is out of bounds."""
    import torch

    from dsv4.testing.lowp import make_inputs

    # Refused before a dump is written.
    if args.iters < 1:
        raise ValueError(f"--iters: got {args.iters}, needs at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: got cuda, needs a CUDA GPU, and PyTorch sees none")
    case = _case(args)
    inputs = make_inputs(case, args.seed)
    loaded: dict[str, Tensor] = {}
    if args.load:
        loaded, case = _load(Path(args.load), case)
        inputs = tuple(loaded.pop(name) for name in "qkv")
    found, config = _stages(case, *inputs)
    print(
        f"case: {case.batch} x {case.heads}/{case.key_heads} heads, {case.queries} queries, "
        f"{case.keys} keys, d {case.dim}; {config.qk} {config.qk_quant_gran}, {config.pv} "
        f"{config.pv_accum_dtype}, smooth_k {config.smooth_k}, smooth_v {config.smooth_v}"
    )
    found |= _outputs(case, config, inputs) if args.dump or loaded else {}
    if args.dump:
        _dump(Path(args.dump), args, dict(zip("qkv", inputs)) | found, config)
    is_right = all([_compare_stages(found, loaded), _compare_raw(found, loaded)])
    is_right = _compare_calls(args, case, inputs, found["o"]) and is_right
    metrics, bound = _compare(args.compare, case, config, inputs, found["o"])
    print(f"{args.compare}: {metrics} (L1 at most {bound})")
    return 0 if is_right and metrics.l1 <= bound else 1


def _case(args: argparse.Namespace) -> Case:
    from dsv4.testing.lowp import Case

    match = CASE.fullmatch(args.case)
    if match is None:
        raise ValueError(
            f"--case: got {quoted(args.case)}, needs bB_causal_seqL_dD or bB_full_seqL_dD"
        )
    batch, kind, rows, dim = match.groups()
    options: dict[str, Any] = {
        "qk": args.qk,
        "pv": args.pv,
        "qk_quant_gran": args.granularity,
        "pv_accum_dtype": args.pv_accum,
        "smooth_k": args.smooth_k,
        "smooth_v": args.smooth_v,
    }
    options = {name: value for name, value in options.items() if value is not None}
    if kind == "causal":
        options["is_causal"] = True
    sizes = (int(batch), args.heads, args.kv_heads, int(rows), int(rows), int(dim))
    if min(sizes) < 1 or args.heads % args.kv_heads:
        raise ValueError(
            f"--case: got sizes {sizes}, needs positive ones, and heads of whole groups"
        )
    return Case(*sizes, options=options)


def _load(prefix: Path, case: Case) -> tuple[dict[str, Tensor], Case]:
    """Arrays of a dump, and the case with their sizes."""
    from dataclasses import replace

    from dsv4.ops.quantized_attention import dump

    if not prefix.with_name(f"{prefix.name}.meta").exists():
        return _load_raw(prefix, case), case
    arrays, meta = dump.read(prefix)
    missing = [name for name in dump.INPUTS if name not in arrays]
    if missing:
        raise ValueError(f"--load: {prefix}.meta lists no {', '.join(missing)}")
    if "o" not in arrays:
        print(f"warning: {prefix} holds inputs alone; nothing of it is compared")
    (batch, heads, queries, dim), (_, key_heads, keys, _) = arrays["q"].shape, arrays["k"].shape
    sizes = {"batch": batch, "heads": heads, "key_heads": key_heads, "queries": queries}
    # What the dump was made with holds where the command says nothing else.
    made_with = {k: v for k, v in meta.get("options", {}).items() if k not in case.options}
    options = case.options | made_with
    return arrays, replace(case, **sizes, keys=keys, dim=dim, options=options)


def _load_raw(prefix: Path, case: Case) -> dict[str, Tensor]:
    """Buffers of another program without a description: q, k, v in float32 [B, H, S, d] of the
    case's sizes, and an output, which older programs wrote in the order [d, S, H, B]."""
    import torch

    from dsv4.ops import dshb_to_bhsd
    from dsv4.ops.quantized_attention.dump import load_buffer

    of_q = (case.batch, case.heads, case.queries, case.dim)
    of_k = (case.batch, case.key_heads, case.keys, case.dim)
    path = {name: prefix.with_name(f"{prefix.name}.{name}.bin") for name in (*"qkv", *RAW)}
    found = {name: load_buffer(path[name], of_q if name == "q" else of_k).half() for name in "qkv"}
    if path["sage_quant"].exists():
        return found | {"raw_quant": load_buffer(path["sage_quant"], of_q)}
    if path["sage"].exists():
        print(
            f"warning: {prefix} has no .sage_quant.bin; its .sage.bin is turned from "
            "channels first (heads first is off by 0.39 rms or more; write the dump again)"
        )
        flat = load_buffer(path["sage"], (1, 1, 1, torch.Size(of_q).numel())).flatten()
        found["raw"] = dshb_to_bhsd(flat, of_q)
    return found


def _outputs(case: Case, config: Any, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """What is dumped beside the stages: whole tiles of the inputs, the reference's output on the
    same codes, and exact attention."""
    from dsv4.ops.quantized_attention.dump import padded
    from dsv4.testing.lowp import expected, oracle

    exact = expected(case, *inputs)[0].float()
    return padded(config, *inputs) | {"sage_quant": oracle(config, *inputs)[0], "flash": exact}


def _stages(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[dict[str, Tensor], Any]:
    """Every stage by name, and the configuration."""
    from dataclasses import asdict

    from dsv4.kernels.lowp.config import QuantizedAttentionConfig
    from dsv4.ops import quantize_kv
    from dsv4.ops.quantized_attention.dump import stages

    options = {name: x for name, x in case.options.items() if name != "is_causal"}
    codes = quantize_kv(k, v, **options)
    causal = "top_left" if case.options.get("is_causal") else "none"
    config = QuantizedAttentionConfig(
        **asdict(codes.config), causal=causal, sm_scale=case.dim**-0.5
    )
    return stages(config, q, codes.codes), config


def _dump(prefix: Path, args: argparse.Namespace, arrays: dict[str, Tensor], config: Any) -> None:
    from dataclasses import asdict

    from dsv4.ops.quantized_attention import dump

    options = {name: getattr(config, name) for name in dump.OPTIONS}
    about = {"case": args.case, "seed": args.seed, "config": asdict(config), "options": options}
    about["options"]["is_causal"] = config.causal != "none"
    files = dump.write(prefix, arrays, about)
    print(f"wrote {len(files)} files, {prefix}.*")


def _compare_stages(found: dict[str, Tensor], loaded: dict[str, Tensor]) -> bool:
    """Print how far each stage is from the dump's; whether all are equal."""
    is_right = True
    for name, tensor in found.items():
        if name not in loaded:
            continue
        if tensor.shape != loaded[name].shape:
            print(f"{name}: shape {tuple(tensor.shape)}, the dump's is {tuple(loaded[name].shape)}")
            is_right = False
            continue
        off = (tensor.double() - loaded[name].double()).nan_to_num(0.0)
        worst = off.abs().max().item()
        print(f"{name}: max diff: {worst:g}, rms: {off.square().mean().sqrt().item():g}")
        is_right = is_right and worst == 0
    return is_right


def _compare_raw(found: dict[str, Tensor], loaded: dict[str, Tensor]) -> bool:
    """Print how far another program's output is; whether one of the same codes is close."""
    for name in ("raw_quant", "raw"):
        if name in loaded:
            rms = (found["o"].double() - loaded[name].double()).square().mean().sqrt().item()
            print(f"{RAW[name != 'raw_quant']} of the dump: rms: {rms:g} (at most {RAW_RMS})")
            return rms <= RAW_RMS or name == "raw"
    return True


def _compare_calls(
    args: argparse.Namespace, case: Case, inputs: tuple[Tensor, ...], wanted: Tensor
) -> bool:
    """Call the operator so many times, and print how far it is from its stages; whether all calls
    have the same bits and are close."""
    import torch

    from dsv4.ops import quantized_attention
    from dsv4.testing.lowp import Metrics

    moved = [x.to(args.device) for x in inputs]
    calls = [quantized_attention(*moved, **case.options).cpu() for _ in range(args.iters)]
    differ = sum(not torch.equal(out, calls[0]) for out in calls)
    metrics = Metrics.of(calls[0], wanted.to(calls[0].dtype))
    print(
        f"operator on {args.device}, {args.iters} calls: {differ} with other bits, {metrics} "
        f"(L1 at most {CALL_L1})"
    )
    return not differ and metrics.l1 <= CALL_L1


def _compare(
    how: str, case: Case, config: Any, inputs: tuple[Tensor, ...], out: Tensor
) -> tuple[Metrics, float]:
    """Metrics of an output beside what is asked for, and the bound on its L1."""
    from dsv4.testing.lowp import Metrics, expected, oracle

    if how == "sage":
        return Metrics.of(out, oracle(config, *inputs)[0]), SAGE_L1
    return Metrics.of(out, expected(case, *inputs)[0]), FLASH_L1
