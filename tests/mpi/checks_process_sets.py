"""Checks of process sets: overlapping ones, several in flight, errors; with 2, 3 and 4 ranks."""

import random

import pytest
import torch
from checks_names import every_operation, expect_all
from mpirun import SEED

import dcoll as hvd


def everyone() -> list[int]:
    return list(range(hvd.size()))


def check_the_global_set() -> None:
    everybody = hvd.global_process_set
    assert everybody.process_set_id == 0
    assert everybody.ranks == everyone()
    assert (everybody.size(), everybody.rank(), everybody.included()) == (hvd.size(), hvd.rank(), True)
    assert everybody.mpi_comm is None
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=everybody).item() == hvd.size()
    assert hvd.remove_process_set(everybody) is False


def check_an_unknown_set() -> None:
    unknown = hvd.ProcessSet([0])
    assert (unknown.process_set_id, unknown.ranks) == (None, [0])
    assert (unknown.size(), unknown.rank(), unknown.included()) == (None, None, None)
    with pytest.raises(ValueError, match=r"not known to this job: pass it to dcoll\.add_process_set"):
        hvd.allreduce(torch.ones(1), process_set=unknown)
    with pytest.raises(ValueError, match=r"must be a dcoll\.ProcessSet"):
        hvd.barrier(process_set=[0])
    assert hvd.remove_process_set(unknown) is False


def check_every_collective_on_overlapping_sets() -> None:
    n, r = hvd.size(), hvd.rank()
    lists = [[0], [n - 1, 0], everyone()[1:], everyone()[::2]]
    sets = []
    for ranks in lists:
        if sorted(ranks) in [everyone(), *(one.ranks for one in sets)]:
            continue
        sets.append(hvd.add_process_set(ranks if len(sets) % 2 else hvd.ProcessSet(ranks)))
    assert len({one.process_set_id for one in sets}) == len(sets)
    for one in sets:
        members = one.ranks
        assert members == sorted(members)
        assert one.size() == len(members)
        assert one.included() == (r in members)
        if r not in members:
            for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter, hvd.allreduce_async_):
                with pytest.raises(ValueError, match=f"rank {r} called a collective on ProcessSet"):
                    call(torch.ones(2), process_set=one)
            with pytest.raises(ValueError, match="included"):
                one.rank()
            continue
        place, size = members.index(r), len(members)
        assert one.rank() == place
        for count in (1, 3000, 200_000):
            for make in (torch.full, lambda shape, value: hvd.empty(shape).fill_(value)):
                mine = make((count,), float(r))
                assert hvd.allreduce(mine, op=hvd.Sum, process_set=one).eq(sum(members)).all()
                assert hvd.allreduce(mine, process_set=one).eq(sum(members) / size).all()
                gathered = hvd.allgather(mine[: place + 1], process_set=one)
                assert gathered.tolist() == [float(k) for i, k in enumerate(members) for _ in range(min(i + 1, count))]
                for root in members:
                    assert hvd.broadcast(mine, root, process_set=one).eq(root).all()
                handle = hvd.allreduce_async_(mine, op=hvd.Max, process_set=one)
                assert hvd.synchronize(handle).eq(members[-1]).all()
        total = {"op": hvd.Sum, "process_set": one}
        for odd in (lambda: torch.full((4, 6), float(r))[:, ::2], lambda: torch.full((3, 4), float(r)).t()):
            for out in (
                hvd.allreduce(odd(), **total),
                hvd.allreduce_(odd(), **total),
                hvd.allreduce(odd(), compression=hvd.Compression.fp16, **total),
                *hvd.grouped_allreduce([odd(), odd()], **total),
                *hvd.grouped_allreduce([odd(), odd()], compression=hvd.Compression.fp16, **total),
                *hvd.grouped_allreduce_([odd(), odd()], **total),
            ):
                assert out.eq(sum(members)).all()
            assert hvd.broadcast(odd(), members[0], process_set=one).eq(members[0]).all()
            assert hvd.broadcast_(odd(), members[-1], process_set=one).eq(members[-1]).all()
            assert hvd.allgather(odd(), process_set=one)[:, 1].tolist() == [float(k) for k in members for _ in range(4)]
        rows = torch.arange(size * 2, dtype=torch.float32)
        assert hvd.reducescatter(rows, op=hvd.Sum, process_set=one).tolist() == [
            size * value for value in rows.tolist()[2 * place : 2 * place + 2]
        ]
        sent = torch.arange(size) + 10 * r
        got, splits = hvd.alltoall(sent, splits=[1] * size, process_set=one)
        assert got.tolist() == [10 * k + place for k in members]
        assert splits.tolist() == [1] * size
        assert splits.dtype == torch.int32
        out = hvd.grouped_allreduce([torch.full((5,), float(r)), torch.ones(2)], op=hvd.Sum, process_set=one)
        assert [t.tolist() for t in out] == [[float(sum(members))] * 5, [float(size)] * 2]
        group = [torch.full((place + 1, 2), r), torch.full((2 * size,), float(r))]
        gathered = hvd.grouped_allgather(group, process_set=one)
        assert gathered[0][:, 0].tolist() == [k for i, k in enumerate(members) for _ in range(i + 1)]
        assert gathered[1].tolist() == [float(k) for k in members for _ in range(2 * size)]
        shares = hvd.grouped_reducescatter([group[1], group[1].long()], op=hvd.Sum, process_set=one)
        assert [share.tolist() for share in shares] == [[float(sum(members))] * 2] * 2
        assert hvd.broadcast_object({"from": r}, root_rank=members[-1], process_set=one) == {"from": members[-1]}
        assert hvd.allgather_object(r, process_set=one) == members
        hvd.barrier(process_set=one)
        with pytest.raises(ValueError, match="must be one of the set's ranks"):
            hvd.broadcast(torch.ones(1), n, process_set=one)
    assert all(hvd.remove_process_set(one) for one in sets)
    assert all(one.process_set_id is None and one.ranks is None for one in sets)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == n


