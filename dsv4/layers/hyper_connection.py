"""Manifold-constrained hyper-connections (mHC): the residual state is several streams per token.

A sublayer reads one mixture of the streams (`collapse`) and writes back to all of them (`expand`).
All of it is fp32 inside; the streams [..., hc, D] are in the model dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsv4.layers.module import empty_parameter

if TYPE_CHECKING:
    from dsv4.config.model_config import ModelConfig


class Mix(NamedTuple):
    """State that `collapse` leaves for `expand`.

    Attributes:
        streams: [..., hc, D], before the sublayer.
        post: [..., hc] fp32, weight of the sublayer's output in every stream.
        comb: [..., hc (source), hc (target)] fp32, doubly stochastic.
    """

    streams: Tensor
    post: Tensor
    comb: Tensor


@dataclass(frozen=True)
class HyperConnection:
    """The arithmetic of mHC; its parameters belong to the layers, under the checkpoint's names.

    Attributes:
        mult: streams, hc.
        sinkhorn_iters: row and column normalisations of the mixing matrix.
        eps: added to `pre` and to every denominator.
        norm_eps: of the RMS over all streams.
    """

    mult: int
    sinkhorn_iters: int
    eps: float
    norm_eps: float

    @classmethod
    def of(cls, config: ModelConfig) -> HyperConnection:
        """Return the arithmetic of a model."""
        return cls(config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps)

    def start(self, x: Tensor) -> Tensor:
        """Return the initial streams of an embedding: [..., D] -> [..., hc, D], all equal."""
        return x.unsqueeze(-2).expand(*x.shape[:-1], self.mult, x.shape[-1])

    def collapse(self, streams: Tensor, parameters: HyperParameters) -> tuple[Tensor, Mix]:
        """Mix the streams into a sublayer's input.

        Args:
            streams: [..., hc, D].
            parameters: of a sublayer: rows hc (pre), hc (post), hc * hc (source-major comb).

        Returns:
            [..., D] in the dtype of `streams`, and what `expand` needs.
        """
        hc = self.mult
        pre, post, comb = self._project(streams, parameters.fn).split([hc, hc, hc * hc], -1)
        pre_base, post_base, comb_base = parameters.base.split([hc, hc, hc * hc])
        pre_scale, post_scale, comb_scale = parameters.scale.unbind()
        pre = torch.sigmoid(pre * pre_scale + pre_base) + self.eps
        post = 2 * torch.sigmoid(post * post_scale + post_base)
        comb = (comb * comb_scale + comb_base).unflatten(-1, (hc, hc))
        return _weighted_sum(pre, streams), Mix(streams, post, self._sinkhorn(comb))

    def expand(self, y: Tensor, mix: Mix) -> Tensor:
        """Return the streams after a sublayer with output `y` [..., D]."""
        written = mix.post.unsqueeze(-1) * y.float().unsqueeze(-2)
        kept = torch.matmul(mix.comb.mT, mix.streams.float())
        return (written + kept).to(mix.streams.dtype)

    def collapse_head(self, streams: Tensor, parameters: HyperParameters) -> Tensor:
        """Mix the final streams [..., hc, D] into [..., D]; `parameters` has hc rows."""
        projected = self._project(streams, parameters.fn)
        pre = torch.sigmoid(projected * parameters.scale + parameters.base) + self.eps
        return _weighted_sum(pre, streams)

    def _project(self, streams: Tensor, fn: Tensor) -> Tensor:
        flat = streams.flatten(-2).float()
        inverse_rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.norm_eps)
        # One factor per token: after the product it costs rows(fn) multiplications, not hc * D.
        return F.linear(flat, fn) * inverse_rms

    def _sinkhorn(self, logits: Tensor) -> Tensor:
        """[..., source, target] -> the same, rows and columns summing to about 1."""
        # Tokens last: sums over 4 contiguous elements would defeat vectorisation.
        comb = logits.flatten(0, -3).permute(1, 2, 0)
        comb = comb.softmax(1).add_(self.eps)
        comb.div_(comb.sum(0, keepdim=True).add_(self.eps))
        for _ in range(self.sinkhorn_iters - 1):
            comb.div_(comb.sum(1, keepdim=True).add_(self.eps))
            comb.div_(comb.sum(0, keepdim=True).add_(self.eps))
        return comb.permute(2, 0, 1).reshape(logits.shape)


class HyperParameters(NamedTuple):
    """fp32 parameters of one collapse: fn [rows, hc * D], base [rows], scale [3], or [1] (head)."""

    fn: Tensor
    base: Tensor
    scale: Tensor


def register_hyper_parameters(
    module: nn.Module,
    name: str,
    rows: int,
    columns: int,
    scales: int,
    device: torch.device | str | None,
) -> None:
    """Give `module` the parameters `{name}_fn`, `{name}_base` and `{name}_scale`."""
    for suffix, shape in (("fn", (rows, columns)), ("base", (rows,)), ("scale", (scales,))):
        parameter = empty_parameter(shape, torch.float32, device)
        module.register_parameter(f"{name}_{suffix}", parameter)


def hyper_parameters(module: nn.Module, name: str) -> HyperParameters:
    """Return what `register_hyper_parameters` registered."""
    return HyperParameters(*(getattr(module, f"{name}_{s}") for s in HyperParameters._fields))


def _weighted_sum(weights: Tensor, streams: Tensor) -> Tensor:
    mixed = torch.matmul(weights.unsqueeze(-2), streams.float()).squeeze(-2)
    return mixed.to(streams.dtype)
