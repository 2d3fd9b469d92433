"""Checks of all-reduces that are computed on a device, in memory that ranks have opened of each other.

With DCOLL_DEVICE=emulated on any machine, else on a GPU. DCOLL_GPU_ENGINE=host has the same results by the host.
"""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tested_device import DEVICE, EMULATED

import dcoll as hvd
from dcoll import _C
from dcoll.collectives import memory

BY_HOST = os.environ.get("DCOLL_GPU_ENGINE") == "host" or os.environ.get("DCOLL_TRANSPORT") == "mpi"
SMALL = 64 << 10  # bytes


def filled(count: int, dtype: torch.dtype, shared: bool) -> torch.Tensor:
    """Small whole numbers that are another on each rank, in memory that others open or in torch's."""
    one = (torch.arange(count, device=DEVICE) % 7 + hvd.rank() + 1).to(dtype)
    return hvd.empty(count, dtype, device=DEVICE).copy_(one) if shared else one


def expected(count: int, dtype: torch.dtype, reduce: Callable[[list[torch.Tensor]], torch.Tensor]) -> torch.Tensor:
    base = torch.arange(count, device=DEVICE) % 7
    return reduce([(base + r + 1).to(dtype) for r in range(hvd.size())])


def total(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts).sum(0).to(parts[0].dtype)


def ways_of(run: Callable[[], object]) -> set[str]:
    """The algorithms that a timeline names for what is run."""
    path = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, 0)
    file = Path(str(path)) / "timeline.json"
    hvd.start_timeline(str(file))
    run()
    hvd.stop_timeline()
    hvd.barrier()
    found: set[str] = set()
    if hvd.rank() == 0:
        events: list[dict[str, Any]] = json.loads(file.read_text())
        found = {str(event["name"]) for event in events if event.get("cat") == "algorithm"}
    return set(hvd.broadcast_object(sorted(found), 0))


def check_which_way_it_takes() -> None:
    if hvd.size() == 1:
        return
    long = filled(SMALL, torch.float32, shared=True)
    hvd.allreduce(long)  # by which it is found out
    for count, form in ((10, "each rank all"), (SMALL, "two-shot")):
        for shared in (True, False):
            one = filled(count, torch.float32, shared)
            found = ways_of(lambda one=one: hvd.allreduce_(one))  # type: ignore[misc]
            assert any(name.startswith("device") for name in found) is not BY_HOST, found
            assert BY_HOST or found == {f"device, {form}"}


def check_sizes_and_places() -> None:
    """In place and not, and with some of the ranks' tensors where others cannot open them."""
    edge = SMALL // 4
    for count in (0, 1, hvd.size() - 1, 1023, edge, edge + 1, 70_001, 1_000_003):
        want = expected(count, torch.float32, total)
        for shared in (True, False, hvd.rank() == 0, hvd.rank() > 0):
            one = filled(count, torch.float32, shared)
            assert torch.equal(hvd.allreduce(one, op=hvd.Sum), want)
            assert hvd.allreduce_(one, op=hvd.Sum) is one
            assert torch.equal(one, want)


def check_dtypes_and_operators() -> None:
    whole = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, *whole):
        for count in (33, 70_001):
            for op, reduce in (
                (hvd.Sum, total),
                (hvd.Min, lambda parts: torch.stack(parts).amin(0)),
                (hvd.Max, lambda parts: torch.stack(parts).amax(0)),
            ):
                one = filled(count, dtype, shared=True)
                hvd.allreduce_(one, op=op)
                assert torch.equal(one, expected(count, dtype, reduce)), (dtype, op)
    truth = filled(70_001, torch.int32, shared=False) % 2 == 1
    one = hvd.empty(70_001, torch.bool, device=DEVICE).copy_(truth)
    want = expected(70_001, torch.int32, lambda parts: (torch.stack(parts) % 2 == 1).any(0))
    assert torch.equal(hvd.allreduce(one, op=hvd.Max), want)


def check_scales() -> None:
    for count in (5, 70_001):
        for shared in (True, False):
            one = filled(count, torch.float32, shared)
            want = expected(count, torch.float32, total)
            assert torch.equal(hvd.allreduce(one, op=hvd.Sum, prescale_factor=0.5), want * 0.5)
            assert torch.equal(hvd.allreduce(one, op=hvd.Sum, prescale_factor=2.0, postscale_factor=4.0), want * 8)
            hvd.allreduce_(one, op=hvd.Sum, postscale_factor=0.25)
            assert torch.equal(one, want * 0.25)


def check_parts_of_a_tensor() -> None:
    """Rows of one tensor in shared memory: in place, next to each other, in flight at once, and another one's."""
    one = filled(4 * 50_000, torch.float32, shared=True).view(4, 50_000)
    want = expected(4 * 50_000, torch.float32, total).view(4, 50_000)
    handles = [hvd.allreduce_async_(one[row], op=hvd.Sum) for row in (0, 2)]
    handles += [hvd.allreduce_async_(one[1], op=hvd.Sum, name="row 1")]
    before = one[3].clone()
    for handle in handles:
        handle.wait(30)
    assert torch.equal(one[:3], want[:3])
    assert torch.equal(one[3], before)
    last = hvd.size() - 1  # on one rank the rows lie elsewhere
    row = one[3] if hvd.rank() == last else one[3].clone()
    assert torch.equal(hvd.allreduce_(row, op=hvd.Sum), want[3])