def check_asynchronous_collectives_on_sets() -> None:
    """In order, and by name in any order; on two sets that overlap, and on the whole, at once."""
    n, r = hvd.size(), hvd.rank()
    if n == 2:
        return  # ranks 0 and 1 are the whole
    sets = [hvd.add_process_set([0, n - 1]), hvd.add_process_set(everyone()[1:])]
    mine = [one for one in sets if one.included()]
    for one in mine:
        in_order = every_operation(one, named=False)
        expect_all(in_order, list(in_order), list(in_order)[::-1])
    operations = {}
    for one in [*mine, hvd.global_process_set]:
        for kind, operation in every_operation(one, named=True).items():
            operations[f"{one.process_set_id} {kind}"] = operation
    rng = random.Random(f"{SEED} {r}")
    for _ in range(3):
        expect_all(operations, *(rng.sample(list(operations), len(operations)) for _ in range(2)))
    for one in sets:
        hvd.remove_process_set(one)


def check_several_sets_at_once() -> None:
    if hvd.size() == 2:
        return  # ranks 0 and 1 are the whole
    n, r = hvd.size(), hvd.rank()
    first, second = hvd.add_process_set([0, 1]), hvd.add_process_set(everyone()[1:])
    # Rank 1 is in both, and in the whole: whatever it starts first, each set goes on by itself.
    mine = [(one, torch.full((50_000,), float(r + 1))) for one in (first, second) if one.included()]
    if r % 2:
        mine.reverse()
    handles = [(one, hvd.allreduce_async(tensor, op=hvd.Sum, process_set=one)) for one, tensor in mine]
    whole = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
    for one, handle in reversed(handles):
        assert handle.wait(60).eq(sum(k + 1 for k in one.ranks)).all()
    assert whole.wait(60).tolist() == [n] * 3
    hvd.remove_process_set(first)
    hvd.remove_process_set(second)


