"""`moe`: router, routed experts and the shared expert of a layer, as function and operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import index
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.kernels.moe import plan as plans
from dsv4.kernels.moe.config import BF16_DTYPES, FOLDED_FORMS, K_BLOCK
from dsv4.kernels.moe.layer_args import ARGS, values
from dsv4.kernels.moe.layer_config import MoeConfig
from dsv4.kernels.moe.routing import COUNTER_WORDS, MAX_TOKENS, MOST_ROUTED, gate_tiling
from dsv4.kernels.moe.scratch import scratch_bytes
from dsv4.kernels.moe.sm100 import plan as blackwell_plans
from dsv4.ops.aliasing import check_given
from dsv4.ops.moe.checks import check_choice, check_codes, check_kinds, check_plain, check_rows
from dsv4.ops.moe.rows import ExpertRows, rows_in
from dsv4.ops.moe.torch_path import (
    MAX_GATHERED_TOKENS,
    MAX_UNSYNCHRONISED,
    Gated,
    route,
    routed_experts,
)
from dsv4.ops.moe.weights import MATRICES, GatedWeights, block_scale_dtype
from dsv4.ops.runtime.backend import Device, find_kernel
from dsv4.ops.runtime.checks import check_are_tensors, check_flag, check_ranks
from dsv4.ops.runtime.kernel_op import KernelOp, Sizes
from dsv4.ops.runtime.runner import config_of
from dsv4.quoting import quoted

# Layers of the released models.
MODEL_LAYERS = {
    "Flash": MoeConfig(4096, 2048, 256, 6, scaling=1.5),
    "Pro": MoeConfig(7168, 3072, 384, 6, scaling=2.5),
}


# Layers of other releases: Flash-Base's experts in FP8, NVIDIA's in NVFP4.
OTHER_LAYERS = {
    "Flash-Base": replace(MODEL_LAYERS["Flash"], expert_dtype="fp8", scale_dtype="float32"),
    "Flash-NVFP4": replace(MODEL_LAYERS["Flash"], expert_dtype="nvfp4"),
    "Pro-NVFP4": replace(MODEL_LAYERS["Pro"], expert_dtype="nvfp4"),
}
# Tilings of an architecture, and which one a launch takes.
PLANS = {"sm_90a": plans, "sm_100a": blackwell_plans, "sm_103a": blackwell_plans}
# Orders of prepared weights that the kernels of an architecture read.
FORMS = {"sm_90a": (*FOLDED_FORMS, "raw"), "sm_100a": ("tiled",), "sm_103a": ("tiled",)}


class Moe(KernelOp):
    """Routed experts, chosen and weighed by scores or a table, plus one that every token passes."""

    name = "moe"
    config = MoeConfig
    args = ARGS
    kernels: ClassVar = {
        "sm_90a": "dsv4.kernels.moe.sm90.layer",
        "sm_100a": "dsv4.kernels.moe.sm100.layer",
        "sm_103a": "dsv4.kernels.moe.sm100.layer",
    }
    early = (
        "gate",
        "bias",
        *(
            f"{prefix}{name}{suffix}"
            for prefix in ("", "shared_")
            for name in MATRICES
            for suffix in ("", "_scale")
        ),
        "global_scales",
    )

    def values(self, config: MoeConfig) -> Mapping[str, int | str]:
        return values(config)

    def has_kernel(self, config: MoeConfig) -> bool:
        return not config.why_no_kernel

    def serves(self, config: MoeConfig, arch: str) -> bool:
        """Products in bf16 are Hopper's, NVFP4 activations Blackwell's, whose kernels for them take
        a shared expert with E8M0 scales."""
        if arch == "sm_90a" or config.expert_dtype not in BF16_DTYPES:
            return True
        return config.rounds_to_nvfp4 and config.scale_dtype == "float8_e8m0fnu"

    def compiled_config(self, config: MoeConfig, arch: str) -> MoeConfig:
        """The configuration, whether it adds rows or not; refuses weights in an order that no
        kernel reads."""
        if config.form == "released":
            raise ValueError(
                "w1: got weights in the order of checkpoints (form 'released'), the kernels need "
                "them prepared: dsv4.ops.moe.weights.prepare_"
            )
        if config.form not in FORMS[arch]:
            raise ValueError(
                f"w1: got weights prepared as {quoted(config.form)}, the kernels of {arch} need "
                f"{' or '.join(map(repr, FORMS[arch]))}: dsv4.ops.moe.weights.prepare_"
            )
        return replace(config, combines=True)

    def plan(self, config: MoeConfig, sizes: Sizes, device: Device) -> tuple[int, ...]:
        """Tilings of both families of launches; refuses what the kernels would read wrongly."""
        tokens = sizes["T"]
        check_choice(
            config, tokens, 0 if config.has_router_bias else sizes["Eb"], sizes["V"], sizes["S"]
        )
        if tokens > MAX_TOKENS:
            raise ValueError(f"x: got {tokens} tokens, needs at most {MAX_TOKENS}")
        check_plain(
            w1_scale=sizes.get("Es", 0),
            shared_w1_scale=sizes.get("i", 0),
            shared_w2_scale=sizes.get("d2", 0),
        )
        needed = scratch_bytes(config, tokens)
        if sizes["bytes"] < needed:
            raise ValueError(f"scratch: got {sizes['bytes']} bytes, needs {needed}")
        tiling = PLANS[device.arch].choose(config.kernels, tokens, config.experts)
        return self.scalars(config, tokens, tiling, device)

    @staticmethod
    def scalars(config: MoeConfig, tokens: int, tiling: int, device: Device) -> tuple[int, ...]:
        """Scalars of a launch with one of the experts' tilings."""
        group_tokens = PLANS[device.arch].tilings(config.kernels)[tiling].tokens
        combines = int(config.combines)
        return tiling, *gate_tiling(config.routing, tokens), group_tokens, device.num_sms, combines

    def probes(
        self, config: MoeConfig, target: Device, device: torch.device
    ) -> Iterator[tuple[Tensor | int, ...]]:
        """A padding token through every tiling: it reads no routed expert, so that one stands for
        all of them."""
        dims = {name: size for name, size in values(config).items() if isinstance(size, int)}
        sizes = {"T": 1, "V": 1, "S": 1, "N": 0, "Eb": 0, "Es": 0, "i": 0, "d2": 0}
        sizes["bytes"] = scratch_bytes(config, 1)
        if not config.is_hashed:
            sizes |= {"V": 0, "S": 0}
        tensors = []
        for arg in self.tensors[: self.num_required]:
            shape = [dims.get(name, sizes.get(name)) for name in arg.shape]
            is_stacked = arg.shape[0] in ("E", "Es") and len(shape) == 3
            made = shape if not is_stacked else [1, *shape[1:]]
            dtype = getattr(torch, arg.dtype_in(values(config)))
            tensors.append(torch.zeros(made, dtype=dtype, device=device).expand(shape))
        live = torch.zeros(1, dtype=torch.int32, device=device)
        counter = torch.zeros(COUNTER_WORDS, dtype=torch.float32, device=device)
        blocks = config.hidden // K_BLOCK
        for rows in (0, 1):
            codes = live.new_zeros((rows, config.hidden), dtype=torch.float8_e4m3fn)
            scale = live.new_zeros((rows, blocks), dtype=torch.float8_e8m0fnu)
            for tiling in range(len(PLANS[target.arch].tilings(config.kernels)) if not rows else 1):
                scalars = self.scalars(config, 1, tiling, target)
                yield (*tensors, live, codes, scale, counter, *scalars)

    def workspace_size(self, config: MoeConfig, sizes: Sizes, scalars: tuple[int, ...]) -> int:
        """Counters of few tokens' launches."""
        return COUNTER_WORDS if sizes["T"] <= MOST_ROUTED else 0

    def max_workspace_size(self, config: MoeConfig, rows: int, device: Device) -> int:
        return COUNTER_WORDS

    def warmup_hint(self, config: MoeConfig) -> str:
        return "run the layer once"

    def check_sizes(self, config: MoeConfig, *tensors: Tensor | None) -> None:
        given = {arg.name: tensor for arg, tensor in zip(self.tensors, tensors)}
        rows = {name: len(tensor) for name, tensor in given.items() if tensor is not None}
        check_choice(config, rows["x"], rows["bias"], rows["table"], rows["input_ids"])
        for dtype, prefix in ((config.expert_dtype, ""), (config.shared_dtype, "shared_")):
            if dtype == "bfloat16":
                names = [f"{prefix}{matrix}_scale" for matrix in MATRICES]
                check_plain(**{name: rows[name] for name in names})
        if config.expert_dtype == "nvfp4" and rows["global_scales"] not in (3, 6):
            raise ValueError(f"global_scales: got {rows['global_scales']} rows, needs 3, or 6")
        check_codes(given["x_codes"], given["x_scale"])
        live = given["live_tokens"]
        if live is not None and len(live) > 1:
            raise ValueError(f"live_tokens: got {len(live)} numbers, needs one")

    def torch(self, config: MoeConfig, *tensors: Tensor | None) -> None:
        given = dict(zip((arg.name for arg in self.tensors), tensors))
        x, out = given["x"], given["out"]
        hashed = {"table": given["table"], "input_ids": given["input_ids"]}
        ids, weights = route(
            x, given["gate"], top_k=config.top_k, scaling=config.scaling,
            **(hashed if config.is_hashed else {"bias": given["bias"]}),
        )  # fmt: skip
        live = None
        if given["live_tokens"] is not None and given["live_tokens"].numel():
            live = torch.arange(len(x), device=x.device) < given["live_tokens"]
            ids = torch.where(live[:, None], ids, -1)
        routed, shared = (
            Gated(config, _weights(config, given, prefix), dtype)
            for prefix, dtype in (("", config.expert_dtype), ("shared_", config.shared_dtype))
        )
        total = routed_experts(routed, x, ids, weights, is_static(x))
        total += shared(x, None, None).float()
        out.copy_(total if live is None else torch.where(live[:, None], total, 0.0))

    def aot(self) -> Mapping[str, MoeConfig]:
        """Those of Hopper."""
        return self.aot_for("sm_90a")

    def aot_for(self, arch: str) -> Mapping[str, MoeConfig]:
        """Layers of Flash and Pro, by scores and by token id, in the forms that scales of released
        FP4 weights may have; and those in other formats that the architecture has kernels for."""
        found, forms = {}, [form for form in FORMS[arch] if form != "raw"]
        for model, sizes in MODEL_LAYERS.items():
            for form in forms:
                suffix = ", row by row" if form == "row_packed" else ""
                for is_hashed, kind in ((False, "scores"), (True, "token ids")):
                    config = replace(sizes, form=form, is_hashed=is_hashed)
                    found[f"{model}, {kind}{suffix}"] = config
        for model, sizes in OTHER_LAYERS.items():
            config = replace(sizes, form=forms[0])
            if self.serves(config, arch):
                found[f"{model}, scores"] = config
        return found


