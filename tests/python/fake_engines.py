"""Engines that misbehave, for test_bench_peers.py. They sum over nothing: every rank has its own numbers."""

import time

from adapters import Adapter


class Exact(Adapter):
    """Writes the right result without having communicated."""

    def join(self, args, share):
        if share("from rank 0" if self.rank == 0 else None) != "from rank 0":
            raise RuntimeError("the shared value did not arrive")

    def bind(self, variant, raw):
        return lambda: self.result_into(raw)

    def result_into(self, raw):
        for part in self._pattern._blocks(raw):
            part[:] = self._pattern.result[: len(part)]

    def info(self):
        return {"label": "fake"}


class Wrong(Exact):
    """One element of rank 1 is not the sum."""

    def result_into(self, raw):
        super().result_into(raw)
        if self.rank == 1:
            raw[-1] += 1


class HangsWhenCalled(Exact):
    """Rank 1 never comes back from a call on 64 bytes or more."""

    def result_into(self, raw):
        if self.rank == 1 and len(raw) >= 64:
            time.sleep(3600)


class HangsAtStart(Exact):
    """Rank 1 is never ready."""

    def join(self, args, share):
        if self.rank == 1:
            time.sleep(3600)


class FailsAtStart(Exact):
    """Cannot join."""

    def join(self, args, share):
        raise RuntimeError("no such fabric")


class DiesWhenCalled(Exact):
    """Rank 0's process ends in a call."""

    def result_into(self, raw):
        if self.rank == 0:
            print("something about a segment", flush=True)
            import os

            os._exit(7)


class RaisesWhenCalled(Exact):
    """Rank 1's call raises."""

    def result_into(self, raw):
        if self.rank == 1:
            raise ValueError("unsupported today")