def check_errors_of_adding() -> None:
    n = hvd.size()
    known = hvd.add_process_set([0])
    for ranks, message in (
        ([0], "exists already"),
        (everyone(), "exists already"),
        ([], "at least one"),
        ([0, 0], "different ranks"),
        ([0, n], f"from 0 to {n - 1}"),
        ([-1], f"from 0 to {n - 1}"),
    ):
        with pytest.raises(ValueError, match=message):
            hvd.add_process_set(ranks)
    with pytest.raises(ValueError, match="was added already"):
        hvd.add_process_set(known)
    for wrong in (["a"], 3, None):
        with pytest.raises(ValueError, match="sequence of ranks or an mpi4py communicator"):
            hvd.ProcessSet(wrong)
    with pytest.raises(hvd.MismatchError, match="gave different sets"):
        hvd.add_process_set([0, 1] if hvd.rank() == 0 else [1])
    with pytest.raises(hvd.MismatchError, match="remove_process_set"):
        hvd.remove_process_set(known if hvd.rank() == 0 else hvd.global_process_set)
    assert hvd.remove_process_set(known)
    again = hvd.add_process_set([0])
    assert again.process_set_id not in (0, None)
    assert hvd.remove_process_set(again)


def check_mismatch_in_a_set() -> None:
    if hvd.size() == 2:
        return  # ranks 0 and 1 are the whole
    pair = hvd.add_process_set([0, 1])
    if pair.included():
        with pytest.raises(hvd.MismatchError):
            hvd.allreduce(torch.ones(2 + hvd.rank()), process_set=pair)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2
    assert hvd.remove_process_set(pair)


def check_a_refused_call_is_that_sets() -> None:
    """Whether the set is given by name or by place: the next call on it meets."""
    ranks = [0, hvd.size() - 1]
    with_set = hvd.add_process_set(ranks) if hvd.size() > 2 else hvd.global_process_set
    if hvd.rank() in ranks and len(set(ranks)) == 2:
        good, odd = torch.ones(2), hvd.rank() == 0
        made_up = {"_".join(["process", "set"]): with_set}  # whose name the interpreter has not interned
        for call in (
            lambda: hvd.allgather(good.sum() if odd else good, None, with_set),
            lambda: hvd.allgather_async(good.sum() if odd else good, None, with_set).wait(),
            lambda: hvd.allgather_async(good.sum() if odd else good, process_set=with_set).wait(),
            lambda: hvd.broadcast(good, 17 if odd else 0, None, with_set),
            lambda: hvd.alltoall(torch.ones(2), [1] * (2 - odd), None, with_set),
            lambda: hvd.grouped_allgather_async([good.sum() if odd else good], None, with_set).wait(),
            lambda: hvd.grouped_allgather([good.sum() if odd else good], **made_up),
        ):
            error = hvd.ArgumentError if odd else hvd.MismatchError
            with pytest.raises((error, ValueError), match="" if odd else r"after a call there was refused"):
                call()
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=with_set).item() == 2
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    if with_set is not hvd.global_process_set:
        hvd.remove_process_set(with_set)


