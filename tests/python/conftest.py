"""Fixtures of the tests that need no mpirun."""

from collections.abc import Iterator

import pytest

from dcoll import _C
from dcoll.world import WORLD


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As after init() in a process alone, for the functions of the package."""
    comm = _C.connect_local(1)[0]
    monkeypatch.setattr(WORLD, "comm", comm)
    _C.set_job(comm)
    yield
    _C.set_job(None)
