"""A Reducer for gradients on a device whose compression, and what that keeps, is the core's, in the CPU's memory."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from dcoll import _C
from dcoll.errors import ArgumentError


class HostReducer:
    """The core's Reducer, to whose buckets gradients are copied when they are ready, and sums from there.

    Backward does not wait for the copies: they go on streams of their own, and whichever gradient comes next, or the
    end of backward, hands on those that have arrived.
    """

    def __init__(self, core: _C.Reducer, params: Sequence[torch.Tensor]) -> None:
        self.core = core
        self.gradients = [torch.zeros_like(p, requires_grad=False) for p in params]
        self._hosts = [_host_like(gradient) for gradient in self.gradients]
        self._streams: dict[torch.device, Any] = {}
        self._returned: list[Any] = []  # events, behind the copies to the devices
        self._reset()

    def _reset(self) -> None:
        self._ready: dict[int, None] = {}
        self._coming: deque[tuple[int, Any]] = deque()  # in the order in which they were ready

    def __getattr__(self, name: str) -> Any:
        """What is left to the core."""
        return getattr(self.core, name)

    def mark_ready(self, param: int, gradient_ptr: int = 0) -> bool:
        if gradient_ptr:
            raise ArgumentError("gradients on a device are copied by stream, not from addresses")
        if param in self._ready:
            return False
        self._ready[param] = None
        self._coming.append((param, self._copy_out(param)))
        self._hand_on(waits=False)
        return True

    def _copy_out(self, param: int) -> Any:
        """An event behind the copy; None: it is done."""
        gradient, host = self.gradients[param], self._hosts[param]
        if host is gradient:
            return None
        if not has_streams(gradient):
            host.copy_(gradient)
            return None
        stream = self._streams.get(gradient.device)
        if stream is None:
            stream = self._streams[gradient.device] = torch.cuda.Stream(gradient.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(stream):
            host.copy_(gradient, non_blocking=True)
        gradient.record_stream(stream)
        return stream.record_event()

    def _hand_on(self, waits: bool) -> None:
        while self._coming:
            param, copied = self._coming[0]
            if copied is not None and waits:
                copied.synchronize()
            elif copied is not None and not copied.query():
                return
            self._coming.popleft()
            self.core.mark_ready(param, self._hosts[param].data_ptr())

    def finish(self) -> list[int]:
        try:
            self._hand_on(waits=True)
            unused = self.core.finish()
        finally:
            self._reset()
        for event in self._returned:  # what is in the host's memory now was read
            event.synchronize()
        without = set(unused)
        for i in range(len(self.gradients)):
            if i not in without:
                self._take_back(i)
        on_devices = {gradient.device for gradient in self.gradients if has_streams(gradient)}
        self._returned = [torch.cuda.current_stream(device).record_event() for device in on_devices]
        return unused

    def _take_back(self, param: int) -> None:
        gradient, host = self.gradients[param], self._hosts[param]
        if gradient.numel() == 0:
            return
        buffer, start = self.core.gradient(param)
        flat = torch.frombuffer(buffer, dtype=gradient.dtype, count=gradient.numel(), offset=start)
        host.as_strided(flat.shape, (1,)).copy_(flat)  # both are dense
        if host is not gradient:
            gradient.copy_(host, non_blocking=True)

    def abandon(self) -> int:
        self._reset()
        return self.core.abandon()

    def missing(self) -> list[int]:
        return [i for i in range(len(self.gradients)) if i not in self._ready]

    def move(self, params: Sequence[int]) -> list[int]:
        for i in params:
            on_device = self._hosts[i] is not self.gradients[i]
            self.gradients[i] = torch.empty_like(self.gradients[i])
            if not on_device:
                self._hosts[i] = self.gradients[i]
        return list(params)


def has_streams(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_available()


def _host_like(gradient: torch.Tensor) -> torch.Tensor:
    """Memory for its copy, as dense as it is; of the CPU's, itself."""
    if gradient.is_cpu:
        return gradient
    return torch.empty_like(gradient, device="cpu", pin_memory=has_streams(gradient))
