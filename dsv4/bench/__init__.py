"""Benchmarks: what a kernel takes, next to what the machine allows and what others take."""
