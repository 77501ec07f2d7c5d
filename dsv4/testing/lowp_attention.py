"""Kernels of `quantized_attention` under test: operands, what torch makes of them, comparison."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.kernels.lowp.config import QuantizedAttentionConfig
from dsv4.ops.quantized_attention.op import QUANTIZED_ATTENTION
from dsv4.ops.quantized_attention.quantize_kv import quantize_kv
from dsv4.testing.harness import Outcome
from dsv4.testing.kernel_call import OpInputs
from dsv4.testing.lowp import Case, Metrics, make_inputs

# Half a unit in the last place of an output, and what Hopper's FP8 sums of 128 products lose
# (relative to the sum of their magnitudes: docs/design/lowp.md).
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TRUNCATION = 2.0**-10
FP32_LOSS = 2.0**-17  # the same of sums in float32, of a hundred tiles: beside it a tie shows
LSE_ERROR = 1e-5
# What Hopper's FP8 sums of 64 or 128 products lose of a score (measured: 5.6e-4 of the lse of a row
# that sees five keys).
SCORE_ERROR = {"int8": 0.0, "fp8": 2.0**-10}
# A weight beside a tie of e4m3, whose score is rounded otherwise, gets the next code: at most an
# eighth more or less. Few rows have such a weight that counts; more where scores are off further.
NEXT_CODE = 2.0**-3
ROWS_WITH_TIES = {"int8": 1e-3, "fp8": 0.1, "fp32": 0.01}


@dataclass(frozen=True)
class Inputs(OpInputs):
    """Operands of a call.

    Attributes:
        queries: [b, Hq, L, d].
        codes: tensors by the names of the operator's table.
    """

    op = QUANTIZED_ATTENTION
    wanted = ("lse",)

    options: QuantizedAttentionConfig
    queries: Tensor
    codes: dict[str, Tensor | None]

    @classmethod
    def make(
        cls,
        case: Case,
        seed: int,
        lens: tuple[tuple[int, int], ...] | None = None,
        device: torch.device | str = "cpu",
    ) -> Inputs:
        """Random operands of a case; with `lens`, packed sequences of so many queries and keys."""
        options = dict(case.options)
        causal, mask = options.pop("causal", "none"), options.pop("mask", "none")
        q, k, v = (x.to(device) for x in make_inputs(case, seed))
        ends = {}
        if lens is not None:
            for i, name in enumerate(("cu_seqlens_q", "cu_seqlens_k")):
                counts = torch.tensor([0, *(pair[i] for pair in lens)])
                ends[name] = counts.cumsum(0).to(device, torch.int32)
            options["cu_seqlens_k"] = ends["cu_seqlens_k"]
            k, v = k[0].transpose(0, 1), v[0].transpose(0, 1)
        found = quantize_kv(k, v, **options)
        config = QuantizedAttentionConfig(
            **vars(found.config), causal=causal, mask=mask, sm_scale=case.dim**-0.5
        )
        given = {"attn_mask": make_mask(mask, q, k.shape[-2], seed)}
        return cls(config, q, {**found.codes, **ends, **given})

    @property
    def config(self) -> QuantizedAttentionConfig:
        return self.options

    @property
    def arguments(self) -> dict[str, Tensor | None]:
        return {"q": self.queries, **self.codes}

    @property
    def summed_tiles(self) -> int:
        """Tiles of keys whose products one accumulator sums. One that is never emptied loses twice
        as much as a fresh one: its sum, too, is cut by every product."""
        if self.config.pv_accum_dtype in ("fp32+fp32", "fp32+fp16"):
            return 1
        keys = self.codes["k_codes"]
        assert keys is not None
        return 2 * -(-keys.shape[2] // 128)

    def expected(self, codes: dict[str, Tensor | None] | None = None) -> tuple[Tensor, Tensor]:
        """out and lse of the torch implementation, float32."""
        tensors = {**self.arguments, **(codes or {})}
        out = torch.empty_like(self.queries, dtype=torch.float32)
        lse = out.new_empty(out.shape[:-1])
        names = (arg.name for arg in self.op.tensors)
        given = {**tensors, "out": out, "lse": lse}
        self.op.torch(self.config, *(given.get(name) for name in names))
        return out, lse

    def magnitudes(self) -> Tensor:
        """What the weights make of the values' magnitudes: what errors of sums are relative to."""
        values = self.codes["v_codes"]
        if self.config.pv == "fp16":
            values = values.abs()
        elif self.config.pv == "nvfp4":
            values = values & 0x77
        else:
            values = (values.view(torch.uint8) & 0x7F).view(torch.float8_e4m3fn)
        codes: dict[str, Tensor | None] = {"v_codes": values}
        if self.codes["vm"] is not None:
            codes["vm"] = torch.zeros_like(self.codes["vm"])
        return self.expected(codes)[0]


