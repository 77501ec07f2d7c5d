"""Sparse attention kernels: `sm100.fmha` (Blackwell), `sm90.fmha` (Hopper), and what they share."""
