"""Results on their way from the device to the host, which reads them later."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Letter:
    """A tensor that is being copied to the host, or nothing but the end of a forward.

    Args:
        tensor: read once all work before on the current stream is done, unless `stream` is given;
            None: there is nothing to read.
        device: of the forward.
        stream: a stream that copies beside the current one, on CUDA; the tensor must stay as it is
            until the copy is done.
    """

    def __init__(
        self,
        tensor: Tensor | None,
        device: torch.device,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._host = tensor
        self.copied: torch.cuda.Event | None = None
        if device.type != "cuda":
            return
        if stream is None:
            stream = torch.cuda.current_stream(device)
        else:
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            if tensor is not None:
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self._host = pinned.copy_(tensor, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record(stream)

    def read(self) -> np.ndarray | None:
        """Wait for the forward and return the tensor."""
        if self.copied is not None:
            self.copied.synchronize()
        return None if self._host is None else self._host.numpy()


class Mailbox:
    """Two places for the results of one captured forward, by turns.

    A replay writes to one while the result of the replay before leaves the other, on a stream of
    its own: nothing lies between two replays. Which one is next, a replay must find on the device.

    Args:
        rows, width: of the results, int64.
        stream: copies results to the host; None on the CPU.
    """

    def __init__(
        self, rows: int, width: int, device: torch.device, stream: torch.cuda.Stream | None
    ) -> None:
        self._shape = (rows, width)
        self._device = device
        self._stream = stream
        self._places = torch.zeros(2, rows * width, dtype=torch.int64, device=device)
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._next = 0
        self._letters: list[Letter | None] = [None, None]
        # Loads the operators' kernels, which a capture should not; the turn is the first again.
        for _ in range(2):
            self.post(self._places[0].view(rows, width).clone())

    def post(self, result: Tensor) -> None:
        """Put a result into the next place; device work alone."""
        self._places.index_copy_(0, self._turn, result.reshape(1, -1))
        self._turn.bitwise_xor_(1)

    def clear(self) -> None:
        """Let the current stream wait until the next place may be written."""
        letter = self._letters[self._next]
        if letter is not None and letter.copied is not None and not letter.copied.query():
            torch.cuda.current_stream(self._device).wait_event(letter.copied)

    def send(self) -> Letter:
        """Start copying the result that was posted last."""
        place = self._places[self._next].view(self._shape)
        # On the CPU the result was computed when it was posted, and its place is written again.
        place = place.clone() if self._device.type != "cuda" else place
        letter = self._letters[self._next] = Letter(place, self._device, self._stream)
        self._next = 1 - self._next
        return letter

    def reset(self) -> None:
        """Begin with the first place again, whatever a forward that failed has left."""
        self._turn.zero_()
        self._next = 0
