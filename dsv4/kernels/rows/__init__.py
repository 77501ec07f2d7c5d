"""Row kernels: one pass over rows of activations, bound by memory, one source for all GPUs."""
