"""Parts of PyTorch that other checks do not use: each as its manual shows it."""

import shutil
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from parallel_models import batches, model, near, trained
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

import dcoll.torch  # noqa: F401  # registers the backend


def check_init() -> None:
    dist.init_process_group("dcoll")


def share(whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def check_a_checkpoint_is_saved_beside() -> None:
    folders: list[object] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    folder = Path(str(folders[0])) / "saved"
    net = model()
    saving = checkpoint.async_save({"model": net.state_dict()}, checkpoint_id=folder)
    expected = trained()  # which does no harm to what is saved meanwhile
    saving.result()
    other = {"model": {name: torch.zeros_like(value) for name, value in expected.items()}}
    checkpoint.load(other, checkpoint_id=folder)
    near(other["model"], net.state_dict())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(str(folders[0]))


def check_an_optimizer_in_parts() -> None:
    """Each rank has the state of a part of the parameters, and broadcasts what its steps come to."""
    net = DDP(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-2)
    for x, y in batches():
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(share(x)), share(y)).backward()
        optimizer.step()
    near(net.module.state_dict(), trained())
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert len(optimizer.state_dict()["state"]) == len(list(net.parameters()))


def check_the_sharded_state_of_fsdp1() -> None:
    """Of which some ranks have no part of some tensors. PyTorch asks CUDA then where those are, but not with Gloo."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    def states(net: torch.nn.Module) -> dict[str, object]:
        with FSDP.state_dict_type(net, StateDictType.SHARDED_STATE_DICT):
            return {"model": net.state_dict()}

    folders: list[object] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    net = FSDP(model(), device_id=torch.device("cpu"))
    checkpoint.save(states(net), checkpoint_id=str(folders[0]))
    again = FSDP(model(), device_id=torch.device("cpu"))
    with torch.no_grad():
        again._flat_param.zero_()
    loaded = states(again)
    checkpoint.load(loaded, checkpoint_id=str(folders[0]))
    with FSDP.state_dict_type(again, StateDictType.SHARDED_STATE_DICT):
        again.load_state_dict(loaded["model"])
    assert not again._flat_param.numel() or torch.equal(again._flat_param, net._flat_param)
    for sharded in loaded["model"].values():
        whole = torch.empty(sharded.size(), dtype=sharded.dtype) if dist.get_rank() == 0 else None
        sharded.gather(0, whole)
        assert whole is None or whole.isfinite().all()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(str(folders[0]))


def check_a_compiled_function_that_sends() -> None:
    """Dynamo leaves messages to Python without a word, as it does with Gloo."""
    n, r = dist.get_world_size(), dist.get_rank()

    def swapped(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(3)
        here, there = dist.P2POp(dist.isend, x, (r + 1) % n), dist.P2POp(dist.irecv, y, (r - 1) % n)
        for work in dist.batch_isend_irecv([here, there]):
            work.wait()
        return y + 1

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = torch.compile(swapped, backend="aot_eager")(torch.full((3,), float(r)))
    assert got.eq((r - 1) % n + 1).all()
    assert not [str(one.message) for one in told if "Dynamo" in str(one.message)]


def check_ddp_with_sparse_gradients() -> None:
    n, r = dist.get_world_size(), dist.get_rank()
    net = DDP(torch.nn.Embedding(n + 1, 3, sparse=True).double())
    net(torch.tensor([0, r + 1])).sum().backward()
    gradient = net.module.weight.grad
    assert gradient.is_sparse
    rows = torch.tensor([1.0, *[1 / n] * n], dtype=torch.double)
    torch.testing.assert_close(gradient.to_dense(), rows.unsqueeze(1).expand(n + 1, 3))


def check_ddp_with_the_hook_of_bfloat16() -> None:
    """By another name, for DDP takes the hook's to need NCCL."""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = default_hooks.bf16_compress_hook(state, bucket)
        return future

    net = DDP(model().float())
    net.register_comm_hook(None, hook)
    x, y = next(iter(batches()))
    torch.nn.functional.mse_loss(net(share(x).float()), share(y).float()).backward()
    alone = model().float()
    torch.nn.functional.mse_loss(alone(x.float()), y.float()).backward()
    for got, expected in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=0.05, atol=0.05)


def check_new_subgroups() -> None:
    n, r = dist.get_world_size(), dist.get_rank()
    for each in (each for each in range(1, n + 1) if n % each == 0):
        mine, groups = dist.new_subgroups(each)
        assert len(groups) == n // each
        tensor = torch.tensor([r])
        dist.all_reduce(tensor, group=mine)
        first = r // each * each
        assert tensor.item() == sum(range(first, first + each))


def check_ranks_as_the_group_counts_them() -> None:
    n, r = dist.get_world_size(), dist.get_rank()
    order = list(range(n))[::-1]
    group = dist.new_group(order, sort_ranks=False)
    tensor = torch.tensor([r])
    dist.broadcast(tensor, group=group, group_src=0)
    assert tensor.item() == n - 1
    tensor = torch.tensor([r])
    dist.reduce(tensor, group=group, group_dst=n - 1)
    assert r != 0 or tensor.item() == sum(range(n))
    parts = [torch.tensor([part]) for part in range(n)] if r == n - 1 else None
    dist.scatter(tensor, parts, group=group, group_src=0)
    assert tensor.item() == dist.get_rank(group) == n - 1 - r
    if n > 1:
        behind, before = (dist.get_rank(group) + 1) % n, (dist.get_rank(group) - 1) % n
        sent = dist.isend(torch.tensor([r]), group=group, group_dst=behind)
        dist.recv(tensor, group=group, group_src=before)
        sent.wait()
        assert tensor.item() == order[before]


def check_all_reduce_coalesced() -> None:
    n = dist.get_world_size()
    tensors = [torch.full((size,), 1.0) for size in (1, 70, 20_000)]
    dist.all_reduce_coalesced(tensors)
    assert all(tensor.eq(n).all() for tensor in tensors)
    future = dist.all_reduce_coalesced(tensors, async_op=True)
    future.wait()
    assert all(tensor.eq(n * n).all() for tensor in tensors)
