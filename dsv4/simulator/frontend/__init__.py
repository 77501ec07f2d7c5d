"""Where kernels come from: compiled CuTeDSL functions and PTX text."""
