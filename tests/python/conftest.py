"""Fixtures of the tests that need no mpirun."""

import signal
from collections.abc import Iterator

import pytest
import torch

from dcoll import _C
from dcoll.collectives import tensors
from dcoll.job.world import WORLD


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As after init() in a process alone, for the functions of the package."""
    comm = _C.connect_local(1)[0]
    monkeypatch.setattr(WORLD, "comm", comm)
    _C.set_job(comm)
    yield
    _C.set_job(None)


@pytest.fixture(params=["generic", "avx2", "avx512", "avx512vnni"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The core's kernels for each set of instructions that this CPU has."""
    before = _C.kernels.active_isa()
    if not _C.kernels.set_isa(request.param):
        pytest.skip(f"needs {request.param}: this CPU has none")
    yield request.param
    _C.kernels.set_isa(before)


@pytest.fixture(params=["exchange", "methods"])
def reader(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways of reading torch's tensors: DLPack's C exchange API, and methods for versions of torch without it."""
    written = tensors._version_counter(torch)
    tensors.library("numpy")
    has_exchange = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    if request.param == "exchange" and not has_exchange:
        pytest.skip("needs torch: this one has no exchange API")
    assert _C.use_torch(torch, written, request.param == "exchange") is (request.param == "exchange")
    yield request.param
    assert _C.use_torch(torch, written) is has_exchange


@pytest.fixture
def ctrl_c_counts() -> Iterator[None]:
    """A shell starts background jobs, and all they start, with SIGINT ignored; then Python installs no handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
