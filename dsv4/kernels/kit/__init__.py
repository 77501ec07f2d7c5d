"""Parts that kernels of several families share: plans, barriers, copies, products, reductions."""
