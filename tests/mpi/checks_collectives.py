"""Checks of every collective under Horovod's names. The exhaustive ones are in tests/python, on ranks as threads."""

import ctypes
import functools
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from reference import DTYPES, layouts, ops_of, reduced, sample, sizes_for

import dcoll as hvd


def check_topology() -> None:
    assert hvd.is_initialized()
    assert hvd.size() == len(set(hvd.allgather_object(hvd.rank())))
    pretended = os.environ.get("DCOLL_NODES", "0").split(",")
    nodes = [pretended[rank % len(pretended)] for rank in range(hvd.size())]
    mine = nodes[hvd.rank()]
    assert hvd.local_size() == nodes.count(mine)
    assert hvd.local_rank() == nodes[: hvd.rank()].count(mine)
    peers = [node for node in sorted(set(nodes)) if nodes.count(node) > hvd.local_rank()]
    assert (hvd.cross_rank(), hvd.cross_size()) == (peers.index(mine), len(peers))
    assert hvd.is_homogeneous() == (len({nodes.count(node) for node in set(nodes)}) == 1)
    assert hvd.mpi_enabled() == ("WORLD_SIZE" not in os.environ)  # torchrun's
    assert hvd.mpi_built() or not hvd.mpi_enabled()
    assert hvd.mpi_threads_supported() in (True, False)


def check_allreduce() -> None:
    n = hvd.size()
    for dtype in DTYPES:
        for op in ops_of(dtype):
            for count in sizes_for(n):
                inputs = [sample(rank, count, dtype, op) for rank in range(n)]
                want, mine = reduced(inputs, op), inputs[hvd.rank()]
                assert torch.equal(hvd.allreduce(mine, op=op, name="x"), want), (dtype, op, count)
                handle = hvd.allreduce_async(mine, op=op)
                assert torch.equal(hvd.synchronize(handle), want), (dtype, op, count)
                assert hvd.poll(handle)
                assert hvd.allreduce_(mine, op=op) is mine
                assert torch.equal(mine, want), (dtype, op, count)


def check_allreduce_large() -> None:
    n, count = hvd.size(), 3_000_001
    inputs = [sample(rank, count, torch.float32, hvd.Sum) for rank in range(n)]
    want = reduced(inputs, hvd.Sum)
    mapped = hvd.empty(count, torch.float32)
    assert not mapped.any()
    mapped.copy_(inputs[hvd.rank()])
    for mine in (mapped, inputs[hvd.rank()]):
        assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), want)
        assert hvd.synchronize(hvd.allreduce_async_(mine, op=hvd.Sum)) is mine
        assert torch.equal(mine, want)


def check_allreduce_layouts() -> None:
    n = hvd.size()
    base = [sample(rank, 120, torch.float64, hvd.Sum).view(2, 3, 4, 5) for rank in range(n)]
    want = reduced(base, hvd.Average)
    for name, mine in layouts(base[hvd.rank()]).items():
        assert torch.equal(hvd.allreduce(mine), want), name
        hvd.allreduce_(mine)
        assert torch.equal(mine, want), name


def check_algorithm_per_call() -> None:
    n = hvd.size()
    inputs = [sample(rank, 20_001, torch.float32, hvd.Sum) for rank in range(n)]
    want, mine = reduced(inputs, hvd.Sum), inputs[hvd.rank()]
    for algo in ("auto", "ring", "tree", "halving_doubling", "recursive_doubling", "direct", "hierarchical"):
        assert torch.equal(hvd.allreduce(mine, op=hvd.Sum, algo=algo), want), algo
        assert torch.equal(hvd.allreduce_(mine.clone(), op=hvd.Sum, algo=algo), want), algo
        assert torch.equal(hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Sum, algo=algo)), want), algo
        assert torch.equal(hvd.synchronize(hvd.allreduce_async_(mine.clone(), op=hvd.Sum, algo=algo)), want), algo
    x = torch.ones(5, requires_grad=True)
    hvd.allreduce(x, op=hvd.Sum, algo="tree").sum().backward()
    assert torch.equal(x.grad, torch.full((5,), float(n)))
    with pytest.raises(hvd.ArgumentError, match=r"no algorithm 'rong'; allowed are auto, .*ring"):
        hvd.allreduce(mine, algo="rong")
    if n > 1:
        with pytest.raises(hvd.MismatchError, match="algo ring"):
            hvd.allreduce(mine, algo="ring" if hvd.rank() == 0 else "tree")


