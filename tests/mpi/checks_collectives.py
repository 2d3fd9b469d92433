"""Checks of every collective under Horovod's names. The exhaustive ones are in tests/python, on ranks as threads."""

import os
import re
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
