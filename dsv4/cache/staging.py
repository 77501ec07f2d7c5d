"""Small host-made arrays on their way to the device, without a synchronisation."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def staged(values: np.ndarray, device: torch.device) -> Tensor:
    """Host memory from which a copy to `device` may be in flight while the caller goes on.

    Pinned for CUDA, and taken again only when its copies are done: torch's allocator of pinned
    memory knows of them.
    """
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host.pin_memory() if device.type == "cuda" else host


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """Start copying an array, in stream order; on the CPU the result may share its memory."""
    return staged(values, device).to(device, non_blocking=True)
