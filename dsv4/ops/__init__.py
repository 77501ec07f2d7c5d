"""torch <-> kernels: argument checks, runners, and the `torch.ops.dsv4` operators."""
