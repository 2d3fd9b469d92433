"""What PyTorch builds on process groups, on the dcoll backend: each trains a model to what one process comes to."""

import copy
import gc
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checks_torch_methods import is_mapped_shared
from parallel_models import BATCH, WIDTH, batches, model, near, train, trained
from torch.distributed import _functional_collectives as functional
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

import dcoll
from dcoll import _C
from dcoll.torch import ddp_buckets
from dcoll.torch.process_group import BACKENDS_IN_PYTHON, Collectives


def check_init() -> None:
    dist.init_process_group("dcoll")


def share(whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def whole_state(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach()
        for name, value in net.state_dict().items()
    }


def check_ddp() -> None:
    for options in ({}, {"bucket_cap_mb": 0.001}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        net = model()
        train(DDP(net, **options), share)
        near(whole_state(net), trained())


def _steps(net: torch.nn.Module, batch: torch.Tensor, count: int) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-6)
    for _ in range(count):
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()


def check_ddp_buckets_move_into_shared_memory() -> None:
    with pytest.MonkeyPatch.context() as patch:
        buckets: list[tuple[int, weakref.ref[Any]]] = []  # where they are, and the memory
        move = ddp_buckets._move

        def noted(comm: Any, storage: torch.UntypedStorage) -> int:
            place = move(comm, storage)
            known = getattr(storage, ddp_buckets.KEY)
            if known is not ddp_buckets.STAYS:
                buckets.append((known[0], weakref.ref(known[1])))
            return place

        patch.setattr(ddp_buckets, "_move", noted)
        _train_with_moved_buckets(buckets)


def _train_with_moved_buckets(buckets: list[tuple[int, "weakref.ref[Any]"]]) -> None:
    width = 160  # two layers are more than LEAST_ELEMENTS
    rows = torch.randn(8 * dist.get_world_size(), width, dtype=torch.double, generator=torch.manual_seed(1))
    for views in (False, True):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width)).double()
        alone, whole = copy.deepcopy(net), dist.new_group()
        ddp = DDP(net, process_group=whole, gradient_as_bucket_view=views)
        for steps in (2, 3):  # torch makes its buckets anew in the second; in the third they move
            _steps(ddp, share(rows), steps)
            _steps(alone, rows, steps)
            near(whole_state(net), whole_state(alone))
        moved = [memory for memory in (weak() for _, weak in buckets) if memory is not None]
        assert bool(moved) != (_C.emulates_device() or dcoll.local_size() == 1)  # one that shares memory with nobody
        assert all(memory.mapped for memory in moved)
        gradients = [parameter.grad for parameter in net.parameters()]
        kept = [gradient.clone() for gradient in gradients]
        if views and moved:
            assert {gradient.untyped_storage().data_ptr() for gradient in gradients} <= {at for at, _ in buckets}
            # Another process would map the file, which does not have these pages.
            file = gradients[0].untyped_storage()._get_shared_fd()
            with pytest.raises(OSError, match="device"):
                mmap.mmap(file, 4096)
        del ddp, net, moved
        dist.destroy_process_group(whole)
        dcoll.empty(1 << 20).fill_(7)  # would be memory that was freed too early
        assert all(torch.equal(*pair) for pair in zip(gradients, kept, strict=True))
        del gradients
        gc.collect()  # DDP is part of a cycle
        assert all(weak() is None for _, weak in buckets), "memory of torch's buckets is still there"


def check_reduced_tensors_of_programs_do_not_move() -> None:
    tensor = torch.ones(1 << 17)
    place = tensor.data_ptr()
    for _ in range(3):
        dist.all_reduce(tensor)
    assert tensor.data_ptr() == place
    assert not tensor.is_shared()


def check_tensors_that_stand_for_others() -> None:
    """PyTorch unwraps them where its dispatcher calls the backend, from 2.14 on."""
    n = dist.get_world_size()
    for call in (dist.all_reduce, lambda tensor: dist.broadcast(tensor, 0)):
        promised = functional.all_reduce(torch.ones(8), "sum", dist.group.WORLD)
        assert isinstance(promised, functional.AsyncCollectiveTensor)
        call(promised)
        assert promised.tolist() == [n * n if call is dist.all_reduce else n] * 8
    whole = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (n,)), [Replicate()])
    error = (NotImplementedError, "") if BACKENDS_IN_PYTHON else (dcoll.ArgumentError, "all_reduce got a DTensor")
    with pytest.raises(error[0], match=error[1]):
        dist.all_reduce(whole)


def check_ddp_with_powersgd() -> None:
    net = DDP(model())
    net.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        net(torch.ones(2, WIDTH, dtype=torch.double)).square().mean().backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
    everybodys = [torch.empty_like(gradients) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, gradients)
    assert all(torch.equal(one, gradients) for one in everybodys)


