"""`mhc_seam`: what lies between two sublayers of a model with hyper-connections, as function and
operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import index
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.arch import ARCHS
from dsv4.kernels.seam.args import ARGS, values
from dsv4.kernels.seam.config import (
    COUNTER_WORDS,
    GROUP,
    MAX_PARTS,
    PARTIAL_ROWS,
    SeamConfig,
    can_join,
    choose_parts,
    choose_pass,
    has_kernel,
    tiling_of,
)
from dsv4.ops.moe.rows import ExpertRows
from dsv4.ops.quantize import quantize_e4m3
from dsv4.ops.runtime import state as states
from dsv4.ops.runtime import tensors as make
from dsv4.ops.runtime.backend import Device
from dsv4.ops.runtime.checks import check_flag, check_is_tensor
from dsv4.ops.runtime.kernel_op import KernelOp, Sizes

MODEL_DIMS = {"Flash": 4096, "Pro": 7168}
MODEL_STREAMS = 4
MODEL_SINKHORN_ITERS = 20
MODEL_EPS = 1e-6
MODEL_TOP_K = 6
# Optional tensors that go together.
_OF_EXPANSION = ("post", "comb", "streams_out")
_OF_ROWS = ("rows", "ids", "counts")
_OF_MIXES = ("post_out", "comb_out")
_OF_CODES = ("codes", "scale_out")


class Seam(NamedTuple):
    """Results of `mhc_seam`, by T tokens.

    Attributes:
        x: [T, D], input of the next sublayer, normalised.
        streams: [T, n, D], with the last sublayer's output.
        post: [T, n] fp32, weight of the next sublayer's output in every stream; None of the head.
        comb: [T, n (source), n (target)] fp32, by all but the last passes of Sinkhorn's iteration,
            which the next `mhc_seam` runs; None of the head.
        codes: [T, D] float8_e4m3fn of x, or None.
        scales: [T, D / 128] float8_e8m0fnu, or None.
    """

    x: Tensor
    streams: Tensor
    post: Tensor | None
    comb: Tensor | None
    codes: Tensor | None
    scales: Tensor | None


class MhcSeam(KernelOp):
    """Hyper-connections between two sublayers, the norm, and FP8 codes."""

    name = "mhc_seam"
    config = SeamConfig
    args = ARGS
    kernels: ClassVar = dict.fromkeys(ARCHS, "dsv4.kernels.seam.seam")
    early = ("fn", "base", "scale", "norm_weight")
    guessed = ("comb",)

    def values(self, config: SeamConfig) -> Mapping[str, int | str]:
        return values(config)

    def has_kernel(self, config: SeamConfig) -> bool:
        return has_kernel(config)

    def plan(self, config: SeamConfig, sizes: Sizes, device: Device) -> tuple[int, ...]:
        """Clusters of a launch, tokens that each takes at a time; parts in place of clusters, and
        whether in one launch."""
        given = (tiling_of(config), sizes["T"], device.num_sms)
        return *choose_pass(*given), *choose_parts(*given)

    def workspace_size(self, config: SeamConfig, sizes: Sizes, scalars: tuple[int, ...]) -> int:
        """Counts, and sums by token and group of columns, where parts take them."""
        parts = scalars[2]
        return _workspace_size(config, sizes["T"]) if parts else 0

    def max_workspace_size(self, config: SeamConfig, rows: int, device: Device) -> int:
        return _workspace_size(config, rows) if has_kernel(config) else 0

    def probes(
        self, config: SeamConfig, target: Device, device: torch.device
    ) -> Iterator[tuple[Tensor | int, ...]]:
        """A token through clusters and parts, with all that the configuration reads and writes."""
        ways = [(0, 0), (1, 0), (1, 1)] if can_join(tiling_of(config)) else [(0, 0), (1, 0)]
        for way in ways:
            call = list(states.smallest_call(self, config, (1, 1, *way), device))
            for place, arg in enumerate(self.tensors):
                if arg.is_optional and self.needs(config, arg.name):
                    call[place] = make.empty(arg, self.values(config), {"T": 1}, device).zero_()
            yield tuple(call)

    def needs(self, config: SeamConfig, name: str) -> bool | None:
        if name in _OF_EXPANSION:
            return config.expands
        if name in _OF_ROWS:
            return config.top_k > 0
        if name == "y":
            return config.expands and config.top_k == 0
        return not config.is_head if name in _OF_MIXES else None

    def check_sizes(self, config: SeamConfig, *tensors: Tensor | None) -> None:
        """Check which optional tensors the configuration has."""
        given = dict(zip((arg.name for arg in self.tensors), tensors))
        has_codes = given["codes"] is not None or given["scale_out"] is not None
        for names, what in (
            (("y",), "y"),
            (_OF_EXPANSION, "y"),
            (_OF_ROWS, "rows of experts"),
            (_OF_MIXES, "post"),
            (_OF_CODES, "codes"),
        ):
            for name in names:
                needed = self.needs(config, name)
                is_needed = has_codes if needed is None else needed
                if is_needed and given[name] is None:
                    raise ValueError(f"{name}: got nothing, a seam with {what} needs it")
                if not is_needed and given[name] is not None:
                    raise ValueError(f"{name}: got a tensor, a seam without {what} has none")
        if given["codes"] is not None and config.dim % GROUP:
            raise ValueError(
                f"codes: D must be a multiple of {GROUP} to be quantised, got {config.dim}"
            )

    def torch(
        self,
        config: SeamConfig,
        streams: Tensor,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        norm_weight: Tensor,
        x: Tensor,
        y: Tensor | None,
        post: Tensor | None,
        comb: Tensor | None,
        rows: Tensor | None,
        ids: Tensor | None,
        counts: Tensor | None,
        streams_out: Tensor | None,
        post_out: Tensor | None,
        comb_out: Tensor | None,
        codes: Tensor | None,
        scale_out: Tensor | None,
    ) -> None:
        if config.top_k:
            y = ExpertRows(rows, ids, counts).sum()
        if config.expands:
            comb = iterated(comb, config.passes_left, config.eps)
            streams_out.copy_(expand(streams, y, post, comb))
            streams = streams_out
        projected = project(streams, fn, config.norm_eps)
        if config.is_head:
            pre = torch.sigmoid(projected * scale + base) + config.eps
        else:
            pre, new_post, new_comb = mix_weights(projected, base, scale, config)
            post_out.copy_(new_post)
            comb_out.copy_(new_comb)
        x.copy_(normalized(collapse(streams, pre), norm_weight, config.norm_eps))
        if codes is not None:
            new_codes, new_scales = quantize_e4m3(x, GROUP)
            codes.copy_(new_codes)
            scale_out.copy_(new_scales)

    def aot(self) -> Mapping[str, SeamConfig]:
        """Seams of Flash and Pro: at the first sublayer, behind attention, behind experts, and at
        the head, of a last layer's output or of streams that it is written to."""
        found = {}
        for label, dim in MODEL_DIMS.items():
            for kind, is_head, expands, top_k in (
                ("first", False, False, 0),
                ("seam", False, True, 0),
                ("seam of experts", False, True, MODEL_TOP_K),
                ("head", True, True, 0),
                ("head of streams", True, False, 0),
            ):
                sizes, options = (dim, MODEL_STREAMS), (MODEL_SINKHORN_ITERS, MODEL_EPS, MODEL_EPS)
                found[f"{label}, {kind}"] = SeamConfig(*sizes, is_head, expands, *options, top_k)
        return found


