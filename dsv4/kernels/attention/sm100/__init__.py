"""Sparse attention on Blackwell (sm_100a): tcgen05 MMA, TMEM, TMA."""