def check_messages_of_a_set_say_the_ranks_of_the_job() -> None:
    n, r = hvd.size(), hvd.rank()
    if n == 2:
        return  # ranks 0 and 1 are the whole
    last = hvd.add_process_set([n - 2, n - 1])
    if last.included():
        with pytest.raises(hvd.MismatchError) as error:
            hvd.broadcast(torch.ones(1), n - 2 if r == n - 2 else n - 1, process_set=last)
        for rank in (n - 2, n - 1):  # on a device more follows
            assert f"rank {rank} called broadcast (4 bytes of float32 from rank {rank}" in str(error.value)
        hvd.barrier(process_set=last)  # in step: else the next call would look like the last one of the other rank
        with pytest.raises(hvd.MismatchError, match=f"rank {n - 1} called barrier"):
            hvd.synchronize(hvd.broadcast_async(torch.ones(1), n - 1, process_set=last)) if r == n - 2 else hvd.barrier(
                process_set=last
            )
        with pytest.raises((hvd.DcollError, TypeError, AttributeError)) as failed:
            hvd.broadcast_object(Unpicklable(), n - 1, process_set=last)
        assert r == n - 1 or f"rank {n - 1} could not pickle" in str(failed.value)
        model = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(model.weight, float(r))
        torch.nn.init.zeros_(model.bias)
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), check_sync=1, process_set=last)
        model(torch.ones(2)).backward()
        with pytest.raises(hvd.MismatchError, match=f"rank {n - 2} holds one value, rank {n - 1} another"):
            optimizer.step()
    hvd.remove_process_set(last)


class Unpicklable:
    def __reduce__(self) -> str:
        raise TypeError("not this one")


def check_optimizers_of_sets_beside_each_other() -> None:
    """The first and the last rank train one model together; each of the others has one of its own."""
    n, r = hvd.size(), hvd.rank()
    if n == 2:
        return  # ranks 0 and 1 are the whole
    ends = hvd.add_process_set([0, n - 1])
    for op, compression in (
        (hvd.Average, hvd.Compression.none), (hvd.Sum, hvd.Compression.fp16), (hvd.Adasum, hvd.Compression.none),
    ):  # fmt: skip
        w = torch.nn.Parameter(torch.zeros(3))
        sgd = torch.optim.SGD([w], lr=1.0)
        optimizer = hvd.DistributedOptimizer(sgd, [("w", w)], compression, op=op, process_set=ends)
        for step in range(2):
            optimizer.zero_grad()
            direction = torch.zeros(3)
            direction[0 if r == 0 else 2] = r + step + 1.0
            (w * direction).sum().backward()
            optimizer.step()
        # The two gradients of the set are orthogonal, so that Adasum adds them.
        share = 2 if op is hvd.Average else 1
        want = [-3.0 / share, 0.0, -(2.0 * n + 1) / share] if ends.included() else [0.0, 0.0, -(2.0 * r + 3)]
        assert w.tolist() == want, (op, w.tolist(), want)
    hvd.remove_process_set(ends)


def check_gradients_of_collectives_on_a_set() -> None:
    n, r = hvd.size(), hvd.rank()
    if n == 2:
        return
    ends = hvd.add_process_set([0, n - 1])
    if ends.included():
        place, weight = ends.rank(), torch.tensor([1.0, 2.0]) * (r + 1)
        weights = torch.tensor([1.0, 2.0]) * (n + 1)  # of both
        for call, want in (
            (lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=ends), weights),
            (lambda x: hvd.allreduce(x, process_set=ends), weights / 2),
            (lambda x: hvd.broadcast(x, n - 1, process_set=ends), weights / 2 if place == 1 else torch.zeros(2)),
            (lambda x: hvd.allgather(x[:1], process_set=ends),
             torch.tensor([(1.0 + place) * (n + 1) / 2, 0.0])),
            (lambda x: hvd.alltoall(x, process_set=ends), torch.tensor([1.0 + place, (1.0 + place) * n])),
            (lambda x: torch.cat([hvd.reducescatter(x, op=hvd.Sum, process_set=ends)] * 2) / 2,
             torch.tensor([3.0, 3.0 * n])),
        ):  # fmt: skip
            x = torch.zeros(2, requires_grad=True)
            (call(x) * weight).sum().backward()
            assert torch.equal(x.grad, want), (x.grad, want)
    hvd.remove_process_set(ends)


def check_many_sets_come_and_go() -> None:
    if hvd.size() == 2:
        return  # ranks 0 and 1 are the whole
    for _ in range(20):
        pair = hvd.add_process_set([0, 1])
        if pair.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2
        hvd.remove_process_set(pair)