MOE = Moe()
_op = MOE.overload


def is_static(x: Tensor) -> bool:
    """Whether the torch implementation must not read the routing back, or need not."""
    if x.is_cuda:
        return x.shape[0] <= MAX_UNSYNCHRONISED or torch.cuda.is_current_stream_capturing()
    return x.shape[0] <= MAX_GATHERED_TOKENS


def _weights(config: MoeConfig, given: Mapping[str, Tensor], prefix: str) -> GatedWeights:
    """The weights of a call, None for what has no elements."""
    codes = [given[f"{prefix}{name}"] for name in ("w1", "w3", "w2")]
    scales = [given[f"{prefix}{name}_scale"] for name in ("w1", "w3", "w2")]
    has_global = config.expert_dtype == "nvfp4" and not prefix
    return GatedWeights(
        *codes,
        *(scale if scale.numel() else None for scale in scales),
        given["global_scales"] if has_global else None,
    )


def moe(
    x: Tensor,
    gate: Tensor,
    experts: GatedWeights,
    shared: GatedWeights,
    *,
    top_k: int,
    scaling: float,
    limit: float,
    form: str = "released",
    block: tuple[int, int] = (128, 128),
    bias: Tensor | None = None,
    table: Tensor | None = None,
    input_ids: Tensor | None = None,
    live_tokens: Tensor | None = None,
    x_codes: Tensor | None = None,
    x_scale: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    combine: bool = True,
) -> Tensor | ExpertRows:
    """Send T tokens through k routed experts each and the one that all share.

    A token's experts are the k best by score + bias, where a score is sqrt(softplus(gate x)) in
    fp32, the lower id of equals and NaN last; or those that `table` lists for its id, where ids out
    of range are no experts. Their weights are the scores, normalised to a sum of `scaling`: where a
    chosen score is not finite, or all of them are 0, some are NaN, and so is that token's result,
    no other one's. An expert is w2(h), h = silu(min(w1 x, limit)) * clamp(w3 x, -limit, limit) *
    weight, and the shared one has no weight. FP8 and FP4 experts round x and h to e4m3 with one
    power-of-two scale per 128 elements; NVFP4 ones whose `global_scales` have those of inputs round
    both to NVFP4, x with the largest scale of all experts (`quantize_nvfp4`); other NVFP4 ones
    (W4A16) and bf16 ones round neither. A token's results are added in fp32 in ascending order of
    experts, then the shared one's: where kernels run, its bits depend on neither T nor the other
    tokens.

    Args:
        x: [T, D] bfloat16; or float32, on GPUs too by the torch implementation.
        gate: [E, D] bfloat16 or float32.
        experts: E stacked units. Kernels take FP4 and FP8 with one scale per 128 x 128, and NVFP4,
            those of Blackwell with scales of inputs (beside a shared one with E8M0 scales), those
            of Hopper without, and bf16, too; prepared (`dsv4.ops.moe.weights.prepare_`); else torch
            runs.
        shared: one unit, without the leading dimension, prepared where `experts` are; FP8, or bf16
            beside bf16 ones.
        top_k: k.
        scaling: sum of a token's weights.
        limit: of gate and up.
        form: "released", or what the weights were prepared as: "packed", "row_packed" or "raw" for
            Hopper, where other weights than FP4 are "packed"; "tiled" for Blackwell.
        block: rows and columns of FP8 scales.
        bias: [E] float32; where scores choose.
        table: [V, k] int64, and
        input_ids: [T] int64; where a table does.
        live_tokens: [1] int32: only the first so many tokens are real. Rows of padding may hold
            anything, and their results are 0.
        x_codes: [T, D] float8_e4m3fn, and
        x_scale: [T, D / 128] float8_e8m0fnu: x as `quantize_e4m3` rounds it, where that is known.
            Up to 256 tokens, Hopper's kernels of FP4 and FP8 experts then spare a launch; nothing
            else looks at them.
        out: [T, D] to write into; default a new tensor.
        out_dtype: bfloat16 or float32; default that of `out`, else of x.
        combine: False where the reader takes rows, too: kernels then leave the last sum to it.

    Returns:
        [T, D]; or, without `combine`, where kernels run and `out` is not given, the rows of each
        token, which `mhc_seam` adds with the same bits.

    Raises:
        ValueError, TypeError: an argument does not fit, or requires grad; the message names it.
    """
    check_kinds(x, experts, shared, block)
    given = [x, gate, bias, *_interleaved(experts), experts.global_scales, *_interleaved(shared)]
    if x.is_cuda and x.dim() == 2 and x.shape[0] > MAX_TOKENS:
        options = {
            "top_k": top_k, "scaling": scaling, "limit": limit, "form": form, "block": block,
            "bias": bias, "table": table,
        }  # fmt: skip
        check_codes(x_codes, x_scale)
        rows = {"input_ids": input_ids, "x_codes": x_codes, "x_scale": x_scale, "out": out}
        check_rows(len(x), rows)
        if out is not None:
            check_given(MOE, *given, table, input_ids, out)
        tensors = (x, gate, experts, shared, input_ids, live_tokens, out, out_dtype)
        return _in_parts(*tensors, options)
    try:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            MOE.check_no_gradients(*given, table, input_ids, out)
        tokens, hidden = x.shape
        count, inner = experts.w1.shape[:2]
        dtype = (x.dtype if out is None else out.dtype) if out_dtype is None else out_dtype
        scale = shared.w1_scale if shared.w1_scale is not None else experts.w1_scale
        fields = (
            index(hidden), index(inner), index(count), top_k, experts.dtype_name,
            shared.dtype_name, dtype_name(gate.dtype), block_scale_dtype(scale), *block,
            form, table is not None, scaling, limit, dtype_name(dtype),
        )  # fmt: skip
        identity = moe_runner_id(*fields)
        config = config_of(MOE, identity)
        leaves_rows = not combine and out is None and dtype == torch.bfloat16 == x.dtype
        leaves_rows = leaves_rows and _served_by(config, x) is not None
        if leaves_rows:
            identity = moe_runner_id(*fields, False)
        filled = _filled(given, config, x.device)
        if table is None:
            table = _empty((0, config.top_k), torch.int64, x.device)
        if input_ids is None:
            input_ids = _empty((0,), torch.int64, x.device)
        if out is None:
            out = torch.empty((tokens, hidden), dtype=dtype, device=x.device)
        else:
            check_given(MOE, *filled, table, input_ids, out)
        check_codes(x_codes, x_scale)
        needed = scratch_bytes(config, tokens) if x.is_cuda and MOE.has_kernel(config) else 0
        scratch = _empty((needed,), torch.uint8, x.device)
        _op(*filled, table, input_ids, out, scratch, identity, live_tokens, x_codes, x_scale)
    except Exception:
        _explain(*given, table, input_ids, out, None, live_tokens, x_codes, x_scale)
        check_flag("combine", combine)
        raise
    return rows_in(scratch, config, tokens) if leaves_rows else out


