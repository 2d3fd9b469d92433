"""Elastic training (run_checks.py): failures are gone back from, and the result is that of a run without them."""

import contextlib
import io

import pytest
import torch

import dcoll as hvd
from dcoll.job import world


def _model() -> torch.nn.Module:
    torch.manual_seed(hvd.rank())  # every rank begins elsewhere: sync() has to make them equal
    return torch.nn.Linear(4, 3)


def _train(state: hvd.elastic.TorchState, steps: int, before_step: object = None) -> None:
    while state.step < steps:
        if callable(before_step):
            before_step(state)
        state.optimizer.zero_grad()
        data = torch.full((2, 4), float(state.step + hvd.rank()))
        state.model(data).sum().backward()
        state.optimizer.step()
        state.step += 1
        state.commit()


def _state() -> hvd.elastic.TorchState:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    return hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)


def _weights(before_step: object = None) -> tuple[list[torch.Tensor], int]:
    state = _state()
    resets = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    with contextlib.redirect_stderr(io.StringIO()):
        hvd.elastic.run(_train)(state, 6, before_step)
    return [parameter.detach().clone() for parameter in state.model.parameters()], len(resets)


def _once(what: object) -> object:
    """Calls `what` in front of step 3, the first time that is reached, after spoiling the state on this rank."""
    seen = []

    def before_step(state: hvd.elastic.TorchState) -> None:
        if state.step == 3 and not seen:
            seen.append(True)
            hvd.barrier()  # a rank still in commit() would hear of the failure there, and come here a second time
            with torch.no_grad():
                for parameter in state.model.parameters():
                    parameter.fill_(99.0)
            state.step = 77
            assert callable(what)
            what()

    return before_step


def _expect_like_undisturbed(what: object) -> None:
    expected, resets = _weights()
    assert resets == 0
    got, resets = _weights(_once(what))
    assert resets == 1
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one, other)


def check_a_failed_collective_is_gone_back_from() -> None:
    def fail() -> None:
        if hvd.rank() == hvd.size() - 1:
            world.communicator().fail("RuntimeError: injected")
        hvd.allreduce(torch.ones(3))

    _expect_like_undisturbed(fail)


def check_a_mismatch_is_gone_back_from() -> None:
    _expect_like_undisturbed(lambda: hvd.allreduce(torch.ones(3 + hvd.rank())))


def check_an_error_on_one_rank_alone_is_gone_back_from_by_all() -> None:
    def wrong_argument() -> None:
        if hvd.rank() == 0:
            hvd.allreduce(torch.ones(3, dtype=torch.complex64))
        hvd.allreduce(torch.ones(3))

    _expect_like_undisturbed(wrong_argument)


def check_changed_hosts_keep_the_state() -> None:
    for change, syncs in ((hvd.elastic.HostUpdate.ADDED, True), (hvd.elastic.HostUpdate.REMOVED, False)):
        calls, synced = [], []

        class Counted(hvd.elastic.TorchState):
            def sync(self) -> None:
                synced.append(True)  # noqa: B023
                super().sync()

        state = Counted(model=_model(), step=0)

        def train(state: hvd.elastic.TorchState) -> int:
            calls.append(state.step)  # noqa: B023
            while state.step < 4:
                state.step += 1
                if state.step == 2 and hvd.rank() == 0:
                    hvd.elastic.notify_hosts_updated(change)  # noqa: B023
                state.commit()
            return state.step

        assert hvd.elastic.run(train)(state) == 4
        assert calls == [0, 2]
        assert len(synced) == (2 if syncs else 1)


def check_other_exceptions_pass_through() -> None:
    def broken(state: hvd.elastic.State) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        hvd.elastic.run(broken)(hvd.elastic.TorchState(step=0))


