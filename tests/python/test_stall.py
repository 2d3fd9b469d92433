"""The stack that a report of a stall shows: the user's own line first, then the way there, without dcoll's frames."""

import threading
import time
import types
from collections.abc import Callable
from pathlib import Path

import dcoll
from dcoll.job import stall


def function_in(module: str, file: str) -> Callable[..., None]:
    """A function of that module that calls its first argument with the others."""
    scope: dict[str, object] = {"__name__": module}
    exec(compile("def call(first, *rest):\n    first(*rest)\n", file, "exec"), scope)
    call = scope["call"]
    assert isinstance(call, types.FunctionType)
    return call


def expect_stack(expected: list[str], *calls: Callable[..., None]) -> None:
    """In a thread in which each of these functions has called the next one, and the last one waits."""
    gate = threading.Lock()
    gate.acquire()
    thread = threading.Thread(target=calls[0], args=(*calls[1:], gate.acquire))
    thread.start()
    end, found = time.monotonic() + 10, [""]
    while found[: len(expected)] != expected and time.monotonic() < end:
        time.sleep(0.001)
        found = stall.stack(thread.ident or 0).splitlines()
    gate.release()
    thread.join()
    assert found[: len(expected)] == expected


OURS = function_in("dcoll.collectives.handle", str(Path(dcoll.__file__).parent / "collectives" / "handle.py"))
TORCH = function_in("torch.optim.sgd", "/site/torch/optim/sgd.py")
USER = function_in("__main__", "/home/train.py")
IN_USER = "/home/train.py:2 in call"


def test_the_users_line_comes_first_and_dcolls_frames_are_left_out() -> None:
    expect_stack([IN_USER, IN_USER], USER, OURS)


def test_a_line_of_a_framework_is_not_the_users() -> None:
    expect_stack([IN_USER, "/site/torch/optim/sgd.py:2 in call", IN_USER], USER, TORCH, OURS)


def test_an_unknown_thread_stands_for_the_main_one() -> None:
    assert " in test_an_unknown_thread_stands_for_the_main_one" in stall.stack(1)