@torch.compiler.assume_constant_result
def moe_runner_id(*fields: int | float | bool | str) -> int:
    """Id of a configuration, what `torch.ops.dsv4.moe` takes.

    Args:
        fields: of `MoeConfig`, in order.
    """
    return MOE.runner_id(*fields)


def _in_parts(
    x: Tensor,
    gate: Tensor,
    experts: GatedWeights,
    shared: GatedWeights,
    input_ids: Tensor | None,
    live_tokens: Tensor | None,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    options: dict,
) -> Tensor:
    """More tokens than a launch takes, one launch after the other; arguments have all rows."""
    if out is None:
        dtype = x.dtype if out_dtype is None else out_dtype
        out = x.new_empty(x.shape, dtype=getattr(torch, dtype_name(dtype)))
    for begin in range(0, x.shape[0], MAX_TOKENS):
        part = slice(begin, begin + MAX_TOKENS)
        moe(
            x[part], gate, experts, shared, out=out[part], out_dtype=out_dtype,
            input_ids=None if input_ids is None else input_ids[part],
            live_tokens=None if live_tokens is None else live_tokens - begin, **options,
        )  # fmt: skip
    return out


def _explain(*tensors: object) -> None:
    """Name the argument of a failed call that is of the wrong type or rank."""
    given = [
        (arg, tensor)
        for arg, tensor in zip(MOE.tensors, tensors)
        if tensor is not None or arg.name in ("x", "gate")
    ]
    args, found = zip(*given)
    check_are_tensors(args, found)
    check_ranks(args, found)


