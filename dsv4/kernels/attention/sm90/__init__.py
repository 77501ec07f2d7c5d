"""Sparse attention on Hopper (sm_90a): wgmma, TMA."""
