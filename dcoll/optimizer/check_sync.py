"""Whether the ranks still hold the same bits: what DistributedOptimizer(check_sync=N) looks at every N steps."""

from collections.abc import Sequence

import torch

from dcoll import _C
from dcoll.collectives import on_communicator
from dcoll.errors import MismatchError


def check_tensors(comm: _C.Communicator, names: Sequence[str], tensors: Sequence[torch.Tensor], when: str) -> None:
    """Raise a MismatchError on every rank unless the tensors are the same, bit for bit, on all. Collective.

    Each rank sends one hash of them all, eight bytes; only if these differ, one hash of each, to find the tensor.
    """
    if comm.size == 1:
        return
    dense = [t.detach().contiguous().cpu() for t in tensors]
    hashes = _C.hash_memory([(t.data_ptr(), t.nbytes) for t in dense])
    mine = torch.tensor(hashes, dtype=torch.int64, device="cpu")
    whole = torch.tensor(_C.hash_memory([(mine.data_ptr(), mine.nbytes)]), dtype=torch.int64, device="cpu")
    if len(set(on_communicator.allgather_sync(comm, whole, "check_sync").tolist())) == 1:
        return
    everyones = on_communicator.allgather_sync(comm, mine.unsqueeze(0), "check_sync of each tensor").tolist()
    differing = [i for i in range(len(tensors)) if len({hashes[i] for hashes in everyones}) > 1]
    first = differing[0]
    groups: dict[int, list[int]] = {}
    for rank, hashes in zip(comm.job_ranks, everyones, strict=True):
        groups.setdefault(hashes[first], []).append(rank)
    # Most ranks are right, or the first is.
    usual, *others = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
    t = tensors[first]
    more = f", and {len(differing) - 1} more of {len(tensors)} tensors differ" if len(differing) > 1 else ""
    raise MismatchError(
        f"check_sync {when}: {names[first]} ({str(t.dtype).removeprefix('torch.')} {list(t.shape)}) is not the same on "
        f"all ranks: {_ranks(usual)} hold{'s' if len(usual) == 1 else ''} one value, "
        f"{', '.join(map(_ranks, others))} {'another' if len(others) == 1 else 'others'}{more}. Start from "
        "broadcast_parameters() and broadcast_optimizer_state(), and change parameters on all ranks alike."
    )


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
