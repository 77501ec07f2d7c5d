"""Sparse attention of a few decoding tokens, compared with the FP32 oracle.

python examples/attention.py
"""

import torch

from dsv4.ops import sparse_fmha_with_swa
from dsv4.reference.attention import sparse_fmha_with_swa as oracle

TOKENS, HEADS, HEAD_DIM, TOP_K, WINDOW = 4, 64, 512, 512, 128


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    rows = {"dtype": torch.bfloat16, "device": device}
    q = torch.randn(TOKENS, HEADS, HEAD_DIM, **rows)
    compressed_kv = torch.randn(TOKENS, TOP_K, HEAD_DIM, **rows)
    swa_kv = torch.randn(2, WINDOW, HEAD_DIM, **rows)  # two requests
    swa_lens = torch.tensor([WINDOW, 37], dtype=torch.int32, device=device)
    request_ids = torch.tensor([0, 0, 1, -1], dtype=torch.int32, device=device)  # -1: padding
    sinks = torch.randn(HEADS, device=device)
    tensors = (q, compressed_kv, swa_kv, swa_lens, sinks, request_ids)

    o, lse = sparse_fmha_with_swa(*tensors, sink_mode="softmax", return_lse=True)

    expected, _ = oracle(*tensors, sink_mode="softmax")
    error = (o.float() - expected).norm() / expected.norm()
    print(f"{device}: o {tuple(o.shape)}, lse {tuple(lse.shape)}, relative error {error:.1e}")
    assert error < 4e-3


if __name__ == "__main__":
    main()
