"""Small host-made tensors on their way to the device, without a synchronisation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class StagedTensor:
    """A device tensor at a fixed address, filled from host memory.

    Fill `writable()`, call `upload()`, use `device`: its address never changes, so a captured CUDA graph may read
    it. On CUDA the host side is pinned and the copy asynchronous; on the CPU both sides are one memory, hence what
    was uploaded is valid only until `writable()` is called again.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._source = torch.zeros(*shape, dtype=dtype, pin_memory=pinned)
        self._array = self._source.numpy()
        self._copied = torch.cuda.Event() if pinned else None
        self.device: Tensor = self._source
        if device.type != "cpu":
            self.device = torch.zeros(*shape, dtype=dtype, device=device)

    def writable(self) -> np.ndarray:
        """Host side as an array, once the last upload has left it: a copy in flight must not change under way."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._array

    def upload(self) -> Tensor:
        """Start the copy to the device, ordered on its current stream; returns `device`."""
        if self.device is not self._source:
            self.device.copy_(self._source, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.device.device))
        return self.device
