"""`mhc_seam` under test: inputs, what they must give, and the comparison."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.kernels.seam.config import STREAMS, SeamConfig, passes_left
from dsv4.ops.mhc_seam import MHC_SEAM, mhc_seam
from dsv4.ops.moe.rows import ExpertRows
from dsv4.ops.quantize import quantize_e4m3
from dsv4.reference import mhc
from dsv4.reference.norm import rms_norm
from dsv4.testing.kernel_call import OpInputs

EPS = 1e-6
PADDING = 8
ITERS = 20
LEFT = passes_left(ITERS)  # to the seam that is given comb


@dataclass(frozen=True)
class Case:
    """Sizes and options of a call.

    Attributes:
        tokens, dim: of the streams.
        is_head, expands: as in `SeamConfig`.
        quantizes: whether FP8 codes are written.
        spread: of the logits of pre, post and comb; large ones saturate.
        is_strided: whether tokens lie apart.
        padding_rows: tokens at the end that are NaN.
        top_k: experts of a token whose rows are added, some of which are missing; 0: y is given.
    """

    tokens: int
    dim: int
    is_head: bool = False
    expands: bool = True
    quantizes: bool = True
    spread: float = 1.0
    is_strided: bool = False
    padding_rows: int = 0
    top_k: int = 0

    @property
    def config(self) -> SeamConfig:
        options = (ITERS, EPS, EPS, self.top_k)
        return SeamConfig(self.dim, STREAMS, self.is_head, self.expands, *options)


@dataclass(frozen=True)
class Inputs(OpInputs):
    """Tensors of a case."""

    op = MHC_SEAM

    case: Case
    tensors: dict[str, Tensor | None]

    @classmethod
    def make(cls, case: Case, seed: int, device: torch.device | str = "cpu") -> Inputs:
        """Streams of different magnitude by token, comb as a seam leaves it."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        tokens, dim, rows = case.tokens, case.dim, case.config.rows
        exponents = torch.randint(-6, 6, (tokens, 1, 1), generator=generator)
        streams = normal(tokens, STREAMS, dim) * torch.exp2(exponents.float())
        found: dict[str, Tensor | None] = {
            "streams": streams,
            "fn": normal(rows, STREAMS * dim) / (STREAMS * dim) ** 0.5,
            "base": normal(rows),
            "scale": case.spread * (1 + torch.rand(case.config.scales, generator=generator)),
            "norm_weight": normal(dim),
            "y": None,
            "post": None,
            "comb": None,
            "rows": None,
            "ids": None,
            "counts": None,
        }
        if case.top_k:
            live = tokens - case.padding_rows
            found["rows"] = normal(tokens, case.top_k + 1, dim) * torch.exp2(exponents.float())
            ids = torch.randint(-1, 3, (tokens, case.top_k), generator=generator)
            # What is no result may hold anything.
            found["rows"][:, :-1][ids < 0] = torch.nan
            found["ids"] = ids.int()
            found["counts"] = torch.tensor([tokens, live], dtype=torch.int32)
        elif case.expands:
            found["y"] = normal(tokens, dim) * torch.exp2(exponents[:, 0].float())
        if case.expands:
            found["post"] = 2 * torch.rand(tokens, STREAMS, generator=generator)
            found["comb"] = mhc.sinkhorn(normal(tokens, STREAMS, STREAMS), ITERS - LEFT, EPS)
        if case.padding_rows:
            for name in ("streams", "y", "post", "comb", "rows"):
                if found[name] is not None:
                    found[name][tokens - case.padding_rows :] = torch.nan
        for name in ("streams", "y", "rows"):
            if found[name] is not None:
                wide = found[name].new_zeros(*found[name].shape[:-1], dim + PADDING)
                rows_ = wide.bfloat16()[..., :dim] if case.is_strided else found[name].bfloat16()
                found[name] = rows_.copy_(found[name])
        moved = {name: None if x is None else x.to(device) for name, x in found.items()}
        return cls(case, moved)

    @property
    def config(self) -> SeamConfig:
        return self.case.config

    @property
    def arguments(self) -> dict[str, Tensor | None]:
        return self.tensors

    @property
    def wanted(self) -> tuple[str, ...]:
        names = ("streams_out",) * self.case.expands
        names += ("post_out", "comb_out") * (not self.case.is_head)
        return names + ("codes", "scale_out") * self.case.quantizes

    @property
    def padding(self) -> int:
        return 0

    def clone(self) -> Inputs:
        """The same in memory of its own."""
        tensors = {name: x if x is None else x.clone() for name, x in self.tensors.items()}
        return Inputs(self.case, tensors)

    def rows(self, start: int, stop: int) -> Inputs:
        """The same for some of the tokens."""
        names = ("streams", "y", "post", "comb", "rows", "ids")
        tensors = {
            name: x[start:stop] if name in names and x is not None else x
            for name, x in self.tensors.items()
        }
        if tensors["counts"] is not None:
            tensors["counts"] = (tensors["counts"] - start).clamp(0, stop - start)
        case = Case(**{**vars(self.case), "tokens": stop - start, "padding_rows": 0})
        return Inputs(case, tensors)

    @property
    def y(self) -> Tensor | ExpertRows | None:
        """Output of the sublayer before, as the public function takes it."""
        if self.case.top_k:
            return ExpertRows(*(self.tensors[name] for name in ("rows", "ids", "counts")))
        return self.tensors["y"]

    def with_sums(self) -> Inputs:
        """The same with the rows of experts added by torch."""
        added = {"y": self.y.sum(), "rows": None, "ids": None, "counts": None}
        return Inputs(replace(self.case, top_k=0), {**self.tensors, **added})

    def expected(self, streams: Tensor | None = None) -> dict[str, Tensor]:
        """The oracle's results in fp32, by the operator's names.

        Args:
            streams: the new streams as they were rounded; default the oracle's own.
        """
        tensors = self.with_sums().tensors if self.case.top_k else self.tensors
        given = {n: None if x is None else x.cpu().float() for n, x in tensors.items()}
        found = {}
        if streams is None:
            streams = given["streams"]
            if self.case.expands:
                comb = mhc.iterated(given["comb"], LEFT, EPS)
                found["streams_out"] = mhc.expand(given["y"], streams, given["post"], comb)
                streams = found["streams_out"].bfloat16()
        streams = streams.float()
        parameters = (given["fn"], given["base"], given["scale"])
        if self.case.is_head:
            mixed = mhc.head(streams, *parameters, eps=EPS, norm_eps=EPS)
        else:
            options = {"iterations": ITERS - LEFT, "eps": EPS, "norm_eps": EPS}
            weights = mhc.mixing(streams, *parameters, **options)
            found["post_out"], found["comb_out"] = weights.post, weights.comb
            mixed = mhc.contract(streams, weights.pre)
        found["x"] = rms_norm(mixed.bfloat16(), given["norm_weight"], EPS)
        return found


