"""Sources of kernels: compiled CuTeDSL functions and PTX text."""
