"""A time model for simulated kernels: what a launch would take on a B200 or an H200.

A simulation is recorded as a trace of blocks and asynchronous operations, which is then replayed
event by event against modelled units. All times are model figures, never measurements.

Not modelled: how long a CTA waits through global memory for one that has more to do (a flag counts
as set once the CTA that reads it has stored its own share, and a recorded cluster must find the
flags that it needs set), stores to another CTA's shared memory beyond their issue, the fetch of
instructions and tensor maps, power limits of a B200, and how unevenly a GPU shares its bandwidth.
"""

from dsv4.simulator.timing.machine import ASSUMED, B200, H200, MACHINES, Machine
from dsv4.simulator.timing.prediction import LaunchPrediction, Prediction, predict

__all__ = [
    "ASSUMED", "B200", "H200", "MACHINES", "LaunchPrediction", "Machine", "Prediction", "predict",
]  # fmt: skip