def check_a_failure_that_always_comes_back_ends() -> None:
    calls = []

    def broken(state: hvd.elastic.State) -> None:
        calls.append(True)
        hvd.allreduce(torch.ones(3 + hvd.rank()))

    with pytest.raises(hvd.MismatchError), contextlib.redirect_stderr(io.StringIO()):
        hvd.elastic.run(broken)(hvd.elastic.TorchState(step=0))
    assert len(calls) == 11


def check_sync_takes_everything_from_rank_0() -> None:
    sampler = hvd.elastic.ElasticSampler(range(20), shuffle=False)
    sampler.processed_num = 4 * hvd.rank()
    state = hvd.elastic.TorchState(model=_model(), sampler=sampler, name=f"rank {hvd.rank()}", best=[hvd.rank()])
    state.sync()
    assert state.name == "rank 0"
    assert state.best == [0]
    assert state.sampler.processed_num == 0
    weights = [float(state.model.weight.detach().sum())]
    assert hvd.allgather_object(weights) == [weights] * hvd.size()
    state.best.append(7)
    state.restore()
    assert state.best == [0]


def check_attributes_of_the_script_are_its_own() -> None:
    state = hvd.elastic.TorchState(commits=0, resets=0, saved=0, handlers=0, rank=0, listeners=0)
    for _ in range(3):
        state.commits += 1
        state.commit()
    assert (state.commits, state.resets, state.saved, state.handlers, state.rank, state.listeners) == (3, 0, 0, 0, 0, 0)
    assert {name for name in vars(hvd.elastic.TorchState()) if not name.startswith("_")} == {"model", "optimizer"}


def check_the_sampler_shares_out_what_is_left() -> None:
    size, rank = hvd.size(), hvd.rank()
    for count in (0, 1, size - 1, size, size + 1, 41):
        sampler = hvd.elastic.ElasticSampler(range(count), seed=3)
        everybody = hvd.allgather_object(list(sampler))
        assert len({len(one) for one in everybody}) == 1
        assert {index for one in everybody for index in one} == set(range(count))
    sampler = hvd.elastic.ElasticSampler(range(41), seed=3)
    order = list(sampler.remaining_indices)
    assert sorted(order) == list(range(41))
    assert order != list(range(41))
    assert sampler.get_indices(1, 2) == list(sampler)[2:4]
    sampler.record_batch(0, 2)
    again = hvd.elastic.ElasticSampler(range(41), seed=3)
    again.load_state_dict(sampler.state_dict())
    left = order[2 * size :]
    assert again.remaining_indices == left
    assert list(again) == (left + left)[: len(again) * size][rank::size]
    again.set_epoch(1)
    assert len(again.remaining_indices) == 41
    assert again.remaining_indices != order


def check_types_of_ones_own_have_handlers() -> None:
    """As horovod.torch.elastic.state lets scripts do: by its registry."""
    state_module = hvd.elastic.state

    class Counter:
        def __init__(self, count: int) -> None:
            self.count = count

    class CounterHandler(state_module.StateHandler):  # type: ignore[name-defined,misc]
        def __init__(self, value: Counter) -> None:
            super().__init__(value)
            self.save()

        def save(self) -> None:
            self._saved = self.value.count

        def restore(self) -> None:
            self.value.count = self._saved

        def sync(self) -> None:
            self.value.count = hvd.broadcast_object(self.value.count, root_rank=0)
            self.save()

    before = state_module.get_handler_registry()
    state_module.set_handler_registry([*before, (Counter, CounterHandler)])
    try:
        counter = Counter(10 + hvd.rank())
        state = hvd.elastic.TorchState(counter=counter, model=_model())
        counter.count += 5
        state.restore()
        assert counter.count == 10 + hvd.rank()
        state.sync()
        assert state.counter is counter
        assert counter.count == 10
        state.counter = Counter(hvd.rank())  # assigned anew: saved at once
        state.counter.count = 99
        state.restore()
        assert state.counter.count == hvd.rank()
    finally:
        state_module.set_handler_registry(before)
