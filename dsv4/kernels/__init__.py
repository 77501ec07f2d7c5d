"""GPU code only (CuTeDSL). Importing this package imports no cutlass; the kernel modules do."""