def check_ddp_with_hooks_and_no_sync() -> None:
    net = model()
    ddp = DDP(net)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    train(ddp, share)
    near(whole_state(net), trained())
    x, y = next(iter(batches()))
    alone = model().float()
    (2 * torch.nn.functional.mse_loss(alone(x.float()), y.float())).backward()
    for register in (
        lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
        lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
        lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
    ):
        ddp = DDP(model().float())
        register(ddp)
        with ddp.no_sync():
            torch.nn.functional.mse_loss(ddp(share(x).float()), share(y).float()).backward()
        torch.nn.functional.mse_loss(ddp(share(x).float()), share(y).float()).backward()
        for got, expected in zip(ddp.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(got.grad, expected.grad, rtol=0.05, atol=0.05)


def check_ddp_unused_and_uneven() -> None:
    net = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 1), "b": torch.nn.Linear(2, 1)})

    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
            return self.net[which](x)

    ddp = DDP(Half(), find_unused_parameters=True)
    ddp(torch.ones(1, 2), "a" if dist.get_rank() == 0 else "b").sum().backward()
    n = dist.get_world_size()
    assert net["a"].weight.grad is not None
    torch.testing.assert_close(net["a"].weight.grad, torch.full((1, 2), 1 / n))
    r, ddp = dist.get_rank(), DDP(torch.nn.Linear(2, 1))
    for divide_by_initial_world_size in (True, False):
        with ddp.join(divide_by_initial_world_size=divide_by_initial_world_size):
            for _ in range(1 + r):
                ddp.zero_grad()
                ddp(torch.ones(1, 2)).sum().backward()
        left = n - r  # in its last step the ranks before it have joined
        assert ddp.module.weight.grad.eq(left / n if divide_by_initial_world_size else 1).all()
    dist.barrier()


def sharded(**options: object) -> torch.nn.Sequential:
    net = model()
    for block in list(net):
        fully_shard(block, **options)
    return fully_shard(net, **options)


def check_fsdp2() -> None:
    net = sharded()
    train(net, share)
    near(whole_state(net), trained())


def check_fsdp2_with_memory_of_the_core() -> None:
    net = sharded()
    for module in net.modules():
        if hasattr(module, "set_allocate_memory_from_process_group_for_comm"):
            module.set_allocate_memory_from_process_group_for_comm(True)
    mapped: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        allocate = Collectives.allocate_tensor

        def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            mapped.append(is_mapped_shared(tensor))
            return tensor

        patch.setattr(Collectives, "allocate_tensor", noted)
        train(net, share)
    near(whole_state(net), trained())
    assert mapped
    assert all(mapped) == any(mapped) == (dcoll.local_size() > 1)


def check_fsdp2_gathers_while_it_computes() -> None:
    """In backward, and in forward from the second step on, in the order in which modules run."""
    with pytest.raises(dcoll.ArgumentError, match="Sequential without a module of FSDP2"):
        dcoll.torch.overlap_all_gathers(model())
    net = sharded()
    dcoll.torch.overlap_all_gathers(net)
    under_way: list[list[int]] = []

    def note(*_: object) -> None:
        results = [block._get_fsdp_state()._fsdp_param_groups[0]._all_gather_result for block in net]
        under_way.append([i for i, one in enumerate(results) if one is not None and one.all_gather_work is not None])

    last = len(net) - 1
    for hook in (net[0].register_forward_hook, net[last].register_full_backward_hook):
        hook(note)
    train(net, share)
    near(whole_state(net), trained())
    if dist.get_world_size() > 1:
        assert under_way[:2] == [[], [last - 1]]
        assert under_way[2:] == [[1], [last - 1]] * (len(under_way) // 2 - 1) != []


def check_fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import ShardingStrategy

    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        net = FSDP(model(), sharding_strategy=strategy, device_id=torch.device("cpu"), use_orig_params=True)
        train(net, share)
        with FSDP.summon_full_params(net):
            got = {name: value.detach().clone() for name, value in net.named_parameters()}
            near({name.replace("_fsdp_wrapped_module.", ""): value for name, value in got.items()}, trained())


def check_hybrid_sharding() -> None:
    n = dist.get_world_size()
    if n % 2:
        return
    mesh = init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("replicate", "shard"))
    net = sharded(mesh=mesh)
    train(net, share)
    near(whole_state(net), trained())


def plan() -> dict[str, object]:
    return {
        f"{i}.{name}": style() for i in range(2) for name, style in (("up", ColwiseParallel), ("down", RowwiseParallel))
    }


def check_tensor_parallel() -> None:
    n = dist.get_world_size()
    if 4 * WIDTH % n:
        return
    mesh = init_device_mesh("cpu", (n,))
    net = parallelize_module(model(), mesh, plan())
    train(net)
    near(whole_state(net), trained())


