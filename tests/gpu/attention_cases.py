"""Inputs and the comparison that the GPU tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.ops import sparse_fmha_with_swa
from dsv4.reference.attention import sparse_fmha_with_swa as oracle

NAN = float("nan")
MAGNITUDES = ("tiny", "huge", "columns", "pieces")


@dataclass
class Case:
    """Arguments of `sparse_fmha_with_swa`; masked rows hold NaN."""

    q: Tensor
    compressed_kv: Tensor
    swa_kv: Tensor
    swa_lens: Tensor
    sink_logits: Tensor
    request_ids: Tensor
    compressed_lens: Tensor | None

    @classmethod
    def random(
        cls,
        tokens: int,
        heads: int,
        head_dim: int,
        top_k: int,
        width: int,
        batch: int,
        *,
        ragged: bool = False,
        growing: bool = False,
        padding: int = 0,
        device: str = "cuda",
    ) -> Case:
        """Unit-scale inputs. `growing`: later keys are larger, so that every block raises the row
        maximum. `padding`: number of padding tokens at the end."""

        def rows(*shape: int) -> Tensor:
            return torch.randn(*shape, head_dim, device=device)

        compressed_kv, swa_kv = rows(tokens, top_k), rows(batch, width)
        if growing:
            for kv in (compressed_kv, swa_kv):
                kv *= torch.linspace(0.1, 1.2, kv.shape[1], device=device)[:, None]
        request_ids = torch.randint(batch, (tokens,), device=device).sort().values.int()
        request_ids[tokens - padding :] = -1
        swa_lens = torch.full((batch,), width, dtype=torch.int32, device=device)
        compressed_lens = None
        if ragged:
            swa_lens = torch.randint(width + 1, (batch,), device=device).int()
            compressed_lens = torch.randint(top_k + 1, (tokens,), device=device).int()
            past = torch.arange(top_k, device=device) >= compressed_lens[:, None]
            compressed_kv[past] = NAN
            swa_kv[torch.arange(width, device=device) >= swa_lens[:, None]] = NAN
        return cls(
            rows(tokens, heads).bfloat16(),
            compressed_kv.bfloat16(),
            swa_kv.bfloat16(),
            swa_lens,
            torch.randn(heads, device=device),
            request_ids,
            compressed_lens,
        )

    def scale_columns(self, factors: Tensor) -> None:
        """Multiply the columns of all keys; those of q are divided, so that the scores remain."""
        self.q = (self.q / factors).bfloat16()
        self.compressed_kv = (self.compressed_kv * factors).bfloat16()
        self.swa_kv = (self.swa_kv * factors).bfloat16()

    def check_scaled(
        self, magnitude: str, attention: Callable[[Case], tuple[Tensor, Tensor]]
    ) -> None:
        """Compare o and lse of `attention` with the oracle on columns of a magnitude, each column
        relative to its own."""
        head_dim, device = self.q.shape[2], self.q.device
        factors = {
            "tiny": torch.full((head_dim,), 2.0**-100),
            "huge": torch.full((head_dim,), 2.0**100),
            "columns": 2.0 ** torch.randint(-12, 13, (head_dim,)),
            "pieces": (2.0 ** torch.randint(-60, 61, (head_dim // 128,))).repeat_interleave(128),
        }[magnitude].to(device)
        self.scale_columns(factors)
        o, lse = attention(self)
        expected_o, expected_lse = self.expected("softmax")
        compare(o.float() / factors, lse, expected_o / factors, expected_lse)

    def check_unequal(self, attention: Callable[[Case], tuple[Tensor, Tensor]]) -> None:
        """Compare o and lse of `attention` with the oracle on compressed rows of which every 64 are
        of another magnitude, and equally weighted; o relative to the largest of its row."""
        self.q.zero_()
        tokens, rows, _ = self.compressed_kv.shape
        magnitudes = 2.0 ** torch.randint(-30, 31, (tokens, -(-rows // 64)), device=self.q.device)
        self.compressed_kv *= magnitudes.repeat_interleave(64, 1)[:, :rows, None]
        self.compressed_kv[0, :128] = 0
        o, lse = attention(self)
        expected_o, expected_lse = self.expected("softmax")
        largest = expected_o.abs().amax(-1, keepdim=True)
        compare(o.float() / largest, lse, expected_o / largest, expected_lse)

    def tensors(self) -> tuple[Tensor, ...]:
        """The six positional arguments."""
        return (
            self.q,
            self.compressed_kv,
            self.swa_kv,
            self.swa_lens,
            self.sink_logits,
            self.request_ids,
        )

    def run(self, **options) -> tuple[Tensor, Tensor]:
        """o and lse of the operator; o starts as NaN."""
        out = torch.full_like(self.q, NAN)
        return sparse_fmha_with_swa(
            *self.tensors(),
            compressed_lens=self.compressed_lens,
            out=out,
            return_lse=True,
            **options,
        )

    def check(self, **options) -> None:
        """Compare the operator with the oracle."""
        o, lse = self.run(**options)
        mode, is_causal = options["sink_mode"], options.get("is_causal", False)
        compare(o, lse, *self.expected(mode, is_causal, options.get("sliding_window")))

    def expected(
        self, sink_mode: str, is_causal: bool = False, sliding_window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """o and lse of the oracle."""
        return oracle(
            *self.tensors(),
            sink_mode=sink_mode,
            compressed_lens=self.compressed_lens,
            is_causal=is_causal,
            sliding_window=sliding_window,
        )


def compare(o: Tensor, lse: Tensor, expected_o: Tensor, expected_lse: Tensor) -> None:
    """Frobenius error, cosine and every element of o; lse within 1e-4, or fp32's last bit where
    that is more, infinities exact."""
    o = o.float()
    assert not o.isnan().any(), f"{int(o.isnan().sum())} elements of o are NaN"
    norm = expected_o.norm()
    error = ((o - expected_o).norm() / norm.clamp(min=1e-30)).item()
    assert error <= 4e-3 or norm == 0, f"relative error {error:.2e}"
    if norm > 0:
        # Not cosine_similarity: an extreme sink leaves vectors smaller than its epsilon.
        a, b = o.flatten().double(), expected_o.flatten().double()
        cosine = (a @ b / (a.norm() * b.norm())).item()
        assert cosine >= 0.99999, f"cosine {cosine:.7f}"
    torch.testing.assert_close(o, expected_o, atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=2**-23)
