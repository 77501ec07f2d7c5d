"""The shapes of `sparse_fmha_with_swa` that every backend is tested with."""

from __future__ import annotations

from dataclasses import replace

from dsv4.testing.attention import Case

# Every head count with every head_dim, each sink mode and window rule several times, at least three
# tiles of compressed keys with a ragged last one.
GRID = [
    Case(
        heads=heads,
        head_dim=head_dim,
        top_k=(200, 333, 600, 1)[place % 4],
        window_rows=(128, 150, 300)[place % 3],
        sink_mode=("softmax", "swa_gate")[(place + place // 4) % 2],
        is_causal=(place // 2) % 2 == 1,
        ragged=place % 3 != 0,
        growing=place % 2 == 1,
        softmax_scale=(None, 1.5 * head_dim**-0.5)[place % 5 == 4],
    )
    for place, (heads, head_dim) in enumerate(
        (heads, head_dim) for head_dim in (64, 128, 512) for heads in (8, 16, 64, 128)
    )
]

# Everything with everything.
FULL_GRID = [
    Case(
        heads=heads,
        head_dim=head_dim,
        top_k=top_k,
        window_rows=window_rows,
        sink_mode=sink_mode,
        is_causal=is_causal,
        ragged=ragged,
        growing=growing,
    )
    for heads in (8, 16, 64, 128)
    for head_dim in (64, 128, 256, 512)
    for top_k, window_rows in ((0, 128), (64, 1), (200, 160), (640, 300))
    for sink_mode in ("softmax", "swa_gate")
    for is_causal in (False, True)
    for ragged, growing in ((True, False), (False, True))
]

# One request of many tokens, as in prefill; and many requests of one token, as in decode.
PREFILL = Case(
    requests=((0, 150), (1, 77), (-1, 5)), batch=2, window_rows=277, is_causal=True, top_k=90
)
DECODE = Case(requests=tuple((row, 1) for row in range(70)), batch=70, window_rows=128)
SHAPES = [PREFILL, DECODE, replace(PREFILL, sink_mode="swa_gate", heads=16, head_dim=128)]