def _interleaved(weights: GatedWeights) -> list[Tensor | None]:
    """w1 and its scale, w3 and its scale, w2 and its scale."""
    return [tensor for pair in zip(weights.codes, weights.scales) for tensor in pair]


def _filled(given: list, config: MoeConfig, device: torch.device) -> list[Tensor]:
    """The first tensors of a call; what is None becomes a tensor without rows."""
    dims = values(config)
    found = []
    for arg, tensor in zip(MOE.tensors, given):
        if tensor is None:
            shape = (0, *(int(dims[name]) for name in arg.shape[1:]))
            tensor = _empty(shape, getattr(torch, arg.dtype_in(dims)), device)
        found.append(tensor)
    return found


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def dtype_name(dtype: torch.dtype) -> str:
    """As configurations call it."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"out_dtype: got {quoted(dtype)}, needs a torch.dtype")
    return str(dtype).removeprefix("torch.")


def _served_by(config: MoeConfig, tensor: Tensor) -> Device | None:
    """The tensor's device, where it has kernels for the configuration."""
    device = kernel_device(tensor) if MOE.has_kernel(config) else None
    return device if device is not None and MOE.serves(config, device.arch) else None


def kernel_device(tensor: Tensor) -> Device | None:
    """The tensor's device, where there are kernels for it."""
    return find_kernel(MOE.name, MOE.kernels, tensor.get_device()) if tensor.is_cuda else None
