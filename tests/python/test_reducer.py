"""Reducers: fused gradient buckets, without autograd."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_ranks import run_ranks

from dcoll import _C, ops
from dcoll.collectives.tensors import CODES, library
from dcoll.optimizer import compressed_reducer
from dcoll.optimizer.compressed_reducer import ReducerOptions

library("torch")  # fills CODES


class Buckets:
    """A Reducer with a tensor view of every parameter's slot."""

    def __init__(
        self, comm: _C.Communicator, numels: list[int], dtypes: list[torch.dtype] | None = None, **options: object
    ) -> None:
        self.numels = numels
        self.dtypes = dtypes or [torch.float32] * len(numels)
        arguments = {"op": _C.SUM, "bucket_bytes": 64, "first_bucket_bytes": 16, **options}
        self.reducer = _C.Reducer(
            comm,
            numels,
            [CODES[dtype] for dtype in self.dtypes],
            [f"p{i}" for i in range(len(numels))],
            **arguments,  # type: ignore[arg-type]
        )
        self.map()

    def map(self) -> None:
        self.slots = []
        for i, (numel, dtype) in enumerate(zip(self.numels, self.dtypes, strict=True)):
            buffer, start = self.reducer.gradient(i)
            raw = library("torch").wrap(buffer, torch.uint8, (buffer.nbytes,))
            self.slots.append(raw[start : start + numel * dtype.itemsize].view(dtype))

    def round(self, ready: list[int], value: float) -> list[int]:
        for i in ready:
            self.slots[i].fill_(value + i)
            assert self.reducer.mark_ready(i)
        return self.reducer.finish()


@pytest.mark.parametrize("n", range(1, 9))
def test_every_slot_holds_the_sum(n: int) -> None:
    numels = [1, 0, 7, 100, 3, 16, 33]

    def body(comm: _C.Communicator) -> None:
        b = Buckets(comm, numels)
        for step in range(3):
            assert b.round([6, 5, 4, 3, 2, 1, 0], comm.rank + step) == []
            for i, slot in enumerate(b.slots):
                want = n * (n - 1) / 2 + n * (step + i)
                assert torch.equal(slot, torch.full((numels[i],), want)), (step, i)

    run_ranks(n, body)


def test_layout_covers_each_parameter_once() -> None:
    numels = [10, 20, 1, 5, 40, 2]

    def body(comm: _C.Communicator) -> None:
        b = Buckets(comm, numels)
        r = b.reducer
        assert r.num_buckets() > 1
        listed = [i for bucket in range(r.num_buckets()) for i in r.bucket_params(bucket)]
        assert sorted(listed) == list(range(len(numels)))
        assert listed[0] == len(numels) - 1, "gradients become ready back to front"
        for bucket in range(r.num_buckets()):
            places = {i: r.gradient(i) for i in r.bucket_params(bucket)}
            (whole,) = {(buffer.address, buffer.nbytes) for buffer, _ in places.values()}
            spans = sorted((start, start + 4 * numels[i]) for i, (_, start) in places.items())
            assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "slots overlap"
            assert spans[-1][1] <= whole[1]

    run_ranks(1, body)


def test_one_dtype_per_bucket() -> None:
    dtypes = [torch.float32, torch.float16, torch.float64, torch.float16, torch.float32]

    def body(comm: _C.Communicator) -> None:
        b = Buckets(comm, [3] * 5, dtypes, bucket_bytes=1 << 20, first_bucket_bytes=1 << 20)
        for bucket in range(b.reducer.num_buckets()):
            assert len({dtypes[i] for i in b.reducer.bucket_params(bucket)}) == 1
        b.round([4, 2, 3, 1, 0], comm.rank)
        assert [slot.tolist() for slot in b.slots] == [[1.0 + 2 * i] * 3 for i in range(5)]

    run_ranks(2, body)


