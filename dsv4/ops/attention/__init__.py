"""Sparse attention over compressed entries and a sliding window, as torch operators."""
