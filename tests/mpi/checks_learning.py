"""Operations by name around the moment when the job learns what its links cost: ranks must go on choosing alike."""

import torch

import dcoll as hvd


def reduce_by_name(elems: int) -> None:
    ones = torch.ones(elems)
    whole = hvd.allreduce_async(ones, op=hvd.Sum, name=f"reduce {elems}")
    share = hvd.reducescatter_async(ones, op=hvd.Sum, name=f"scatter {elems}")
    assert (hvd.synchronize(whole) == hvd.size()).all()
    assert (hvd.synchronize(share) == hvd.size()).all()


def check_some_ranks_use_names_before_and_some_after() -> None:
    ordered = hvd.allreduce_async(torch.ones(1 << 18), op=hvd.Sum)
    if hvd.rank() % 2 == 0:
        hvd.synchronize(ordered)
    first = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="first")
    assert float(hvd.synchronize(first)) == hvd.size()
    if hvd.rank() % 2 != 0:
        hvd.synchronize(ordered)
    for bits in range(8, 21):
        reduce_by_name(1 << bits)
