"""Runs compiled sm_100a and sm_90a kernels on a CPU."""
