"""Attention kernels: `fmha` (sm_100a), `fmha_sm90` (sm_90a), and what they share."""
