"""One rank of a job whose network is cut (see test_net_faults.py): all-reduces, each checked, until one fails."""

import time

import torch

import dcoll as hvd

COUNT = 1_500_000
"""Elements: some 20 ms at 10 Gbit/s, so that a cut comes in the middle of one."""


def say(text: str) -> None:
    print(f"[{hvd.rank()}] {text}", flush=True)


def main() -> None:
    hvd.init()
    n, began, moved = hvd.size(), time.monotonic(), time.monotonic()
    mine = torch.arange(COUNT, dtype=torch.float32) % 1000 + hvd.rank()
    want = torch.arange(COUNT, dtype=torch.float32) % 1000 * n + n * (n - 1) / 2
    step = 0
    while time.monotonic() - began < 60:
        try:
            got = hvd.allreduce(mine, op=hvd.Sum)
        except hvd.DcollError as error:
            say(f"failed after {time.monotonic() - moved:.1f} s: {type(error).__name__}: {error}")
            return
        moved = time.monotonic()
        if not torch.equal(got, want):
            say("wrong")
            return
        step += 1
        if step % 10 == 0:
            say(f"right {step}")


main()