def check_tensor_parallel_and_fsdp() -> None:
    n = dist.get_world_size()
    if n % 2:
        return
    mesh = init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("data", "tensor"))
    net = parallelize_module(model(), mesh["tensor"], plan())
    for block in list(net):
        fully_shard(block, mesh=mesh["data"])
    fully_shard(net, mesh=mesh["data"])
    place = mesh.get_local_rank("data")
    train(net, lambda whole: whole.chunk(n // 2)[place])
    near(whole_state(net), trained())


def check_dtensor() -> None:
    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (n,))
    whole = torch.arange(float(12 * n * 6)).view(12 * n, 6)
    by_rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(by_rows.full_tensor(), whole)
    assert torch.equal(by_rows.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    assert torch.equal(by_rows.redistribute(mesh, [Replicate()]).to_local(), whole)
    assert torch.equal((by_rows.t() @ by_rows).full_tensor(), whole.t() @ whole)
    uneven = distribute_tensor(whole[: 2 * n + 1], mesh, [Shard(0)])
    assert torch.equal(uneven.full_tensor(), whole[: 2 * n + 1])


def check_checkpoints() -> None:
    """DCP: saved by FSDP2's shards, loaded into other shards."""
    folders: list[object] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    folder = Path(str(folders[0])) / "saved"
    net = sharded()
    train(net, share, steps=2)
    checkpoint.save({"model": get_model_state_dict(net)}, checkpoint_id=folder)
    other = model(blocks=2)
    torch.nn.init.zeros_(other[0].up.weight)
    fully_shard(other)
    state = {"model": get_model_state_dict(other)}
    checkpoint.load(state, checkpoint_id=folder)
    whole = whole_state(net)
    near({name: value.full_tensor() for name, value in state["model"].items()}, whole)
    alone = {"model": model(blocks=2).state_dict()}  # as a job of one process loads it
    checkpoint.load(alone, checkpoint_id=folder, no_dist=True)
    near(alone["model"], whole)


def functional_collectives(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    total = functional.all_reduce(x, "sum", dist.group.WORLD)
    gathered = functional.all_gather_tensor(x * 2, 0, dist.group.WORLD)
    mine = functional.reduce_scatter_tensor(gathered + 1, "sum", 0, dist.group.WORLD)
    swapped = functional.all_to_all_single(gathered, None, None, dist.group.WORLD)
    return total + 1, gathered, mine, swapped


def see_functional_collectives(run: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
    n, r = dist.get_world_size(), dist.get_rank()
    total, gathered, mine, swapped = run(torch.full((n,), float(r + 1)))
    assert total.eq(n * (n + 1) / 2 + 1).all()
    assert gathered.view(n, n).eq(2 * torch.arange(1.0, n + 1).unsqueeze(1)).all()
    assert mine.eq(n * (2 * (r + 1) + 1)).all()
    assert swapped.eq(2 * (r + 1)).all()


def check_compiled_functional_collectives() -> None:
    for run in (functional_collectives, torch.compile(functional_collectives, backend="aot_eager")):
        see_functional_collectives(run)


def check_functional_collectives_compiled_by_inductor() -> None:
    """torch.compile's default, which makes C++ of what is between them."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("needs a C++ compiler: Inductor calls one")
    run = torch.compile(functional_collectives, fullgraph=True)
    for _ in range(2):
        see_functional_collectives(run)


def check_compiled_ddp() -> None:
    net = model()
    ddp = torch.compile(DDP(copy.deepcopy(net)), backend="aot_eager")
    train(ddp, share)
    near({name.removeprefix("_orig_mod.module."): value for name, value in whole_state(ddp).items()}, trained())


def check_nn_functional() -> None:
    """torch.distributed.nn.functional: collectives with gradients."""
    from torch.distributed.nn import functional

    n, r = dist.get_world_size(), dist.get_rank()
    x = torch.full((3,), float(r + 1), requires_grad=True)
    functional.all_reduce(x * x).sum().backward()
    assert x.grad is not None
    assert x.grad.eq(2 * (r + 1) * n).all()
    x.grad = None
    torch.cat(functional.all_gather(x * 2)).sum().backward()
    assert x.grad.eq(2 * n).all()


def check_consumption_of_batches() -> None:
    assert BATCH % 2 == 0
    assert BATCH % dist.get_world_size() == 0
    assert os.environ["WORLD_SIZE"] == str(dist.get_world_size())


def check_dozens_of_overlapping_groups() -> None:
    """All there at once, with operations under way in each; among them the axes of a mesh of three dimensions."""
    r, n = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (n, 1, 1), mesh_dim_names=("a", "b", "c"))
    parts = [sorted((first + i) % n for i in range(length)) for first in range(n) for length in range(2, n + 1)] * 6
    made = [(mesh.get_group("a"), list(range(n))), (mesh.get_group("c"), [r])]
    mine = [(group, ranks) for group, ranks in (*made, *((dist.new_group(p), p) for p in parts)) if r in ranks]
    tensors = [torch.tensor([r + 0.5]) for _ in mine]
    works = [dist.all_reduce(t, group=g, async_op=True) for t, (g, _) in zip(tensors, mine, strict=True)]
    assert all(work.wait() for work in reversed(works))
    assert [t.item() for t in tensors] == [sum(ranks) + 0.5 * len(ranks) for _, ranks in mine]
    for group, _ in mine[2:]:
        dist.destroy_process_group(group)
