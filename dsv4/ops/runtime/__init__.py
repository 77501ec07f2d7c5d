"""The runtime of operators: what follows from a declaration, `kernel_op.KernelOp`.

A call: `dispatch` (implementations by dispatch key), `launch` (of compiled kernels, or of torch),
`state` (what is made once per configuration and device), `workspace`. Configurations are named by
`runner` ids. Kernels: `registry` (what is compiled), `cache`, `toolchain`, `sources`, `precompile`.
"""