def _workspace_size(config: SeamConfig, tokens: int) -> int:
    sums = tokens * (config.dim // GROUP) * PARTIAL_ROWS
    return MAX_PARTS * COUNTER_WORDS + sums


MHC_SEAM = MhcSeam()
_op = MHC_SEAM.overload


def mhc_seam(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    *,
    eps: float,
    norm_eps: float,
    sinkhorn_iters: int = MODEL_SINKHORN_ITERS,
    y: Tensor | ExpertRows | None = None,
    post: Tensor | None = None,
    comb: Tensor | None = None,
    quantize: bool = False,
) -> Seam:
    """Write a sublayer's output to the streams and read the next one's input from them.

    With y: X'_k = post_k y + sum_j comb[j, k] X_j in fp32, rounded to the dtype of the streams;
    else X' = X. Then m = (fn X') / rms(X'), the streams one behind the other, and of m

        pre_j = sigmoid(m_j scale_0 + base_j) + eps
        post_k = 2 sigmoid(m_(n + k) scale_1 + base_(n + k))
        comb = Sinkhorn's iteration of m_(2n + nj + k) scale_2 + base_(2n + nj + k)

    and x = norm(sum_j pre_j X'_j), rounded before and after the norm. With n rows of fn, those of
    the head, there is pre alone. Technical report section 2.2; official inference/model.py, `Block`
    and `hc_split_sinkhorn`. The last `passes_left` passes of the iteration are those of the
    function that is given comb: a GPU runs them beside the launch before. A token's bits depend on
    that token alone.

    Args:
        streams: X [T, n, D] bfloat16; or float32, on GPUs too by the torch implementation. Tokens
            and streams start at multiples of 8 bytes.
        fn: [n (2 + n), n D] float32, or [n, n D] for the head. GPUs read it while the launch before
            may still run.
        base: float32, an element per row of fn.
        scale: [3] float32, or [1] for the head.
        norm_weight: [D] float32.
        eps: added to pre and to every denominator of comb; at least 1e-18.
        norm_eps: added to mean squares; at least 1e-18.
        sinkhorn_iters: normalisations of rows, the softmax among them, and of columns; half of
            them of comb that is given.
        y: [T, D], output of the sublayer before, in the dtype of the streams; or the rows of its
            experts, which are added and rounded to bfloat16 first, with the bits of `moe`.
        post, comb: [T, n] and [T, n, n] float32, what this function gave before that sublayer.
        quantize: also return FP8 codes of x, as `rms_norm_fp8` does.

    Raises:
        ValueError, TypeError: an argument does not fit, or requires grad; the message names it.
    """
    given = (streams, fn, base, scale, norm_weight)
    row, experts = (None, y) if isinstance(y, ExpertRows) else (y, (None, None, None))
    try:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            MHC_SEAM.check_no_gradients(*given, None, row, post, comb, *experts)
        tokens, num_streams, dim = streams.shape
        is_head, expands = fn.shape[0] == num_streams, y is not None
        top_k = 0 if row is y else index(y.ids.shape[1])
        options = (sinkhorn_iters, eps, norm_eps, top_k)
        identity = mhc_seam_runner_id(index(dim), index(num_streams), is_head, expands, *options)
        x = streams.new_empty((tokens, dim))
        written = streams.new_empty(streams.shape) if expands else None
        mixes: tuple[Tensor | None, Tensor | None] = (None, None)
        if not is_head:
            mixes = tuple(
                torch.empty(shape, dtype=torch.float32, device=streams.device)
                for shape in ((tokens, num_streams), (tokens, num_streams, num_streams))
            )
        codes = scales = None
        if quantize:
            codes = torch.empty((tokens, dim), dtype=torch.float8_e4m3fn, device=streams.device)
            scales = torch.empty(
                (tokens, -(-dim // GROUP)), dtype=torch.float8_e8m0fnu, device=streams.device
            )
        _op(*given, x, identity, row, post, comb, *experts, written, *mixes, codes, scales)
    except Exception:
        MHC_SEAM.explain(*given, None, row, post, comb, *experts)
        if row is not y:
            for name, tensor in zip(y._fields, y):
                check_is_tensor(name, tensor)
        check_flag("quantize", quantize)
        raise
    return Seam(x, written if expands else streams, *mixes, codes, scales)


@torch.compiler.assume_constant_result
def mhc_seam_runner_id(
    dim: int,
    num_streams: int,
    is_head: bool,
    expands: bool,
    sinkhorn_iters: int,
    eps: float,
    norm_eps: float,
    top_k: int = 0,
) -> int:
    """Id of a configuration, what `torch.ops.dsv4.mhc_seam` takes; see `SeamConfig`."""
    options = (sinkhorn_iters, eps, norm_eps, top_k)
    return MHC_SEAM.runner_id(dim, num_streams, is_head, expands, *options)


# ---- torch implementation ------------------------------------------------------------------------


def expand(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Streams [..., n, D] after a sublayer with output y [..., D]."""
    written = post.unsqueeze(-1) * y.float().unsqueeze(-2)
    kept = torch.matmul(comb.mT, streams.float())
    return (written + kept).to(streams.dtype)


def project(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """fn X / rms(X) of streams [..., n, D]: [..., rows of fn] fp32."""
    flat = streams.flatten(-2).float()
    inverse_rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    # One factor per token: after the product it costs rows(fn) multiplications, not n * D.
    return F.linear(flat, fn) * inverse_rms


def mix_weights(
    projected: Tensor, base: Tensor, scale: Tensor, config: SeamConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """pre [..., n], post [..., n] and comb [..., n, n], but for its last passes, of projections
    [..., n (2 + n)]."""
    n = config.num_streams
    pre, post, comb = projected.split([n, n, n * n], -1)
    pre_base, post_base, comb_base = base.split([n, n, n * n])
    pre_scale, post_scale, comb_scale = scale.unbind()
    pre = torch.sigmoid(pre * pre_scale + pre_base) + config.eps
    post = 2 * torch.sigmoid(post * post_scale + post_base)
    comb = (comb * comb_scale + comb_base).unflatten(-1, (n, n))
    return pre, post, sinkhorn(comb, config.sinkhorn_iters - config.passes_left, config.eps)


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """[..., source, target] by so many passes, the first one over rows a softmax."""
    comb = _tokens_last(logits).softmax(1).add_(eps)
    comb.div_(comb.sum(0, keepdim=True).add_(eps))
    return _passed(comb, iterations - 1, eps).reshape(logits.shape)


def iterated(comb: Tensor, passes: int, eps: float) -> Tensor:
    """comb [..., source, target] by more passes, over rows and over columns."""
    start = _tokens_last(comb).clone(memory_format=torch.contiguous_format)
    return _passed(start, passes, eps).reshape(comb.shape)


def _tokens_last(comb: Tensor) -> Tensor:
    """[source, target, token]: sums over 4 contiguous elements would defeat vectorisation."""
    return comb.flatten(0, -3).permute(1, 2, 0)


def _passed(comb: Tensor, passes: int, eps: float) -> Tensor:
    """[token, source, target] of [source, target, token], which is changed."""
    for _ in range(passes):
        comb.div_(comb.sum(1, keepdim=True).add_(eps))
        comb.div_(comb.sum(0, keepdim=True).add_(eps))
    return comb.permute(2, 0, 1)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """sum_j pre_j X_j of streams [..., n, D], in their dtype: [..., D]."""
    mixed = torch.matmul(pre.unsqueeze(-2), streams.float()).squeeze(-2)
    return mixed.to(streams.dtype)


def normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight in fp32, rounded once."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight).to(x.dtype)