def make_mask(kind: str, q: Tensor, keys: int, seed: int) -> Tensor | None:
    """A mask of a kind, the same for all heads: most keys seen, of one query none, tiles of which
    some queries see nothing."""
    if kind == "none":
        return None
    batch, heads, rows, _ = q.shape
    numbers = torch.rand(batch, 1, rows, keys, generator=torch.Generator().manual_seed(seed))
    is_seen = numbers < 0.7
    is_seen[..., rows // 2, :], is_seen[..., ::3, :130] = False, False
    mask = is_seen.to(torch.uint8)
    if kind == "float":
        mask = torch.where(is_seen, 4 * numbers - 2, -torch.inf)
    return mask.to(q.device).repeat(1, heads, 1, 1)


def with_hidden_tiles(inputs: Inputs, seed: int, is_shared: bool = False) -> tuple[Inputs, Inputs]:
    """Inputs whose mask hides whole tiles of keys; and the same with NaN in the codes and scales of
    tiles that no query sees, which a kernel must not read.

    Args:
        is_shared: whether all heads and batches have one mask, of stride 0.
    """
    tile, keys = inputs.config.tiles.block_k, inputs.codes["k_codes"].shape[2]
    batch, heads, rows, _ = inputs.queries.shape
    shape = (1, 1) if is_shared else (batch, heads)
    generator = torch.Generator().manual_seed(seed)
    tiles = torch.rand(*shape, -(-rows // 64), -(-keys // tile), generator=generator) < 0.4
    tiles[..., 1], tiles[..., -1], tiles[:, :, :4] = False, False, False
    spread = tiles.repeat_interleave(64, 2)[:, :, :rows].repeat_interleave(tile, 3)[..., :keys]
    seen = spread & (torch.rand(*shape, rows, keys, generator=generator) < 0.7)
    if inputs.config.mask == "float":
        mask = torch.where(seen, 4 * torch.rand(seen.shape, generator=generator) - 2, -torch.inf)
    else:
        mask = seen.to(torch.uint8)
    mask = mask.to(inputs.queries.device).expand(batch, heads, -1, -1)
    clean = replace(inputs, codes={**inputs.codes, "attn_mask": mask})
    poisoned = {name: None if x is None else x.clone() for name, x in inputs.codes.items()}
    poisoned["attn_mask"] = mask
    for number in (1, -1):
        for name in ("k_scale", "v_codes", "v_block_scale"):
            tensor = poisoned[name]
            if tensor is not None:
                part = tensor[:, :, number]
                if part.dtype in (torch.float32, torch.float16):
                    part.fill_(torch.nan)
                else:
                    part.view(torch.uint8).fill_(0x7F)
    return clean, replace(clean, codes=poisoned)


def assert_attention(
    inputs: Inputs, outcome: Outcome, *, tiles: int = 1, has_fp32_sums: bool = False
) -> None:
    """Fail where outputs are further from torch's, on the same codes, than rounding explains.

    Args:
        tiles: of keys whose products one accumulator sums.
        has_fp32_sums: whether tensor cores sum in float32, as Blackwell's.
    """
    out, lse = inputs.expected()
    found = {name: x.to(out.device) for name, x in outcome.outputs.items()}
    dtype, qk = inputs.queries.dtype, inputs.config.qk
    assert found["out"].isfinite().all()
    off = (found["out"].float() - out).abs()
    score_error = 0.0 if has_fp32_sums else SCORE_ERROR[qk]
    lost = FP32_LOSS if has_fp32_sums else TRUNCATION * tiles + 2 * score_error
    ties = ROWS_WITH_TIES["fp32" if has_fp32_sums else qk]
    bound = ROUNDING[dtype] * out.abs() + lost * inputs.magnitudes() + 1e-30
    is_beyond = off > bound
    rows = int(is_beyond.any(-1).sum())
    worst = float((off / bound).max()) if off.numel() else 0.0
    most = 1 + int(ties * is_beyond[..., 0].numel())
    assert rows <= most, f"{rows} rows are off, by up to {worst:.2f} of what rounding explains"
    assert (off <= bound + NEXT_CODE * inputs.magnitudes()).all(), "off by more than a code"
    if out.any():
        metrics = Metrics.of(found["out"], out)
        assert metrics.l1 <= ROUNDING[dtype] + lost, metrics
    assert ((found["lse"] == -torch.inf) == (lse == -torch.inf)).all()
    error = LSE_ERROR + score_error
    torch.testing.assert_close(found["lse"], lse, rtol=1e-6, atol=error)
