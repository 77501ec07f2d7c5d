"""Small host-made tensors on their way to the device, without a synchronisation."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class StagedTensor:
    """A flat device tensor at a fixed address, filled from host memory.

    Fill `writable()` from its start, `upload(count)` it: the address never changes, so a captured
    CUDA graph may read it. On CUDA the host side is pinned and the copy asynchronous; on the CPU
    both sides are one memory. Either way an upload is valid until the next.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._source = torch.zeros(size, dtype=dtype, device="cpu", pin_memory=pinned)
        self._array = self._source.numpy()
        self._copied = torch.cuda.Event() if pinned else None
        self._device: Tensor = self._source
        if device.type != "cpu":
            self._device = torch.zeros(size, dtype=dtype, device=device)

    def writable(self) -> np.ndarray:
        """[size] on the host, once the last upload has left it: that copy must stay unchanged."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._array

    def upload(self, count: int) -> Tensor:
        """Start copying the first `count` elements, in stream order; returns them, [count]."""
        target = self._device[:count]
        if self._device is not self._source:
            target.copy_(self._source[:count], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device.device))
        return target
