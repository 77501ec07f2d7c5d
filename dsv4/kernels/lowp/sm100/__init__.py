"""Attention over codes for Blackwell."""
