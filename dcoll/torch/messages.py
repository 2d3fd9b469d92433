"""send and recv."""

from collections.abc import Sequence

import torch

from dcoll.errors import ArgumentError
from dcoll.torch.calls import Calls
from dcoll.torch.memory import copy_back, dense, one
from dcoll.torch.work import Work

ANY = -1
_TAGS = 1 << 31


def _check_tag(what: str, tag: int) -> None:
    if not -_TAGS <= tag < _TAGS:
        raise ArgumentError(f"{what} got tag {tag}, but takes numbers of 32 bits: {-_TAGS} to {_TAGS - 1}")


class Messages(Calls):
    def send(self, tensors: Sequence[torch.Tensor], dstRank: int, tag: int = 0) -> Work:
        tensor = one("send", tensors)
        source = dense("send", tensor)
        _check_tag("send", tag)
        core = self._on(source).isend(source.data_ptr(), source.nbytes, dstRank, tag)
        return self._start(core, source, [tensor], messages=True)

    def recv(self, tensors: Sequence[torch.Tensor], srcRank: int, tag: int = 0) -> Work:
        tensor = one("recv", tensors)
        target = dense("recv", tensor)
        _check_tag("recv", tag)
        core = self._on(target).irecv(target.data_ptr(), target.nbytes, srcRank, tag)
        return self._start(core, target, [tensor], copy_back(tensor, target), messages=True)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> Work:
        return self.recv(tensors, ANY, tag)

    recvAnysource = recv_anysource
