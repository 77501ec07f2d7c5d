"""Slow FP32 oracles. They need torch alone, and production code never imports them."""
