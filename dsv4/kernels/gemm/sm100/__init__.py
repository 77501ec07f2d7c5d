"""Linears for Blackwell (sm_100a)."""
