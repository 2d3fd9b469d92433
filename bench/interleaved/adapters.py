"""How a worker calls its engine. An adapter allocates memory and binds a call to a piece of it; the rest is shared.

Ordinary memory is NumPy's for every engine, aligned to a cache line, so that page sizes and alignment are the same for
all. The timed buffers hold zeros: sums of sums stay zeros, however often they are taken.
"""

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from check import Pattern, numpy_dtype

Call = Callable[[], Any]
CACHE_LINE = 64
MAX_COPIES = 64


class Adapter:
    """The base of all engines: buffers, the exact check, and turns of timed calls."""

    def __init__(self, args: argparse.Namespace, rank: int, share: Callable[[Any], Any]) -> None:
        self.rank, self.ranks, self.dtype = rank, args.ranks, args.options["dtype"]
        self.element_bytes = numpy_dtype(self.dtype).itemsize
        self._max_bytes, self._cache_bytes = args.options["max_bytes"], args.options["cache_bytes"]
        self._pattern = Pattern(self.dtype, rank, args.ranks)
        self._memory: dict[str, Any] = {}
        self._calls: dict[tuple[str, int], list[Call]] = {}
        self._next: dict[tuple[str, int], int] = {}
        self.join(args, share)

    def join(self, args: argparse.Namespace, share: Callable[[Any], Any]) -> None:
        """Meet the other ranks."""
        raise NotImplementedError

    def bind(self, variant: str, raw: Any) -> Call:
        """The call that sums these bytes over all ranks, in place."""
        raise NotImplementedError

    def info(self) -> dict[str, Any]:
        """For the report; 'label' names library and version."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the job in good order."""

    def allocate(self, variant: str, nbytes: int) -> Any:
        memory = np.empty(nbytes + CACHE_LINE, np.uint8)
        return memory[-memory.ctypes.data % CACHE_LINE :][:nbytes]

    def pieces(self, variant: str, nbytes: int) -> list[Any]:
        """The buffer of that size, or those to go round, out of one allocation that serves all sizes."""
        cache, need = self._cache_bytes, self._max_bytes
        if variant not in self._memory:
            if cache:
                need = max(need, 2 * cache) + MAX_COPIES * CACHE_LINE
            self._memory[variant] = self.allocate(variant, max(need, CACHE_LINE))
            self._memory[variant][:] = 0  # so that every page exists
        stride = max(-(-nbytes // CACHE_LINE), 1) * CACHE_LINE
        copies = max(1, min(2 * cache // stride, MAX_COPIES))
        return [self._memory[variant][at * stride : at * stride + nbytes] for at in range(copies)]

    def calls(self, variant: str, nbytes: int) -> list[Call]:
        key = variant, nbytes
        if key not in self._calls:
            self._calls[key] = [self.bind(variant, piece) for piece in self.pieces(variant, nbytes)]
        return self._calls[key]

    def count_wrong(self, variant: str, nbytes: int) -> int:
        """Elements that are not the exact sum after one call on the first and on the last buffer."""
        calls, pieces = self.calls(variant, nbytes), self.pieces(variant, nbytes)
        wrong = 0
        for index in sorted({0, len(calls) - 1}):
            self._pattern.fill(pieces[index])
            calls[index]()
            wrong += self._pattern.count_wrong(pieces[index])
            pieces[index][:] = 0
        return wrong

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """To the coordinator's requests: "check" a size, or take a "turn" at it."""
        variant, nbytes = request["variant"], request["bytes"]
        if request["do"] == "check":
            return {"wrong": self.count_wrong(variant, nbytes)}
        times = self.run(variant, nbytes, request["warm"], request["calls"], request["batch"])
        return {"median_s": statistics.median(times)}

    def run(self, variant: str, nbytes: int, warm: int, count: int, batch: int = 1) -> list[float]:
        """Seconds per call, of each batch of `count` calls after `warm` others, going round the buffers from where we
        stopped."""
        calls, clock = self.calls(variant, nbytes), time.perf_counter
        at = self._next.get((variant, nbytes), 0)
        order = [calls[(at + step) % len(calls)] for step in range(warm + count)]
        self._next[variant, nbytes] = at + warm + count
        for call in order[:warm]:
            call()
        times = []
        for first in range(warm, warm + count, batch):
            calls = order[first : first + batch]
            start = clock()
            for call in calls:
                call()
            times.append((clock() - start) / len(calls))
        return times


class TorchAdapter(Adapter):
    """Engines that take torch tensors."""

    def join(self, args: argparse.Namespace, share: Callable[[Any], Any]) -> None:
        import torch

        torch.set_num_threads(1)  # a rank is one thread on one core, as in training
        self.torch = torch

    def tensor(self, raw: Any) -> Any:
        return self.torch.from_numpy(raw).view(getattr(self.torch, self.dtype))


class Dcoll(TorchAdapter):
    """dcoll.allreduce_() on memory from dcoll.empty() (variant "mapped") and on ordinary memory ("plain")."""

    def join(self, args: argparse.Namespace, share: Callable[[Any], Any]) -> None:
        super().join(args, share)
        import environment

        import dcoll

        dcoll.init()
        self.dcoll, self.environment = dcoll, environment.describe()

    def allocate(self, variant: str, nbytes: int) -> Any:
        if variant == "mapped":
            return self.dcoll.empty((nbytes,), dtype=self.torch.uint8).numpy()
        return super().allocate(variant, nbytes)

    def bind(self, variant: str, raw: Any) -> Call:
        tensor, allreduce, op = self.tensor(raw), self.dcoll.allreduce_, self.dcoll.Sum
        return lambda: allreduce(tensor, op=op)

    def info(self) -> dict[str, Any]:
        label = f"dcoll {self.dcoll.__version__}"
        return {"label": label, "environment": self.environment}

    def close(self) -> None:
        self.dcoll.shutdown()


class Gloo(TorchAdapter):
    """torch.distributed over Gloo."""

    def join(self, args: argparse.Namespace, share: Callable[[Any], Any]) -> None:
        super().join(args, share)
        import torch.distributed as dist
        from torch._C._distributed_c10d import TCPStore

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here, and nothing is faster
        store = None
        if self.rank == 0:
            store = TCPStore("127.0.0.1", 0, self.ranks, is_master=True, wait_for_workers=False)
        port = share(store.port if store else None)
        store = store or TCPStore("127.0.0.1", port, self.ranks, is_master=False)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.ranks)
        self.dist = dist

    def bind(self, variant: str, raw: Any) -> Call:
        tensor, all_reduce = self.tensor(raw), self.dist.all_reduce
        return lambda: all_reduce(tensor)

    def info(self) -> dict[str, Any]:
        return {"label": f"Gloo (torch {self.torch.__version__})"}

    def close(self) -> None:
        self.dist.destroy_process_group()


class DeepSpeed(TorchAdapter):
    """DeepSpeed's shared-memory operator, called as deepspeed.comm does for tensors on CPUs."""

    def join(self, args: argparse.Namespace, share: Callable[[Any], Any]) -> None:
        super().join(args, share)
        import deepspeed
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

        self.version = deepspeed.__version__
        os.environ["LOCAL_SIZE"] = str(self.ranks)
        ShareMemCommBuilder().load(verbose=False).initialize(self.ranks, self.rank)

    def bind(self, variant: str, raw: Any) -> Call:
        tensor, all_reduce = self.tensor(raw), self.torch.ops.deepspeed.inference_all_reduce_
        return lambda: all_reduce(tensor)

    def info(self) -> dict[str, Any]:
        return {"label": f"DeepSpeed shm {self.version}"}


class Mpi4py(Adapter):
    """MPI_Allreduce through mpi4py, over whatever MPI this interpreter's mpi4py is bound to."""

    def join(self, args: argparse.Namespace, share: Callable[[Any], Any]) -> None:
        from mpi4py import MPI

        self.mpi = MPI

    def bind(self, variant: str, raw: Any) -> Call:
        array, allreduce, in_place = raw.view(numpy_dtype(self.dtype)), self.mpi.COMM_WORLD.Allreduce, self.mpi.IN_PLACE
        return lambda: allreduce(in_place, array)

    def info(self) -> dict[str, Any]:
        text = self.mpi.Get_library_version().replace("\0", " ").splitlines()[0]
        if text.startswith("MPICH"):
            return {"label": "MPICH " + text.split(":", 1)[1].strip()}
        name = text.split(",")[0].replace("(R)", "").replace(" Library", "").replace(" for Linux* OS", "")
        return {"label": name.replace("Open MPI v", "Open MPI ")}


class OneCcl(Adapter):
    """ccl::allreduce of Intel oneCCL, through oneccl.cc."""

    CODES: ClassVar = {
        "int8": 0, "uint8": 1, "int32": 4, "int64": 6, "float16": 8, "float32": 9, "float64": 10, "bfloat16": 11,
    }  # fmt: skip

    def join(self, args: argparse.Namespace, share: Callable[[Any], Any]) -> None:
        library = ctypes.CDLL(args.options["library"])
        library.peer_error.restype = ctypes.c_char_p
        self._all_reduce = library.peer_all_reduce
        self._all_reduce.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.library = library
        address = ctypes.create_string_buffer(256)
        if self.rank == 0:
            self._expect(library.peer_address(address))
        raw = bytes.fromhex(share(address.raw.hex() if self.rank == 0 else None))
        self._expect(library.peer_join(self.ranks, self.rank, raw))

    def _expect(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(self.library.peer_error().decode(errors="replace"))

    def bind(self, variant: str, raw: Any) -> Call:
        address, count, code = raw.ctypes.data, len(raw) // self.element_bytes, self.CODES[self.dtype]
        all_reduce = self._all_reduce

        def call() -> None:
            if all_reduce(address, count, code):
                self._expect(1)

        return call

    def info(self) -> dict[str, Any]:
        self.library.peer_version.restype = ctypes.c_char_p
        return {"label": f"oneCCL {self.library.peer_version().decode()}"}

    def close(self) -> None:
        self.library.peer_leave()


class Bare(Adapter):
    """The hardware's limits, from bare.c: variant "bare", the two-shot loop over mapped buffers, and "memcpy".

    Both are looped and timed in C, every call by itself: no Python between two calls.
    """

    def join(self, args: argparse.Namespace, share: Callable[[Any], Any]) -> None:
        self.library = ctypes.CDLL(args.options["library"])
        self.library.bare_memory.restype = ctypes.c_void_p
        size, number, pointer = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
        self.library.bare_memory.argtypes = [number, number, number, size]
        self.library.bare_all_reduce.argtypes = [ctypes.c_char_p, size, size, number, number, number, pointer]
        self.library.bare_memcpy.argtypes = [pointer, pointer, size, size, number, number, number, pointer]

    def allocate(self, variant: str, nbytes: int) -> Any:
        if variant == "memcpy":
            self._target = super().allocate(variant, nbytes)
            self._target[:] = 0
            return super().allocate(variant, nbytes)
        address = self.library.bare_memory(int(os.environ["BENCH_SHARED_FD"]), self.ranks, self.rank, nbytes)
        if not address:
            raise MemoryError(f"{self.ranks} x {nbytes} bytes of shared memory could not be mapped")
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def count_wrong(self, variant: str, nbytes: int) -> int:
        if variant != "memcpy":
            return super().count_wrong(variant, nbytes)
        source = self.pieces(variant, nbytes)[0]
        self._pattern.fill(source)
        self.run(variant, nbytes, 0, 1)
        wrong = int(np.count_nonzero(self._target[:nbytes] != source))
        source[:] = 0
        return wrong

    def bind(self, variant: str, raw: Any) -> Call:
        return lambda: self.run(variant, len(raw), 0, 1)

    def calls(self, variant: str, nbytes: int) -> list[Call]:
        return [self.bind(variant, self.pieces(variant, nbytes)[0])]

    def run(self, variant: str, nbytes: int, warm: int, count: int, batch: int = 1) -> list[float]:
        pieces, times = self.pieces(variant, nbytes), np.zeros(count)
        stride = pieces[1].ctypes.data - pieces[0].ctypes.data if len(pieces) > 1 else 0
        rest = (nbytes, stride, len(pieces), warm, count, times.ctypes.data)
        if variant == "memcpy":
            self.library.bare_memcpy(self._target.ctypes.data, pieces[0].ctypes.data, *rest)
        elif self.library.bare_all_reduce(self.dtype.encode(), *rest) != 0:
            raise TypeError(f"bare.c has no {self.dtype}")
        return times.tolist()

    def info(self) -> dict[str, Any]:
        return {"label": "two-shot loop in C"}
