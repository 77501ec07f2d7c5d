"""Arguments of an attention launch, as every kernel's `launch` takes them."""

from typing import NamedTuple

from cutlass import Int32, cute


class FmhaArguments(NamedTuple):
    """Arguments of a kernel's call, in its order but for the stream."""

    q: cute.Tensor  # [T, n_h, head_dim] bf16
    compressed_kv: cute.Tensor  # [T, top_k, head_dim] bf16
    swa_kv: cute.Tensor  # [batch, W, head_dim] bf16
    swa_lens: cute.Tensor  # [batch] int32
    sink_logits: cute.Tensor  # [n_h] fp32
    request_ids: cute.Tensor  # [T] int32
    o: cute.Tensor  # [T, n_h, head_dim] bf16, written
    compressed_lens: cute.Tensor  # [T] int32, or [0]: every row counts
    lse: cute.Tensor  # [T, n_h] fp32, written, or [0, n_h]: not wanted
    workspace: cute.Tensor  # fp32, see `split_kv`
    num_splits: Int32
    num_sms: Int32  # CTAs that run at a time

    def tables(self) -> dict:
        """Lengths, small tables and workspace by name, as kernel parameters take them over."""
        names = ("swa_lens", "sink_logits", "request_ids", "compressed_lens", "lse", "workspace")
        return {
            **{name: getattr(self, name) for name in (*names, "num_splits")},
            "compressed_rows": self.compressed_kv.shape[1],
            "window_rows": self.swa_kv.shape[1],
        }
