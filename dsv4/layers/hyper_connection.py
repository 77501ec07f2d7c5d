"""Manifold-constrained hyper-connections (mHC): the residual state is several streams per token.

A sublayer reads one mixture of the streams and writes to all of them. What lies between two
sublayers is one operator, `dsv4.ops.mhc_seam`: the output of one is written to the streams when the
next one reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from dsv4.kernels.seam.config import passes_left
from dsv4.layers.linear import Rounded
from dsv4.layers.module import empty_parameter
from dsv4.layers.norm import RMSNorm
from dsv4.ops.mhc_seam import expand, iterated, mhc_seam
from dsv4.ops.moe.rows import ExpertRows

if TYPE_CHECKING:
    from dsv4.config.model_config import ModelConfig


class Streams(NamedTuple):
    """Residual streams, and the output of a sublayer that is still to be written to them.

    Attributes:
        values: [..., hc, D], before that sublayer.
        y: [..., D], its output, or the rows of its experts; None: nothing is to be written.
        post: [..., hc] fp32, weight of y in every stream.
        comb: [..., hc (source), hc (target)] fp32, but for its last passes, as `mhc_seam`.
    """

    values: Tensor
    y: Tensor | ExpertRows | None = None
    post: Tensor | None = None
    comb: Tensor | None = None

    def after(self, y: Tensor | ExpertRows) -> Streams:
        """The same with the output of the sublayer that read them."""
        return self._replace(y=y)

    def at(self, offsets: Tensor) -> Streams:
        """One position per row: of [B, C, ...] those at offsets [B] int64, [B, 1, ...]."""
        return Streams(*(None if x is None else _at(x, offsets) for x in self))


def _at(x: Tensor, offsets: Tensor) -> Tensor:
    index = offsets.view(-1, *[1] * (x.dim() - 1))
    return x.gather(1, index.expand(-1, 1, *x.shape[2:]))


@dataclass(frozen=True)
class HyperConnection:
    """The arithmetic of mHC; its parameters belong to the layers, under the checkpoint's names.

    Attributes:
        mult: streams, hc.
        sinkhorn_iters: row and column normalisations of the mixing matrix.
        eps: added to `pre` and to every denominator.
        norm_eps: of the RMS over all streams, and of the norm that follows.
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

    def written(self, streams: Streams) -> Tensor:
        """[..., hc, D] with the output of the last sublayer, by torch."""
        values, y, post, comb = streams
        if y is None:
            return values
        if isinstance(y, ExpertRows):
            y = y.sum().view_as(values[..., 0, :])
        return expand(values, y, post, iterated(comb, passes_left(self.sinkhorn_iters), self.eps))

    def read(
        self,
        streams: Streams,
        parameters: HyperParameters,
        norm: RMSNorm,
        *,
        quantize: bool = False,
    ) -> tuple[Tensor | Rounded, Streams]:
        """Write the sublayer before, then mix the streams into the next one's input.

        Args:
            parameters: of a sublayer: rows hc (pre), hc (post), hc * hc (source-major comb); or hc
                rows, the head's, after which nothing is written.
            norm: of the mixture.
            quantize: also round the mixture for FP8 linears.

        Returns:
            The normalised mixture [..., D] in the dtype of the streams, with its codes where they
            are wanted, and what it was read from.
        """
        leading = streams.values.shape[:-2]

        def rows(x: Tensor | ExpertRows | None) -> Tensor | ExpertRows | None:
            return x if x is None or isinstance(x, ExpertRows) else x.flatten(0, len(leading) - 1)

        values, y, post, comb = streams
        seam = mhc_seam(
            rows(values),
            *parameters,
            norm.weight,
            y=rows(y),
            post=None if y is None else rows(post),
            comb=None if y is None else rows(comb),
            sinkhorn_iters=self.sinkhorn_iters,
            eps=self.eps,
            norm_eps=self.norm_eps,
            quantize=quantize,
        )
        post, comb = (None if x is None else x.unflatten(0, leading) for x in seam[2:4])
        x = seam.x.unflatten(0, leading)
        if quantize:
            x = Rounded(x, seam.codes, seam.scales)
        return x, Streams(seam.streams.unflatten(0, leading), None, post, comb)


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
