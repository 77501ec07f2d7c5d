"""Experts for Blackwell (sm_100a)."""