def check_scalars_and_factors() -> None:
    n, r = hvd.size(), hvd.rank()
    scalar = torch.tensor(float(r))
    for out in (hvd.allreduce(scalar, op=hvd.Sum), hvd.allreduce_async(scalar, op=hvd.Sum).wait()):
        assert out.shape == ()
        assert out.item() == n * (n - 1) / 2
    assert hvd.broadcast(scalar, n - 1).item() == n - 1
    assert hvd.allreduce_(scalar, op=hvd.Max) is scalar
    assert scalar.item() == n - 1
    nothing = torch.empty(0, 3)
    assert hvd.allreduce(nothing).shape == hvd.allgather(nothing).shape == hvd.broadcast(nothing, 0).shape == (0, 3)
    factors = {"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 4.0}
    for call in (
        hvd.allreduce, hvd.allreduce_, lambda x, **given: hvd.allreduce_async(x, **given).wait(),
        lambda x, **given: hvd.allreduce_async_(x, **given).wait(),
        lambda x, **given: hvd.grouped_allreduce([x], **given)[0],
        lambda x, **given: hvd.grouped_allreduce([x], compression=hvd.Compression.fp16, **given)[0],
        lambda x, **given: hvd.grouped_allreduce_([x], **given)[0],
        lambda x, **given: hvd.grouped_allreduce_async_([x], **given).wait()[0],
        lambda x, **given: hvd.grouped_allreduce_async([x], **given).wait()[0],
        lambda x, **given: hvd.allgather(hvd.reducescatter(x, **given)),
        lambda x, **given: hvd.allgather(hvd.reducescatter_async(x, **given).wait()),
        lambda x, **given: hvd.allgather(hvd.reducescatter(x, compression=hvd.Compression.fp16, **given)),
        lambda x, **given: hvd.allgather(hvd.grouped_reducescatter([x], **given)[0]),
        lambda x, **given: hvd.allgather(hvd.grouped_reducescatter_async([x], **given).wait()[0]),
    ):  # fmt: skip
        assert call(torch.full((n,), 3.0), **factors).tolist() == [6.0 * n] * n


def check_deprecated_average() -> None:
    x = torch.tensor([float(hvd.rank())])
    with pytest.warns(DeprecationWarning, match="average="):
        assert hvd.allreduce(x, average=False).item() == sum(range(hvd.size()))
    with pytest.warns(DeprecationWarning, match="average="):
        assert torch.equal(hvd.allreduce(x, True), hvd.allreduce(x, op=hvd.Average))
    with pytest.raises(ValueError, match="op="):
        hvd.allreduce(x, average=True, op=hvd.Sum)
    total = sum(range(hvd.size()))
    for call in (
        lambda: hvd.allreduce_(x.clone(), False),
        lambda: hvd.allreduce_async(x, False).wait(),
        lambda: hvd.allreduce_async_(x.clone(), False).wait(),
        lambda: hvd.grouped_allreduce([x], False)[0],
        lambda: hvd.grouped_allreduce_([x.clone()], False)[0],
        lambda: hvd.grouped_allreduce_async([x], False).wait()[0],
        lambda: hvd.grouped_allreduce_async_([x.clone()], False).wait()[0],
    ):
        with pytest.warns(DeprecationWarning, match="average="):
            assert call().item() == total


def check_numpy() -> None:
    n, r = hvd.size(), hvd.rank()
    x = np.arange(6, dtype=np.float32).reshape(2, 3) + r
    np.testing.assert_array_equal(hvd.allreduce(x, op=hvd.Sum), n * np.arange(6).reshape(2, 3) + n * (n - 1) // 2)
    np.testing.assert_array_equal(
        hvd.allgather(x[: r % 2 + 1]),
        np.concatenate([(np.arange(6, dtype=np.float32).reshape(2, 3) + k)[: k % 2 + 1] for k in range(n)]),
    )
    np.testing.assert_array_equal(hvd.broadcast(x.T, 0), np.arange(6).reshape(2, 3).T)
    assert hvd.reducescatter(np.arange(n, dtype=np.int64), op=hvd.Sum).tolist() == [r * n]
    assert hvd.alltoall(np.arange(n) + 10 * r).tolist() == [10 * k + r for k in range(n)]
    own = hvd.empty_like(x)
    assert type(own) is np.ndarray
    own[...] = r
    hvd.allreduce_(own, op=hvd.Max)
    assert (own == n - 1).all()


def check_broadcast() -> None:
    n = hvd.size()
    for dtype in DTYPES:
        for root in range(n):
            mine = sample(hvd.rank(), 1001, dtype, hvd.Sum)
            want = sample(root, 1001, dtype, hvd.Sum)
            assert torch.equal(hvd.broadcast(mine, root, name="b"), want)
            assert torch.equal(hvd.synchronize(hvd.broadcast_async(mine, root)), want)
            hvd.synchronize(hvd.broadcast_async_(mine, root))
            assert torch.equal(mine, want)
    large = torch.arange(2_000_000, dtype=torch.float32)
    assert torch.equal(hvd.broadcast_(large + hvd.rank(), n - 1), large + (n - 1))


def check_allgather() -> None:
    n = hvd.size()
    for dtype in DTYPES:
        for rows in (lambda r: r, lambda r: 0, lambda r: 50_000 * (r == n - 1)):
            parts = [sample(r, rows(r) * 3, dtype, hvd.Sum).view(-1, 3) for r in range(n)]
            assert torch.equal(hvd.allgather(parts[hvd.rank()]), torch.cat(parts))
            assert torch.equal(hvd.synchronize(hvd.allgather_async(parts[hvd.rank()], "g")), torch.cat(parts))


def check_reducescatter() -> None:
    n = hvd.size()
    for rows in (0, 1, n, n + 1, 40_001):
        inputs = [sample(r, rows * 3, torch.float32, hvd.Sum).view(rows, 3) for r in range(n)]
        for op in (hvd.Sum, hvd.Average, hvd.Max):
            want = torch.tensor_split(reduced(inputs, op), n)[hvd.rank()]
            assert torch.equal(hvd.reducescatter(inputs[hvd.rank()], op=op), want)
            assert torch.equal(hvd.synchronize(hvd.reducescatter_async(inputs[hvd.rank()], op=op)), want)


def check_alltoall() -> None:
    n, r = hvd.size(), hvd.rank()
    for splits_of in (lambda k: [k] * n, lambda k: list(range(n)), lambda k: [20_000] * n, lambda k: [0] * n):
        sent = [torch.arange(sum(splits_of(k)), dtype=torch.int32).view(-1, 1) + 1_000_000 * k for k in range(n)]
        want = [sent[k].split(splits_of(k))[r] for k in range(n)]
        got, counts = hvd.alltoall(sent[r], torch.tensor(splits_of(r)))
        assert torch.equal(got, torch.cat(want))
        assert counts.tolist() == [len(one) for one in want]
    handle = hvd.alltoall_async(torch.arange(n) + 10 * r)
    assert hvd.synchronize(handle).tolist() == [10 * k + r for k in range(n)]


def check_barrier_and_many_in_flight() -> None:
    handles = [hvd.allreduce_async(torch.full((i + 1,), float(i)), op=hvd.Sum) for i in range(64)]
    hvd.barrier()
    assert all(handle.poll() for handle in handles), "the barrier overtook a collective"
    for i, handle in enumerate(handles):
        assert handle.wait(5.0).tolist() == [float(i * hvd.size())] * (i + 1)


def check_objects() -> None:
    r = hvd.rank()
    everyone = hvd.allgather_object({"rank": r, "data": list(range(1000 * r))})
    assert [len(one["data"]) for one in everyone] == [1000 * k for k in range(hvd.size())]
    assert hvd.broadcast_object(("from", r), root_rank=1, name="o") == ("from", 1)


def check_mismatch() -> None:
    last = hvd.size() - 1
    those = "rank 0" if last == 1 else f"ranks {', '.join(map(str, range(last)))}"
    messages = []
    for different, usual, odd_one in (
        (lambda odd: hvd.allreduce(torch.ones(3 + odd), name="shape"),
         "allreduce 'shape' (average of 3 float32)", "allreduce 'shape' (average of 4 float32)"),
        (lambda odd: hvd.allreduce(torch.ones(3), name=("one", "another")[odd]),
         "allreduce 'one' (average of 3 float32)", "allreduce 'another' (average of 3 float32)"),
        (lambda odd: hvd.allreduce(torch.ones(3, dtype=(torch.float32, torch.float64)[odd])),
         "allreduce (average of 3 float32)", "allreduce (average of 3 float64)"),
        (lambda odd: hvd.allreduce(torch.ones(3), op=(hvd.Sum, hvd.Max)[odd]),
         "allreduce (sum of 3 float32)", "allreduce (max of 3 float32)"),
        (lambda odd: hvd.broadcast(torch.ones(3), root_rank=int(odd)),
         "broadcast (12 bytes of float32 from rank 0)", "broadcast (12 bytes of float32 from rank 1)"),
        (lambda odd: hvd.allgather(torch.ones(2, 2 + odd)), "allgather (", "allgather ("),
        (lambda odd: hvd.barrier() if odd else hvd.allreduce(torch.ones(3)),
         "allreduce (average of 3 float32)", "barrier"),
        (lambda odd: hvd.synchronize(hvd.allreduce_async(torch.ones(3 + odd), name="async")),
         "allreduce 'async' (average of 3 float32)", "allreduce 'async' (average of 4 float32)"),
        (lambda odd: hvd.allreduce(torch.ones(3 + odd), name="x" + 200 * "é"), "allreduce 'xé", "allreduce 'xé"),
        (lambda odd: hvd.allreduce(torch.ones(3 + odd), name=200 * "é"), "allreduce 'é", "allreduce 'é"),
        (lambda odd: hvd.allreduce(torch.ones(3), name=300 * "x" + str(odd)), "allreduce 'xxx", "allreduce 'xxx"),
    ):  # fmt: skip
        with pytest.raises(hvd.HorovodInternalError) as caught:
            different(hvd.rank() == last)
        assert type(caught.value) is hvd.MismatchError
        text = str(caught.value)
        assert f"{those} called {usual}" in text, text
        assert f"rank {last} called {odd_one}" in text, text
        messages.append(text)
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2, "the job does not go on"
    assert len(set(map(tuple, hvd.allgather_object(messages)))) == 1, "the ranks say different things"


def _outcome(call: Callable[[], Any]) -> str:
    """The class and the words of what `call` raised; "" where it returned."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check_a_refused_call_fails_alone() -> None:
    """A call that is refused on one rank is the error of that call on the others, whatever way it takes."""
    n, odd = hvd.size(), hvd.rank() == 1
    good, bad = torch.ones(3), torch.ones(3, dtype=torch.complex64)
    for call in (
        lambda: hvd.allreduce(bad if odd else good),
        lambda: hvd.allreduce_(bad if odd else torch.ones(3)),
        lambda: hvd.synchronize(hvd.allreduce_async(bad if odd else good)),
        lambda: hvd.synchronize(hvd.allreduce_async_(bad if odd else torch.ones(3))),
        lambda: hvd.synchronize(hvd.allreduce_async(good.bool(), op=hvd.Average if odd else hvd.Sum)),
        lambda: hvd.allreduce(good, op=17 if odd else hvd.Sum),
        lambda: hvd.allreduce(good.bool(), op=hvd.Average if odd else hvd.Sum),
        lambda: hvd.broadcast(bad if odd else good, 0),
        lambda: hvd.broadcast(good, n if odd else 0),
        lambda: hvd.allgather(good.sum() if odd else good),
        lambda: hvd.reducescatter("text" if odd else good),
        lambda: hvd.alltoall(torch.ones(n), [1] * (n - odd)),
        lambda: hvd.grouped_allreduce([good, bad if odd else good]),
        lambda: hvd.grouped_allgather([good, bad if odd else good]),
        lambda: hvd.allreduce(good, algo="nonsense" if odd else "ring"),
        lambda: hvd.synchronize(hvd.broadcast_async_(good, n if odd else 0)),
        lambda: hvd.synchronize(hvd.allgather_async(good.sum() if odd else good)),
        lambda: hvd.synchronize(hvd.reducescatter_async("text" if odd else good)),
        lambda: hvd.synchronize(hvd.alltoall_async(torch.ones(n), [1] * (n - odd))),
        lambda: hvd.synchronize(hvd.grouped_allreduce_async([good, bad if odd else good])),
    ):
        outcome = _outcome(call)
        if odd:
            assert outcome
            assert "MismatchError" not in outcome, outcome
        else:
            assert outcome.startswith("MismatchError: "), outcome
            assert re.search(r"rank 1 called .* after a call there was refused \(\w+Error: \S", outcome), outcome
        # In step at once: the very next call succeeds everywhere.
        assert hvd.allreduce(torch.full((5,), 2.0), op=hvd.Sum).tolist() == [2 * n] * 5
    # Refused on all ranks alike, or on one that calls what nobody else does: nobody else hears of it.
    for ranks in (range(n), (0,)):
        if hvd.rank() in ranks:
            assert _outcome(lambda: hvd.allreduce(bad)).startswith("ArgumentError: ")
            assert _outcome(lambda: hvd.allreduce_async(bad, name="apart")).startswith("ArgumentError: ")
        assert hvd.allgather(torch.ones(1)).tolist() == [1] * n


def check_a_skipped_call_is_made_up_for() -> None:
    """A rank that skips a call after an exception of its own is in step again after two errors at most."""
    n = hvd.size()
    for skipped in (1, 2):
        outcomes = []
        for i in range(10):
            if not (hvd.rank() == n - 1 and 3 <= i < 3 + skipped):
                outcomes.append(_outcome(lambda i=i: hvd.allreduce(torch.ones(10 + i), op=hvd.Sum)))
        wrong = [outcome for outcome in outcomes if outcome]
        assert outcomes[-(7 - 2 * skipped) :] == [""] * (7 - 2 * skipped), outcomes
        assert all(outcome.startswith("MismatchError: ") for outcome in wrong)
        if hvd.rank() == n - 1:
            assert len(wrong) == skipped, outcomes
        else:
            assert len(wrong) == 2 * skipped, outcomes
            assert f"rank {n - 1} skipped a call that this rank made" in wrong[-1], wrong


def check_shutdown_and_init_again() -> None:
    before = (hvd.rank(), hvd.size())
    hvd.shutdown()
    assert not hvd.is_initialized()
    for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size,
                 hvd.is_homogeneous, hvd.mpi_threads_supported, hvd.join, hvd.barrier, hvd.stop_timeline,
                 lambda: hvd.allreduce(torch.ones(1)), lambda: hvd.allgather_async(torch.ones(1), name="x"),
                 lambda: hvd.add_process_set([0]), lambda: hvd.broadcast_object(1)):  # fmt: skip
        with pytest.raises(ValueError, match=r"dcoll\.init\(\)"):
            call()
    hvd.init()
    hvd.init()  # changes nothing
    assert (hvd.rank(), hvd.size()) == before
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def check_mpi4py_beside_it() -> None:
    if not hvd.mpi_enabled():
        return
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # or without an MPI library: then dcoll has nothing to agree with
        pytest.skip(f"needs mpi4py: {error}")
    assert MPI.Is_initialized()
    assert MPI.COMM_WORLD.rank == hvd.rank()
    assert MPI.COMM_WORLD.allreduce(1) == hvd.size()


def large_operands() -> dict[str, Any]:
    """Of 64 MiB: in private memory and in mapped, dense and strided, of both libraries."""
    operands: dict[str, Any] = {}
    for memory, flat in (("private", torch.zeros(16 << 20)), ("mapped", hvd.empty(16 << 20))):
        dense = flat.view(4 << 10, 4 << 10)
        for layout, tensor in (("dense", dense), ("strided", dense.t())):
            operands[f"{memory} {layout} tensor"] = tensor
            operands[f"{memory} {layout} array"] = tensor.numpy()
    return operands


def large_calls() -> dict[str, Callable[[], object]]:
    """Calls in which rank 0 moves 64 MiB or more, by what they are."""
    calls: dict[str, Callable[[], object]] = {}
    for name, operand in large_operands().items():
        calls |= {
            f"allreduce of a {name}": functools.partial(hvd.allreduce, operand),
            f"allreduce_ of a {name}": functools.partial(hvd.allreduce_, operand),
            f"allgather of a {name}": functools.partial(hvd.allgather, operand),
            f"broadcast of a {name}": functools.partial(hvd.broadcast, operand, 1),
        }
    dense, strided = torch.zeros(16 << 20), torch.zeros(4 << 10, 4 << 10).t()
    return calls | {
        "reducescatter": lambda: hvd.reducescatter(strided),
        "alltoall": lambda: hvd.alltoall(dense),
        "group": lambda: hvd.grouped_allreduce([dense, dense]),
        "group in place": lambda: hvd.grouped_allreduce_([dense]),
        "group waited for": lambda: hvd.synchronize(hvd.grouped_allreduce_async_([dense, dense])),
        "group of gathers": lambda: hvd.grouped_allgather([dense, strided]),
        "group of scatters": lambda: hvd.grouped_reducescatter([dense, strided]),
    }


def longest_hold(call: Callable[[], object]) -> tuple[float, float]:
    """The most CPU time, in seconds, that this thread has used in the call without another one getting on, and what it
    has used in all of the call."""
    clock, over = time.pthread_getcpuclockid(threading.get_ident()), threading.Event()
    ticks = [time.clock_gettime(clock)]

    def tick() -> None:
        while not over.is_set():
            ticks.append(time.clock_gettime(clock))
            time.sleep(1e-5)

    other = threading.Thread(target=tick)
    other.start()
    result = call()
    ticks.append(time.clock_gettime(clock))
    over.set()
    other.join()
    del result  # giving memory back is not looked at
    return max(later - earlier for earlier, later in itertools.pairwise(ticks)), ticks[-1] - ticks[0]


def check_large_calls_let_the_interpreter_lock_go() -> None:
    """Another thread of the program gets on while bytes are moved, whatever they lie in. Looked at on rank 0, for which
    the other one waits: so it moves them in the call itself. CPU time does not count what else the machine does, and
    a call that holds the lock does so every time; one look without is enough."""
    if hvd.size() > 2 or hvd.local_size() == 1 or os.environ.get("DCOLL_TRANSPORT") == "mpi":
        return
    if os.environ.get("DCOLL_DEVICE") == "emulated":
        return  # groups are calls of each tensor there, whose results Python copies
    if "WORLD_SIZE" in os.environ:
        return  # under torchrun it is the same code, for half a minute
    if "tsan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("ThreadSanitizer's threads wait for each other")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)  # the lock changes hands where somebody lets it go, and nowhere else
    # What holds the lock for 64 MiB uses the time of a copy. A busy machine leaves a thread its core for a few
    # milliseconds, whoever waits: where a copy takes no longer (3 ms on Zen 4), only what holds it for longer is seen.
    # AddressSanitizer gives back 64 MiB of NumPy's in the time of two copies, with the lock: there a fifth of the call
    # may be that.
    source, target, copies = np.ones(16 << 20, np.float32), np.ones(16 << 20, np.float32), [time.thread_time()]
    for _ in range(3):
        np.copyto(target, source)
        copies.append(time.thread_time())
    limit = max(0.005, min(later - earlier for earlier, later in itertools.pairwise(copies)) * 0.6)
    share = 0.2 if "asan" in os.environ.get("LD_PRELOAD", "") else 0.0
    copy, bytes_of_it = ctypes.PyDLL(None).memcpy, (target.ctypes.data, source.ctypes.data, source.nbytes)
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def holds() -> None:
        """What a call would be that keeps the lock while it moves 64 MiB, or more where that is done within the limit:
        PyDLL does not let it go."""
        until = time.thread_time() + 2 * limit
        while time.thread_time() < until:
            copy(*bytes_of_it)

    def gets_on(call: Callable[[], object]) -> bool:
        hvd.barrier()
        if hvd.rank() == 0:
            time.sleep(0.02)  # the other rank is there by then, or this look finds nothing
            held, used = longest_hold(call)
        else:
            call()
            held, used = 0.0, 0.0
        return bool(hvd.broadcast(np.array([held < max(limit, share * used)]), 0)[0])

    try:
        assert not any(gets_on(holds) for _ in range(3)), "a call that holds the lock is not seen here"
        held = [name for name, call in large_calls().items() if not any(gets_on(call) for _ in range(60))]
    finally:
        sys.setswitchinterval(interval)
    assert not held, held
