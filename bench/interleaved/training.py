"""A rank that trains a few steps per turn (bench/overlap.py): the example GPT or one of bench/models.py."""

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Gpt:
    """What examples/train_gpt.py trains."""

    def __init__(self, config: argparse.Namespace, rank: int, ranks: int) -> None:
        import train_gpt

        self.model = train_gpt.GPT(config.layers, config.heads, config.width, config.block)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.1)
        self.next = train_gpt.Batches(config, rank, ranks).next
        self.tokens, self.clip = config.batch * config.block, config.clip

    def before_step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)


class Plain:
    """A model of bench/models.py with SGD, as in bench/optimizer.py: the same rows in every step, each a token."""

    def __init__(self, name: str, config: argparse.Namespace) -> None:
        from models import MODELS

        self.model = MODELS[name]()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        rows = MODELS[name].input(config.batch)
        self.next = lambda: (rows,)
        self.tokens = rows.numel() // rows.shape[-1]

    def before_step(self) -> None:
        pass


class Training:
    """A model with one of the backends of examples/train_gpt.py, step by step; or "barrier": its "none", but the ranks
    wait for each other at the end of every backward.
    """

    def __init__(self, args: argparse.Namespace, rank: int, share: Callable[[Any], Any]) -> None:
        # DDP meets at a port that only rank 0 can know to be free.
        os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"] = "127.0.0.1", "lo"
        os.environ["MASTER_PORT"] = str(share(free_port() if rank == 0 else None))
        sys.path.insert(0, str(EXAMPLES))
        import train_gpt

        # The script's own command line, so that model, text and defaults are the example's.
        self.name = args.options["backend"]
        backend = "none" if self.name == "barrier" else self.name
        sys.argv = ["train_gpt.py", "--backend", backend, *args.options["arguments"]]
        self.config = train_gpt.parse_arguments()
        torch.set_num_threads(self.config.threads)
        torch.manual_seed(self.config.seed)
        self.backend = train_gpt.BACKENDS[self.config.backend](self.config)
        name = args.options["model"]
        self.work = Gpt(self.config, rank, args.ranks) if name == "gpt" else Plain(name, self.config)
        self.parameters = sum(p.numel() for p in self.work.model.parameters())
        self.model, self.optimizer = self.backend.wrap(self.work.model, self.work.optimizer)
        self.buckets: list[torch.Tensor] = []
        self.meet = lambda: None
        if self.name == "barrier":
            import dcoll

            dcoll.init()
            self.meet = dcoll.barrier

    def info(self) -> dict[str, Any]:
        tokens = self.work.tokens
        return {"parameters": self.parameters, "tokens_per_rank_and_step": tokens, "torch": torch.__version__}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """To "steps", "communicate" and "memory"."""
        if request["do"] == "steps":
            waited, cpu = self.backend.waited_seconds(), time.process_time()
            times = [self.step() for _ in range(request["count"])]
            cpu = time.process_time() - cpu
            waited = None if waited is None else self.backend.waited_seconds() - waited
            return {"step_s": times, "waited_s": waited, "cpu_s": cpu}
        if request["do"] == "communicate":
            return {"seconds": self.communicate()}
        return memory_of_this_process()

    def step(self) -> float:
        """One step as in train_gpt.train()."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.model(*self.work.next())
        loss.backward()
        self.meet()
        self.work.before_step()
        self.optimizer.step()
        return time.perf_counter() - start

    def communicate(self) -> float:
        """Seconds to reduce as many bytes as the gradients have, in pieces of the bucket size, nothing else running."""
        name = self.name
        if name in ("none", "barrier"):
            return 0.0
        import dcoll

        if not self.buckets:
            piece, left = int(self.bucket_mb() * (1 << 20)) // 4, self.parameters
            make = dcoll.empty if name == "dcoll" else torch.empty
            while left > 0:
                self.buckets.append(make((min(piece, left),), dtype=torch.float32).zero_())
                left -= piece
        start = time.perf_counter()
        for bucket in self.buckets:
            if name == "dcoll":
                dcoll.allreduce_(bucket, op=dcoll.Sum)
            else:
                torch.distributed.all_reduce(bucket)
        return time.perf_counter() - start

    def bucket_mb(self) -> float:
        """What the backend's buckets hold: asked for, or its own default on one node."""
        asked = self.config.bucket_mb
        return float({"dcoll": 4.0, "ddp-gloo": 25.0}[self.config.backend] if asked is None else asked)

    def close(self) -> None:
        if self.name in ("dcoll", "barrier"):
            import dcoll

            dcoll.shutdown()
        elif self.name == "ddp-gloo":
            torch.distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def memory_of_this_process() -> dict[str, Any]:
    """Kilobytes: the peak resident set, and what of the resident set now is shared memory.

    A page that two ranks have mapped is in the resident set of both. In "pss_shmem" it counts half in each.
    """
    status = read_kb("/proc/self/status")
    rollup = read_kb("/proc/self/smaps_rollup")
    shared = status.get("RssShmem", 0)
    return {
        "peak_rss_kb": status["VmHWM"],
        "rss_shmem_kb": shared,
        "pss_shmem_kb": rollup.get("Pss_Shmem", shared),
        "pss_kb": rollup.get("Pss", 0),
    }


def read_kb(path: str) -> dict[str, int]:
    """The lines 'Name:   123 kB' of a file of /proc."""
    fields = (line.split() for line in Path(path).read_text().splitlines())
    return {field[0].rstrip(":"): int(field[1]) for field in fields if len(field) == 3 and field[2] == "kB"}
