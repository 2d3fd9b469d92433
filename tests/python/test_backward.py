"""Who is told of a backward, and in which order."""

import _thread
import random
import threading
import time
from collections.abc import Callable

import torch

from dcoll import _C
from dcoll.compression import Compressor
from dcoll.optimizer import backward
from dcoll.optimizer.gradients import GradientSync


class Watcher:
    def __init__(self, told: list[tuple[str, int]], number: int) -> None:
        self.told, self.number = told, number

    def before_backward(self) -> None:
        self.told.append(("before", self.number))

    def after_backward(self) -> None:
        self.told.append(("after", self.number))

    def backward_failed(self, failure: backward.Failure) -> None:
        self.told.append(("failed", self.number))


def run_backward() -> None:
    torch.zeros(1, requires_grad=True).sum().backward()


def test_watchers_are_told_in_the_order_in_which_they_came() -> None:
    told: list[tuple[str, int]] = []
    made = [Watcher(told, i) for i in range(64)]  # at addresses in some order
    watchers = random.Random(5).sample(made, len(made))
    for watcher in (*watchers, *made):  # again changes nothing
        assert backward.watch(watcher)
    order = [watcher.number for watcher in watchers]
    run_backward()
    assert told == [("before", i) for i in order] + [("after", i) for i in order]
    del made, watchers, watcher
    told.clear()
    run_backward()
    assert told == []


def on_another_thread(body: object) -> None:
    thread = threading.Thread(target=body)  # type: ignore[arg-type]
    thread.start()
    thread.join()


def test_a_backward_on_any_thread_is_noticed() -> None:
    p = torch.zeros(3, requires_grad=True)
    sync = GradientSync(_C.connect_local(1)[0], [p], lambda _: "p", any_thread=True)
    assert not sync._hooks
    rounds, finish = [], sync.finish
    sync.finish = lambda: rounds.append(finish())  # type: ignore[method-assign]
    p.sum().backward()
    assert (len(rounds), len(sync._hooks)) == (1, 0)
    on_another_thread(run_backward)  # of another model: p has a hook from now on
    assert (len(rounds), len(sync._hooks)) == (1, 1)
    on_another_thread(lambda: p.sum().backward())
    assert len(rounds) == 2
    p.sum().backward()
    assert len(rounds) == 3
    assert p.grad is sync._views[0]
    sync.extend([torch.zeros(2, requires_grad=True)])
    assert len(sync._hooks) == 2
    sync.release()


def test_gradients_written_by_hand_are_no_backward_after_another_thread_had_one() -> None:
    p, frozen = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    sync = GradientSync(_C.connect_local(1)[0], [p, frozen], lambda _: "p", any_thread=True)
    rounds, finish = [], sync.finish
    sync.finish = lambda: rounds.append(finish())  # type: ignore[method-assign]
    run_backward()
    frozen.requires_grad_(False)
    on_another_thread(run_backward)
    assert not frozen.requires_grad
    assert len(sync._hooks) == 2
    p.grad = torch.ones(3)
    run_backward()
    assert rounds == []
    frozen.requires_grad_(True)
    frozen.sum().backward()
    assert len(rounds) == 1
    sync.release()


def test_a_thread_that_begins_while_another_backward_runs() -> None:
    p = torch.zeros(3, requires_grad=True)
    sync = GradientSync(_C.connect_local(1)[0], [p], lambda _: "p", any_thread=True)
    rounds, finish = [], sync.finish
    sync.finish = lambda: rounds.append(finish())  # type: ignore[method-assign]
    x = p.sum()
    p.register_post_accumulate_grad_hook(lambda _: on_another_thread(run_backward))
    x.backward()
    assert len(rounds) == 1
    assert p.grad is sync._views[0]
    sync.release()


def on_a_thread_of_autograds(work: Callable[[], object]) -> object:
    """On a thread that Python has not started, as those are on which autograd runs what is on a GPU."""
    got: list[object] = []
    done = threading.Event()

    def run() -> None:
        got.append(work())
        done.set()

    _thread.start_new_thread(run, ())
    assert done.wait(30)
    return got[0]


def test_a_thread_of_autograds_runs_the_newest_backward() -> None:
    assert backward.watch(watcher := Watcher([], 0))
    p = torch.zeros(1, requires_grad=True)
    seen: list[object] = []
    p.register_post_accumulate_grad_hook(
        lambda _: seen.append((on_a_thread_of_autograds(backward.running), backward.running()))
    )
    p.sum().backward()
    p.sum().backward()
    assert watcher.told == [("before", 0), ("after", 0)] * 2
    (first, same), (second, again) = seen
    assert (first, second) == (same, again)
    assert first != second


def test_a_backward_inside_one_on_a_thread_of_autograds_is_nested() -> None:
    p = torch.zeros(1, requires_grad=True)
    nested: list[object] = []
    p.register_post_accumulate_grad_hook(lambda _: nested.append(backward.is_nested()))

    def inside() -> None:
        p.sum().backward()

    inside()
    on_a_thread_of_autograds(inside)
    assert not on_a_thread_of_autograds(backward.is_nested)
    assert nested == [False, True]


def test_hooks_of_several_threads_take_turns() -> None:
    p, q = (torch.zeros(3, requires_grad=True) for _ in range(2))
    sync = GradientSync(_C.connect_local(1)[0], [p, q], lambda _: "p", compression=Slow, late_bytes=-1)
    for one in (p, q):
        one.grad = torch.ones(3)
    both = [threading.Thread(target=sync.bring_in, args=(i,)) for i in (1, 0)]  # sent in this order
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(30)
    sync.finish()
    assert Slow.most == 1
    assert p.grad.tolist() == q.grad.tolist() == [1, 1, 1]
    sync.release()


class Slow(Compressor):
    """Counts the threads in it."""

    inside = most = 0

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        cls.inside += 1
        cls.most = max(cls.most, cls.inside)
        time.sleep(0.05)
        cls.inside -= 1
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: object) -> torch.Tensor:
        return tensor
