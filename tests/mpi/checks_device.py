"""Checks of collectives on tensors of a device: with DCOLL_DEVICE=emulated on any machine, else on a GPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tested_device import DEVICE, EMULATED, NAME

import dcoll as hvd
from dcoll import _C
from dcoll.collectives import on_communicator
from dcoll.job import world
from dcoll.optimizer.host_reducer import HostReducer


def mine(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((count,), hvd.rank() + 1, dtype=dtype, device=DEVICE)


def is_filled(tensor: torch.Tensor, value: float, count: int) -> bool:
    want = torch.full((count,), value, dtype=tensor.dtype, device=DEVICE)
    return tensor.device.type == DEVICE.type and torch.equal(tensor, want)


def check_what_is_used_is_the_device() -> None:
    from dcoll.collectives.tensors import library
    from dcoll.job.world import communicator

    assert library("torch").on_device(mine(1))
    on = library("torch").on(communicator(), mine(1))
    assert on.device == (_C.EMULATED_DEVICE if EMULATED else torch.cuda.current_device())


def check_sizes_and_repeats() -> None:
    n = hvd.size()
    total = n * (n + 1) // 2
    for count in (0, 1, 2, 1023, 70_000, 1_000_003):
        for _ in range(3):  # memory of the last is used again
            one = mine(count)
            assert is_filled(hvd.allreduce(one, op=hvd.Sum), total, count)
            assert hvd.allreduce_(one, op=hvd.Sum) is one
            assert is_filled(one, total, count)


def check_what_is_copied_in_slices() -> None:
    """Of 4 MiB: a call that is longer is one call all the same."""
    n = hvd.size()
    total = n * (n + 1) // 2
    for count, dtype in ((1 << 20, torch.float32), ((1 << 20) + 1, torch.float32), (3_000_001, torch.float16)):
        one = (torch.arange(count, device=DEVICE) % 61).to(dtype)
        handles = [hvd.allreduce_async(one * (hvd.rank() + 1), op=hvd.Sum) for _ in range(2)]
        handles.append(hvd.allreduce_async(one * (hvd.rank() + 1), op=hvd.Sum, name=f"sliced {count}"))
        here = one * (hvd.rank() + 1)
        hvd.allreduce_(here, op=hvd.Sum)
        assert torch.equal(here, one * total)
        assert all(torch.equal(handle.wait(30), one * total) for handle in handles)
        here = one * (hvd.rank() + 1)
        hvd.broadcast_(here, root_rank=n - 1)
        assert torch.equal(here, one * n)
        assert torch.equal(hvd.broadcast(one + hvd.rank(), root_rank=0), one)


def check_slices_where_a_rank_has_joined() -> None:
    n = hvd.size()
    for op, want in ((hvd.Sum, sum(range(2, n + 1))), (hvd.Min, 2)):
        if hvd.rank() > 0:
            one = torch.arange(3_000_001, dtype=torch.float64, device=DEVICE)
            assert torch.equal(hvd.allreduce(one * (hvd.rank() + 1), op=op), one * want)
            assert is_filled(hvd.allreduce(mine(5), op=op), want, 5)
        hvd.join()


def check_slices_of_other_calls() -> None:
    if hvd.size() == 1:
        return
    other = hvd.rank() == 0
    with pytest.raises(hvd.MismatchError, match=r"sum of 3000002 float32.*sum of 3000001 float32"):
        hvd.allreduce(mine(3_000_002 if other else 3_000_001), op=hvd.Sum)
    long = mine(3_000_001)
    with pytest.raises(hvd.MismatchError, match="sum of 3000001 float32"):
        hvd.broadcast(long, root_rank=1) if other else hvd.allreduce(long, op=hvd.Sum)
    assert is_filled(hvd.allreduce(mine(5), op=hvd.Min), 1, 5)


def check_many_in_flight() -> None:
    n = hvd.size()
    total = n * (n + 1) // 2
    counts = [1, 100_000, 17, 0, 30_000]
    handles = [hvd.allreduce_async(mine(count), op=hvd.Sum, name=f"of {count}") for count in counts]
    handles += [hvd.allreduce_async_(mine(count), op=hvd.Sum) for count in counts]
    for handle, count in zip(handles, [*counts, *counts], strict=True):
        assert is_filled(handle.wait(30), total, count)
        assert hvd.poll(handle)


def check_poll_tells_that_the_result_is_there() -> None:
    one = mine(100_000)
    handle = hvd.allreduce_async_(one, op=hvd.Max)
    while not hvd.poll(handle):
        pass
    assert is_filled(one, hvd.size(), 100_000)
    hvd.synchronize(handle)


def check_a_dropped_handle() -> None:
    one = mine(50_000)
    hvd.allreduce_async_(one, op=hvd.Sum)
    hvd.barrier()
    assert is_filled(hvd.allreduce(mine(5), op=hvd.Min), 1, 5)


def check_groups() -> None:
    n = hvd.size()
    some = [mine(3), mine(40_000, torch.float64), mine(5, torch.int32)]
    for out, one in zip(hvd.grouped_allreduce(some, op=hvd.Sum), some, strict=True):
        assert is_filled(out, n * (n + 1) // 2, one.numel())
        assert out.dtype == one.dtype
    for out, one in zip(hvd.grouped_allgather(some), some, strict=True):
        assert torch.equal(out.cpu(), torch.arange(1, n + 1, dtype=one.dtype).repeat_interleave(one.numel()))
    for out in hvd.grouped_reducescatter([mine(4 * n), mine(6 * n)], op=hvd.Max):
        assert is_filled(out, n, out.numel())
    mixed = hvd.grouped_allreduce([mine(3), np.full(3, hvd.rank() + 1.0)], op=hvd.Max)
    assert is_filled(mixed[0], n, 3)
    assert (mixed[1] == n).all()


def operations(run: Callable[[], object]) -> list[str]:
    """The names of the all-reduces that are started meanwhile, in place or not."""
    names: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        start = on_communicator.allreduce

        def noted(*args: Any, **options: Any) -> Any:
            names.append(args[3])
            return start(*args, **options)

        patch.setattr(on_communicator, "allreduce", noted)
        run()
    return names


def check_a_group_travels_as_one() -> None:
    n = hvd.size()
    total = n * (n + 1) // 2
    some = [mine(6).view(2, 3), mine(0), mine(4, torch.float64), mine(12).view(3, 4).t(), mine(1).view(())]
    results: list[torch.Tensor] = []
    names = operations(lambda: results.extend(hvd.grouped_allreduce(some, op=hvd.Sum, name="g")))
    assert names == ["g[2]", "g[0]"]
    names = operations(lambda: hvd.grouped_allreduce_(some, op=hvd.Sum, name="g"))
    assert names == ["g[0]", "g[2]"]
    for one, out in zip(some, results, strict=True):
        assert one.shape == out.shape
        assert one.dtype == out.dtype
        assert (one == total).all()
        assert torch.equal(one, out)
        assert out.numel() == 0 or out.untyped_storage().nbytes() == out.nbytes
    if n > 1:
        shape = (2, 3) if hvd.rank() == 0 else (3, 2)
        with pytest.raises(hvd.MismatchError, match="2 tensors: 3x2, 4"):
            hvd.grouped_allreduce([mine(6).view(shape), mine(4)], name="other shapes")
    assert is_filled(hvd.allreduce(mine(5), op=hvd.Min), 1, 5)


def check_gradients_travel_in_buckets() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(5)), torch.nn.Linear(4, 1).double()).to(DEVICE)
    params = list(model.parameters())
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(params, lr=0.0), model.named_parameters(), compression=compression
        )

        def step(optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            out = model[:5](torch.full((2, 4), hvd.rank() + 1.0, device=DEVICE))
            model[5](out.double()).sum().backward()
            optimizer.step()

        step()
        names = [name for name in operations(step) if "which gradients" not in name]
        assert optimizer._dcoll._reducer.num_buckets() == 2
        if hvd.size() > 1 and not isinstance(optimizer._dcoll._reducer, HostReducer):  # whose buckets are the core's
            assert len(names) == 2, names
        grads = hvd.allgather_object([p.grad.detach().cpu() for p in params if p.grad is not None])
        assert len(grads[0]) == len(params)
        assert all(torch.equal(a, b) for one in grads for a, b in zip(one, grads[0], strict=True))


def check_a_process_set() -> None:
    last = hvd.size() - 1
    some = hvd.add_process_set([0, last]) if hvd.size() > 2 else hvd.global_process_set
    if some.included():
        assert is_filled(hvd.allreduce(mine(1000), op=hvd.Max, process_set=some), last + 1, 1000)


def check_a_model_learns_alike() -> None:
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(DEVICE)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    plain = [p.detach().clone() for p in model.parameters()]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.25), named_parameters=model.named_parameters()
    )
    data = [torch.randn(4, 8, generator=torch.Generator().manual_seed(r)).to(DEVICE) for r in range(hvd.size())]
    for _ in range(3):
        optimizer.zero_grad()
        model(data[hvd.rank()]).square().mean().backward()
        optimizer.step()
    state = hvd.allgather_object([p.detach().cpu() for p in model.parameters()])
    for one in state:
        assert all(map(torch.equal, one, state[0]))
    assert not all(map(torch.equal, plain, [p.detach() for p in model.parameters()]))


def check_options_of_the_optimizer() -> None:
    compression = hvd.Compression
    options: list[dict[str, Any]] = [
        {"compression": compression.fp16},
        {"compression": compression.bf16},
        {"compression": compression.powersgd(2)},
        {"compression": compression.int8},
        {"compression": compression.topk(ratio=1.0)},
        {"compression": compression.auto("int8")},
        {"compression": compression.auto("bf16")},
        {"compression": compression.auto()},
        {"check_sync": 1},
    ]
    for some in options:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4).to(DEVICE)
        named = list(model.named_parameters())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.25), named, **some)
        before = model.weight.detach().clone()
        model(torch.full((2, 8), hvd.rank() + 1 + 2.0**-11, device=DEVICE)).sum().backward()
        optimizer.step()
        everyones = hvd.allgather_object(model.weight.detach().cpu())
        assert all(torch.equal(one, everyones[0]) for one in everyones)
        # What is so small is not encoded, and 16 bits have no room for it: the average is exactly n + 1 + 2^-10.
        want = torch.full((4, 8), (hvd.size() + 1 + 2.0**-10) / 4, device=DEVICE)
        torch.testing.assert_close(before - model.weight.detach(), want, rtol=1e-6, atol=1e-6)


def check_host_here_and_device_there() -> None:
    if hvd.size() == 1:
        return
    one: Any = np.ones(4, np.float32) if hvd.rank() == 0 else mine(4)
    with pytest.raises(hvd.MismatchError, match=f"on {NAME}"):
        hvd.allreduce(one, op=hvd.Sum)
    assert is_filled(hvd.allreduce(mine(4), op=hvd.Max), hvd.size(), 4)


def check_a_gpu_that_is_not_there() -> None:
    comm = _C.OnDevice(world.communicator(), 77)
    with pytest.raises(hvd.ArgumentError, match="cuda:77"):
        comm.allreduce_sync(0, 0, 0, _C.FLOAT32, hvd.Sum)
    assert is_filled(hvd.allreduce(mine(4), op=hvd.Max), hvd.size(), 4)


def check_capture_in_a_graph_is_refused() -> None:
    if EMULATED:
        return
    one = mine(1000)
    with (
        pytest.raises(hvd.ArgumentError, match=r"outside of torch\.cuda\.graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        hvd.allreduce_(one, op=hvd.Sum)
    assert is_filled(hvd.allreduce(mine(4), op=hvd.Max), hvd.size(), 4)


def _reduce_often(count: int) -> None:
    for _ in range(6):
        hvd.allreduce(mine(count), op=hvd.Sum)


def check_a_device_that_fails() -> None:
    """Last: the job has to start again. The device fails before there is a call; or a copy or a kernel, of the first
    call or of a later one, or of the trial of the ranks' memory; of a long call by the host the third slice, the first
    copy back, or the last."""
    if not EMULATED:
        return
    failing = hvd.size() - 1
    for count, pieces in ((1000, 0), (1000, 1), (1000, 4), (3_000_001, 2), (3_000_001, 3), (3_000_001, 5)):
        if hvd.rank() == failing:
            _C.fail_emulated_after(pieces)
        with pytest.raises(hvd.DcollError, match=f"emulated:0: .*rank {failing}"):
            _reduce_often(count)
        _C.fail_emulated_after(-1)
        hvd.shutdown()
        hvd.init()
        assert is_filled(hvd.allreduce(mine(1000), op=hvd.Max), hvd.size(), 1000)
