"""The simulated GPU: memory, warps, barriers, the scheduler, asynchronous engines."""
