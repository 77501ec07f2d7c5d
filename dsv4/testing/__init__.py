"""Shared by tests, benchmarks, the simulator command and the demo."""