def check_what_is_longer_than_a_slice() -> None:
    count = (32 << 20) // 4 + 12_345
    want = expected(count, torch.float32, total)
    for shared in (False, hvd.rank() == 0):
        one = filled(count, torch.float32, shared)
        hvd.allreduce_(one, op=hvd.Sum)
        assert torch.equal(one, want)


def check_a_set_and_its_own_memory() -> None:
    """Blocks and lists of memory go with the communicator they are of."""
    if hvd.size() < 3:
        return  # it would be the set of all
    for _ in range(3):
        some = hvd.add_process_set([0, hvd.size() - 1])
        if some.included():
            one = filled(70_001, torch.float32, shared=True)
            out = hvd.allreduce(one, op=hvd.Sum, process_set=some)
            base = torch.arange(70_001, device=DEVICE) % 7
            assert torch.equal(out, (2 * base + hvd.size() + 1).to(torch.float32))
        hvd.remove_process_set(some)


def check_memory_is_used_again() -> None:
    """It is zeros again, also where work on what was there before is still to be done."""
    for _ in range(8):
        one = filled(1 << 20, torch.float32, shared=True)
        hvd.allreduce_(one, op=hvd.Sum)
        del one
        again = hvd.empty(1 << 20, device=DEVICE)
        assert not again.any()


def check_side_by_side() -> None:
    tensors = [torch.ones(3, 5, device=DEVICE).t(), torch.ones(0, device=DEVICE), torch.ones(70_001, device=DEVICE)]
    doubles = [torch.ones(3, dtype=torch.float64, device=DEVICE)]
    made = memory.zeros_side_by_side([tensors, doubles, [torch.ones(0, device=DEVICE)]])
    for (flat, pieces), group in zip(made, (tensors, doubles, [torch.ones(0)]), strict=True):
        assert not flat.any()
        for piece, tensor in zip(pieces, group, strict=True):
            assert piece.shape == tensor.shape
            assert piece.stride() == tensor.stride()
            assert piece.dtype == tensor.dtype
            assert piece.untyped_storage().nbytes() == tensor.nbytes
            piece.fill_(hvd.rank() + 1)
        hvd.allreduce_(flat, op=hvd.Sum)
        assert all((piece == hvd.size() * (hvd.size() + 1) // 2).all() for piece in pieces)
    with pytest.raises(hvd.ArgumentError, match="must lie in the buffer"):
        _C.DeviceBuffer(_C.EMULATED_DEVICE if EMULATED else 0, 100).part(99, 2)


def check_others_that_do_not_agree() -> None:
    if hvd.size() == 1:
        return
    for shared in (True, False):
        count = 70_001 if hvd.rank() == 0 else 70_002
        with pytest.raises(hvd.MismatchError, match=r"sum of 70002 float32"):
            hvd.allreduce(filled(count, torch.float32, shared), op=hvd.Sum)
        out = hvd.allreduce(filled(70_001, torch.float32, shared), op=hvd.Sum)
        assert torch.equal(out, expected(70_001, torch.float32, total))


def check_ranks_that_have_joined() -> None:
    for count in (10, 70_001, 1_500_001):
        one = filled(count, torch.float32, shared=True)
        if hvd.rank() > 0:
            base = torch.arange(count, device=DEVICE) % 7
            want = sum((base + r + 1).to(torch.float32) for r in range(1, hvd.size()))
            assert torch.equal(hvd.allreduce(one, op=hvd.Sum), want)
            hvd.allreduce_(one, op=hvd.Sum)
            assert torch.equal(one, want)
        hvd.join()
        assert torch.equal(
            hvd.allreduce(filled(count, torch.float32, shared=True), op=hvd.Sum), expected(count, torch.float32, total)
        )


def check_a_rank_whose_memory_cannot_be_opened() -> None:
    """Last: the job has to start again. All go by the host then, from the first call or a later one, optimizers too."""
    if not EMULATED:
        return
    last = hvd.size() - 1
    for later in (False, True):
        hvd.shutdown()
        hvd.init()
        if later:
            hvd.allreduce(filled(SMALL, torch.float32, shared=True))
        if hvd.rank() == last:
            _C.share_emulated(False)
        one = filled(70_001, torch.float32, shared=True)
        hvd.allreduce_(one, op=hvd.Sum)
        assert torch.equal(one, expected(70_001, torch.float32, total))
        if hvd.rank() > 0:  # operations by name, which have not agreed on it yet, while a rank has joined
            part = filled(1_500_001, torch.float32, shared=True)
            base = torch.arange(1_500_001, device=DEVICE) % 7
            want = sum((base + r + 1).to(torch.float32) for r in range(1, hvd.size()))
            assert torch.equal(hvd.allreduce(part, op=hvd.Sum, name="by name"), want)
        hvd.join()
        weights = [torch.zeros(200, 100, device=DEVICE, requires_grad=True), torch.zeros(3, requires_grad=True)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), op=hvd.Sum)
        for step in range(4):
            optimizer.zero_grad()
            (weights[0].sum() * (hvd.rank() + step) + weights[1].sum()).backward()
            optimizer.step()
        n = hvd.size()
        assert (weights[0] == -sum(r + step for r in range(n) for step in range(4))).all()
        assert (weights[1] == -4 * n).all()
        _C.share_emulated(True)
    hvd.shutdown()
    hvd.init()