def test_unready_parameters_count_as_zero() -> None:
    def body(comm: _C.Communicator) -> None:
        b = Buckets(comm, [4, 4, 4, 4])
        for slot in b.slots:
            slot.fill_(99.0)  # stale
        assert b.reducer.missing() == [0, 1, 2, 3]
        unused = b.round([3, 0] if comm.rank == 0 else [3], 10.0)
        assert unused == [1, 2]
        assert [slot[0].item() for slot in b.slots] == [10.0, 0.0, 0.0, 26.0]
        assert b.reducer.missing() == [0, 1, 2, 3]
        assert b.round([], 0.0) == [0, 1, 2, 3]

    run_ranks(2, body)


def test_ready_twice_is_told() -> None:
    def body(comm: _C.Communicator) -> None:
        b = Buckets(comm, [4, 4])
        assert b.reducer.mark_ready(1)
        assert not b.reducer.mark_ready(1)
        assert b.reducer.missing() == [0]
        b.reducer.finish()
        assert b.reducer.mark_ready(1)
        b.reducer.finish()

    run_ranks(1, body)


def test_rebuild_takes_the_order_and_keeps_working() -> None:
    def body(comm: _C.Communicator) -> None:
        b = Buckets(comm, [8] * 6, first_bucket_bytes=32)
        seen = [2, 0, 5, 1, 4]  # 3 missing
        b.round(seen, 0.0)
        order = b.reducer.order()
        assert order == [*seen, 3]
        b.reducer.rebuild(order)
        old = b.slots[2]
        old.fill_(7.0)  # the old buffers are still ours
        b.map()
        assert [i for k in range(b.reducer.num_buckets()) for i in b.reducer.bucket_params(k)] == order
        assert b.round([5, 4, 3, 2, 1, 0], comm.rank) == []
        assert [slot[0].item() for slot in b.slots] == [3.0 + 3 * i for i in range(6)]
        assert old[0].item() == 7.0

    run_ranks(3, body)


def test_ranks_may_become_ready_in_different_orders() -> None:
    def body(comm: _C.Communicator) -> None:
        b = Buckets(comm, [16] * 8)
        order = list(range(8)) if comm.rank % 2 else list(reversed(range(8)))
        for step in range(5):
            b.round(order, step)
            assert [slot[3].item() for slot in b.slots] == [4.0 * (step + i) for i in range(8)]

    run_ranks(4, body)


def test_scaling() -> None:
    def body(comm: _C.Communicator) -> None:
        b = Buckets(comm, [4], op=_C.AVERAGE, prescale=0.5, postscale=2.0)
        b.round([0], 6.0 * comm.rank)
        assert b.slots[0].tolist() == [3.0] * 4

    run_ranks(2, body)


NODES = [(2, ""), (2, "0,1"), (3, "0,0,1")]  # on none of them is a bucket of up to 64 KiB encoded
LOSSY = {"codec": "topk 0.01", "bucket_bytes": 1 << 12, "first_bucket_bytes": 1 << 12}


