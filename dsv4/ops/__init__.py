"""torch <-> kernels: argument checks, runners, and the `torch.ops.dsv4` operators."""

from dsv4.ops.attention.sparse_fmha import fmha_runner_id, sparse_fmha_with_swa, warmup

__all__ = ["fmha_runner_id", "sparse_fmha_with_swa", "warmup"]