def run_op(inputs: Inputs) -> dict[str, Tensor]:
    """Results of the public function by the operator's names."""
    tensors = inputs.tensors
    found = mhc_seam(
        *(tensors[name] for name in ("streams", "fn", "base", "scale", "norm_weight")),
        **{name: tensors[name] for name in ("post", "comb")},
        y=inputs.y,
        eps=EPS,
        norm_eps=EPS,
        quantize=inputs.case.quantizes,
    )
    names = ("x", "streams_out", "post_out", "comb_out", "codes", "scale_out")
    results = {name: x for name, x in zip(names, found, strict=True) if x is not None}
    if not inputs.case.expands:
        del results["streams_out"]
    return results


def assert_seam_close(inputs: Inputs, outputs: dict[str, Tensor]) -> None:
    """Compare with the oracle: streams and x to bf16's rounding, weights to fp32's.

    x is compared with the oracle's of the streams that were written, and codes with those of x.
    """
    live = inputs.case.tokens - inputs.case.padding_rows
    found = {name: tensor[:live].cpu() for name, tensor in outputs.items()}
    head = inputs.rows(0, live)
    if "streams_out" in found:
        wanted = head.expected()["streams_out"]
        torch.testing.assert_close(found["streams_out"].float(), wanted, rtol=2**-8, atol=1e-5)
    wanted = head.expected(found.get("streams_out"))
    for name in ("post_out", "comb_out"):
        if name in found:
            torch.testing.assert_close(found[name], wanted[name], rtol=2e-5, atol=1e-6)
    # Rounded before the norm and after it: where a sum lies between two of bf16's numbers, the
    # other one is a step of 2^-7 at most. Sums that cancel keep the fp32 errors of their terms.
    error, x = (found["x"].float() - wanted["x"]).abs(), wanted["x"].abs()
    cancelled = 1e-5 * x.amax(-1, keepdim=True) if x.numel() else 0
    limit = 1.6 * 2**-7 * x + cancelled
    assert (error <= limit).all(), f"x: off by {(error / limit).max():.2f} times the bound"
    steps = (error > 2**-8 * x + cancelled).float().mean()
    assert steps < 5e-3 or steps * error.numel() < 4, f"x: {steps:.2%} are a step off"
    if "codes" in found:
        codes, scales = quantize_e4m3(found["x"], 128)
        assert torch.equal(found["codes"].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(found["scale_out"].view(torch.uint8), scales.view(torch.uint8))