@pytest.mark.parametrize(("n", "nodes"), NODES)
@pytest.mark.parametrize("rebuilt", [False, True])
def test_what_was_kept_goes_with_a_bucket_that_is_not_encoded(
    n: int, nodes: str, rebuilt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCOLL_NODES", nodes)

    def body(comm: _C.Communicator) -> None:
        b = Buckets(comm, [100, 7], prescale=0.5, **LOSSY)
        kept = torch.arange(100.0) + comm.rank
        b.reducer.keep(0, {"error": kept})
        assert torch.equal(torch.as_tensor(b.reducer.kept(0)["error"]), kept)
        if rebuilt:
            b.reducer.rebuild([0, 1])
            b.map()
        assert b.round([1], 1.0) == [0]  # nobody has a gradient there, so nobody looks at what arrives
        b.round([0, 1], 1.0)
        assert torch.equal(b.slots[0], 0.5 * (n + n * torch.arange(100.0) + n * (n - 1) / 2))
        assert b.slots[1].eq(n).all()
        b.round([0, 1], 1.0)
        assert b.slots[0].eq(0.5 * n).all()
        assert torch.as_tensor(b.reducer.kept(0).get("error", torch.zeros(1))).eq(0).all()

    run_ranks(n, body)


@pytest.mark.parametrize(("n", "nodes"), NODES)
def test_momentum_in_a_bucket_that_is_not_encoded(n: int, nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCOLL_NODES", nodes)

    def body(comm: _C.Communicator) -> None:
        b = Buckets(comm, [100, 7], prescale=0.5, momentum=0.5, **LOSSY)
        for velocity in (1.0, 1.5, 1.75, 1.875):
            b.round([0, 1], 1.0)
            assert b.slots[0].eq(0.5 * n * velocity).all()
            assert b.slots[1].eq(n * velocity).all()
        assert torch.as_tensor(b.reducer.kept(1)["velocity"]).eq(2 * 1.875).all()
        assert b.round([0], 1.0) == [1]  # flags have no momentum
        b.round([0, 1], 0.0)
        assert b.slots[1].eq(0.5 * n * (1.875 + 1)).all()  # and what nobody uses keeps its own

    run_ranks(n, body)


@pytest.mark.parametrize("scheduled", [False, True])
def test_ranks_agree_on_rounds_at_first_and_after_a_join(scheduled: bool) -> None:
    """Where something goes by them; nothing else has a call for it."""

    def body(comm: _C.Communicator) -> None:
        rounds = _C.Rounds(comm, "schedule", scheduled)
        rounds.set_ended(5 if comm.rank == 1 else 0)
        for more in range(3):
            assert rounds.may_differ() == scheduled
            if scheduled:
                rounds.agree()
                assert rounds.ended() == 5 + more
            assert not rounds.may_differ()
            if comm.rank == 0:
                rounds.end_one()
            comm.join()

    run_ranks(3, body)


def test_no_parameters() -> None:
    def body(comm: _C.Communicator) -> None:
        assert Buckets(comm, []).reducer.finish() == []

    run_ranks(2, body)


@settings(max_examples=25, deadline=None)
@given(
    numels=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    bucket_bytes=st.integers(0, 400),
    data=st.data(),
)
def test_any_subset_in_any_order(numels: list[int], bucket_bytes: int, data: st.DataObject) -> None:
    n = 2
    params = list(range(len(numels)))
    rounds = [
        [
            data.draw(st.permutations(params).map(lambda p: p[: data.draw(st.integers(0, len(params)))]))
            for _ in range(n)
        ]
        for _ in range(2)
    ]

    def body(comm: _C.Communicator) -> None:
        b = Buckets(comm, numels, bucket_bytes=bucket_bytes, first_bucket_bytes=min(bucket_bytes, 40))
        for ready in rounds:
            unused = b.round(ready[comm.rank], 1.0)
            assert unused == [i for i in params if all(i not in one for one in ready)]
            for i in params:
                want = sum(1.0 + i for one in ready if i in one)
                assert torch.equal(b.slots[i], torch.full((numels[i],), want))
        b.reducer.rebuild(list(reversed(params)))
        b.map()

    run_ranks(n, body)


class Stream:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.waits_for: list[Stream] = []

    def wait_stream(self, other: "Stream") -> None:
        self.waits_for.append(other)


class Sent(compressed_reducer.PythonReducer):
    """Notes what it was to send."""

    def _send(self, unit: Sequence[int]) -> None:
        self.sent = [*getattr(self, "sent", []), list(unit)]


def test_a_bucket_goes_when_the_streams_of_all_its_gradients_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    side, main = Stream(), Stream()
    current: list[Any] = [side]
    monkeypatch.setattr(compressed_reducer, "has_streams", lambda _: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[0])
    comm: Any = None  # nothing of it is asked
    options = ReducerOptions(comm, [torch.zeros(2)] * 4, list("abcd"), ops.Sum, 1.0, 1.0, [0, 0, 0, 1], 0, 0, "")
    reducer = Sent(options)
    for i in 1, 2:
        assert reducer.mark_ready(i)
    current[0] = main
    assert reducer.mark_ready(3)
    assert reducer.mark_ready(0)
    assert reducer.sent == [[3], [2, 1, 0]]
    assert main.waits_for == [side]  # once
    assert side.waits_for == []