def check_sets_given_to_init() -> None:
    n, r = hvd.size(), hvd.rank()
    left, right, whole = hvd.ProcessSet([0]), hvd.ProcessSet(everyone()[1:]), hvd.ProcessSet(everyone())
    hvd.shutdown()
    with pytest.raises(ValueError, match=r"process_sets with the ranks \[0\] twice"):
        hvd.init(process_sets=[left, right, hvd.ProcessSet([0])])
    hvd.init(process_sets=[left, right, whole])
    again, unknown = hvd.ProcessSet([0]), hvd.ProcessSet([0, n - 1] if n > 2 else [1, 1])
    hvd.init(process_sets=[again])
    assert again.process_set_id == left.process_set_id
    with pytest.raises(ValueError, match=r"init\(\) was called before, without ProcessSet"):
        hvd.init(process_sets=[unknown])
    assert again.included() == (r == 0)
    assert whole.process_set_id == 0
    mine = left if r == 0 else right
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=mine).item() == (1 if r == 0 else n - 1)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=whole).item() == n
    hvd.shutdown()
    assert mine.process_set_id is None
    hvd.init(process_sets="dynamic")
    with pytest.raises(ValueError, match="not known"):
        hvd.barrier(mine)
    hvd.shutdown()
    for wrong in ("static", [[0]]):
        with pytest.raises(ValueError, match="process_sets="):
            hvd.init(process_sets=wrong)
    hvd.init()


def check_a_job_of_some_ranks() -> None:
    n, r = hvd.size(), hvd.rank()
    hvd.shutdown()
    halves = [list(range(n // 2)), list(range(n // 2, n))]
    mine, other = halves if r in halves[0] else halves[::-1]
    with pytest.raises(ValueError, match=f"this is rank {r}"):
        hvd.init(comm=other)
    for wrong, message in (([r, r], "different ranks"), ([r, n], "different ranks"), (["a"], "takes a list of ranks")):
        with pytest.raises(ValueError, match=message):
            hvd.init(comm=wrong)
    hvd.init(comm=mine)  # two jobs beside each other
    assert (hvd.rank(), hvd.size()) == (mine.index(r), len(mine))
    assert hvd.allreduce(torch.full((5,), float(r)), op=hvd.Sum).tolist() == [float(sum(mine))] * 5
    assert hvd.global_process_set.ranks == everyone()
    hvd.shutdown()
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (r, n)


def check_communicators_of_mpi4py() -> None:
    if not hvd.mpi_enabled():
        return
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # not installed, or without an MPI library
        pytest.skip(f"needs mpi4py: {error}")
    n, r = hvd.size(), hvd.rank()
    turned = MPI.COMM_WORLD.Split(0, -r)  # all ranks, in reverse order
    parity = MPI.COMM_WORLD.Split(r % 2, r)
    hvd.shutdown()
    hvd.init(comm=turned)
    assert hvd.global_process_set.mpi_comm is turned
    assert hvd.rank() == n - 1 - r
    assert hvd.allgather_object(r) == everyone()[::-1]
    hvd.shutdown()
    by_parity = hvd.ProcessSet(parity)
    assert by_parity.mpi_comm is parity
    for again in (parity, parity.Dup(), MPI.COMM_WORLD.Split(r % 2, -r)):
        with pytest.raises(ValueError, match=r"process_sets with the ranks .* twice"):
            hvd.init(process_sets=[by_parity, hvd.ProcessSet(again)])
    hvd.init(process_sets=[by_parity])
    alike = [k for k in range(n) if k % 2 == r % 2]
    assert by_parity.ranks == alike
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=by_parity).item() == len(alike)
    hvd.shutdown()
    assert hvd.global_process_set.mpi_comm is None
    hvd.init(comm=[MPI.COMM_WORLD, parity])
    assert hvd.global_process_set.mpi_comm is MPI.COMM_WORLD
    assert hvd.size() == n
    hvd.shutdown()
    hvd.init()
