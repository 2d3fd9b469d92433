"""DistributedOptimizer: any torch optimizer, stepping on gradients that are averaged over all ranks."""

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from dcoll import _C
from dcoll.collectives import on_communicator
from dcoll.compression.codecs import Compression, OptimizersCompressor, check_adasum, check_compression
from dcoll.errors import ArgumentError
from dcoll.job.process_sets import communicator_if_included, global_process_set
from dcoll.ops import Adasum, Average, ReduceOp, Sum, wrong_op
from dcoll.optimizer.adasum_optimizer import DeltaSync, DistributedAdasum
from dcoll.optimizer.buckets import new_label
from dcoll.optimizer.gradients import GradientSync
from dcoll.optimizer.optimizer_arguments import Names, bucket_settings, groups_of
from dcoll.optimizer.owners import is_nobodys, leave, now_of, shared_with, use
from dcoll.optimizer.wrapper import Wrapper


class _Distributed(Wrapper):
    """What DistributedOptimizer adds to the wrapped optimizer's class, of which the result is a subclass."""

    _dcoll: GradientSync
    _dcoll_others: list[GradientSync]  # of other optimizers that have some of the parameters too
    _dcoll_skip = False
    _dcoll_known: list[list[torch.Tensor]]  # the groups' parameters at the last step

    @property
    def _dcoll_all(self) -> list[GradientSync]:
        return [now_of(one) for one in (self._dcoll, *self._dcoll_others)]

    def synchronize(self) -> None:
        """Reduce gradients that are not reduced yet. After backward() they are, and this does nothing."""
        for sync in self._dcoll_all:
            sync.before_step()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """step() inside does not synchronize(). For scripts written for Horovod, where that had to be said."""
        before, self._dcoll_skip = self._dcoll_skip, True
        try:
            yield
        finally:
            self._dcoll_skip = before

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add up gradients on this rank alone; the next one outside reduces the sums."""
        with ExitStack() as stack:
            for sync in self._dcoll_all:
                stack.enter_context(sync.no_sync())
            yield

    def communication_seconds(self) -> float:
        """Seconds spent so far waiting for communication that backward() did not hide."""
        return sum(sync.wait_seconds() for sync in self._dcoll_all)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backward passes are added up locally before the gradients are reduced."""
        for sync in self._dcoll_all:
            sync.set_passes(passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The wrapped optimizer's step. The closure's loss is averaged over the ranks whose closure returns one
        number, so all take the same decisions.
        """
        self._dcoll_notice()
        for sync in [] if self._dcoll_skip else self._dcoll_all:
            sync.before_step(closure_follows=closure is not None)
        result = super().step(self._synced(closure) if closure is not None else None)  # type: ignore[misc]
        self._dcoll.after_step()
        self._dcoll_stepped()
        return result

    def _dcoll_notice(self) -> None:
        """Parameters that somebody put into a group otherwise than by add_param_group()."""
        groups = [group["params"] for group in self.param_groups]
        if _are_same(groups, self._dcoll_known):
            return
        self._dcoll_known = [list(group) for group in groups]
        if new := [p for p in self._dcoll_params() if is_nobodys(p)]:
            self._dcoll.extend(new)

    def _synced(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def synced() -> Any:
            loss = closure()
            if not self._dcoll_skip:
                self.synchronize()
            comm = self._dcoll.comm
            return loss if comm.size == 1 else _mean_loss(comm, loss)

        return synced

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As in the wrapped optimizer, which may take no argument or have another default."""
        given = () if set_to_none is None else (set_to_none,)
        torchs = type(self._dcoll_wrapped).zero_grad is torch.optim.Optimizer.zero_grad
        for sync in self._dcoll_all:
            sync.before_zero_grad(torchs if set_to_none is None else set_to_none)
        super().zero_grad(*given)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; the same group on every rank. Gradients that are there after backward() are reduced at once."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._dcoll.extend(self.param_groups[-1]["params"])

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with where compression's schedule is, and what it has lost on this rank, which is this one's."""
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        self._dcoll.residuals.save(state, self.param_groups, self._dcoll.comm.rank)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch. The wrapped optimizer sees the new state too, and compression what it had lost."""
        super().load_state_dict(state_dict)
        self._dcoll.residuals.load(state_dict, self.param_groups, self._dcoll.comm.rank)


# The wrapped optimizer's step, which theirs calls, calls hooks. Without this torch would make theirs call them too as
# soon as a state is loaded.
_Distributed.step.hooked = DistributedAdasum.step.hooked = True  # type: ignore[attr-defined]


def _mean_loss(comm: _C.Communicator, loss: Any) -> Any:
    """Of the ranks whose closure returned one number; what others returned is theirs. All ranks make the call."""
    plain = torch.as_tensor(loss) if isinstance(loss, torch.Tensor | int | float) else torch.empty(0)
    one = plain.numel() == 1
    pair = torch.tensor([float(plain.detach()) if one else 0.0, float(one)], dtype=torch.float64)
    total, ranks = on_communicator.allreduce_sync(comm, pair, Sum, "loss of the closure")
    if not one:
        return loss
    mean = (total / ranks).to(plain).reshape(plain.shape)
    return mean if isinstance(loss, torch.Tensor) else float(total / ranks)


_classes: dict[tuple[type, type], type] = {}


def _distributed_class(adds: type, base: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    if (adds, base) not in _classes:
        attributes = {"__doc__": base.__doc__, "__module__": base.__module__}
        _classes[adds, base] = type(base.__name__, (adds, base), attributes)
    return _classes[adds, base]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = global_process_set,
    *,
    bucket_mb: float | None = None,
    check_sync: int = 0,
) -> Any:
    """Wrap `optimizer` so that every rank steps on the gradients of all ranks. Make it the same way on every rank.

    The result is an optimizer of the same class that shares the wrapped one's parameters and state. Gradients are
    reduced while backward() runs; when it returns, every .grad is the reduced one, and clipping, GradScaler and
    schedulers work as in one process. Use the result from then on, and build schedulers on it.

    named_parameters: model.named_parameters(), for messages.
    compression: what gradients are on their way: dcoll.Compression.none, fp16, bf16, int8, topk(ratio), auto(lossy) or
        powersgd(rank), a class derived from dcoll.compression.Compressor, or an object of a class derived from
        StatefulCompressor, there too.
    backward_passes_per_step: backward passes added up locally before their gradients are reduced.
    op: dcoll.Average, dcoll.Sum or dcoll.Adasum. With Adasum each rank steps by itself, and the steps are combined.
    gradient_predivide_factor: divide by this before the sum and by size() / this after it, against overflow.
    num_groups: deprecated; see groups.
    groups: what is reduced together: a number of groups of consecutive parameters, or lists of parameters, those in
        none being by themselves. By default, what becomes ready one after the other, up to bucket_mb.
    sparse_as_dense: reduce sparse gradients as dense ones instead of gathering their entries. They stay sparse.
    process_set: the ranks among which gradients are reduced (default: all). On others the optimizer works alone.
    bucket_mb: how much is reduced at once, in MiB (default: DCOLL_BUCKET_MB).
    check_sync: every so many steps, raise an error if parameters differ between ranks, naming the first (0: never).
    """
    _check_arguments(optimizer, op, compression, gradient_predivide_factor, check_sync)
    if bucket_mb is not None and not bucket_mb >= 0:
        raise ArgumentError(f"bucket_mb is {bucket_mb}, but must be 0 (a bucket per parameter) or more MiB")
    group_of = groups_of(optimizer, num_groups, groups)
    if group_of is not None and bucket_mb is not None:
        raise ArgumentError("got both bucket_mb= and groups=, which say the same thing in two ways: pass one")
    names = Names(optimizer, named_parameters)
    options = {
        "op": op,
        "process_set": process_set,
        "gradient_predivide_factor": gradient_predivide_factor,
        "sparse_as_dense": sparse_as_dense,
    }
    ranks = global_process_set if process_set is None else process_set
    comm = communicator_if_included(ranks)
    present = (lambda: ranks.comm) if comm is not None else (lambda: None)  # after shutdown() and init() another one
    if comm is None:  # no member
        comm = _C.connect_local(1)[0]
    if op is Adasum and comm.size > 1:
        label = new_label(comm)
        steps = DeltaSync(present, optimizer, names, compression, backward_passes_per_step, label)
        return _wrap(optimizer, DistributedAdasum, steps, check_sync, options)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    default_mb, first_mb = bucket_settings(comm, any(p.is_cuda for p in params))
    bucket_mb = default_mb if bucket_mb is None else bucket_mb
    alike = [*options.values(), compression, backward_passes_per_step]
    others, own = shared_with(params, alike, names)
    sync = GradientSync(
        comm,
        own,
        names,
        Average if op is Adasum else op,  # of one rank
        backward_passes_per_step,
        int(min(bucket_mb, 1 << 40) * (1 << 20)),
        int(min(first_mb, bucket_mb) * (1 << 20)),
        gradient_predivide_factor,
        sparse_as_dense,
        present,
        compression,
        group_of or (lambda _: []),
        any_thread=True,
    )
    use(sync, others, alike)
    return _of_gradients(_wrap(optimizer, _Distributed, sync, check_sync, options), others)


def _are_same(some: list[list[torch.Tensor]], others: list[list[torch.Tensor]]) -> bool:
    """Whether the lists have the same tensors. Asked in every step."""
    if list(map(len, some)) != list(map(len, others)):
        return False
    return all(all(map(operator.is_, a, b)) for a, b in zip(some, others, strict=True))


def _of_gradients(wrapper: _Distributed, others: list[GradientSync]) -> _Distributed:
    wrapper._dcoll_others = others
    wrapper._dcoll_known = [list(group["params"]) for group in wrapper.param_groups]
    weakref.finalize(wrapper, leave, [wrapper._dcoll, *others]).atexit = False
    return wrapper


def _wrap(optimizer: torch.optim.Optimizer, adds: type, sync: Any, check_sync: int, options: dict[str, Any]) -> Any:
    """options: what other libraries look at."""
    cls = _distributed_class(adds, type(optimizer))
    wrapper: Any = cls.__new__(cls)
    # Everything but `step`, which a scheduler made for the wrapped optimizer has replaced in it.
    wrapper.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    wrapper.__dict__.update(options)
    wrapper._dcoll = sync
    wrapper._dcoll_wrapped = optimizer
    wrapper._dcoll_check = check_sync
    wrapper._dcoll_steps = 0
    return wrapper


def _check_arguments(optimizer: Any, op: Any, compression: Any, predivide: float, check_sync: int) -> None:
    if isinstance(optimizer, Wrapper):
        raise ArgumentError("the optimizer is a DistributedOptimizer already: pass the plain one, once")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"got a {type(optimizer).__name__}, but optimizer must be a torch.optim.Optimizer")
    if type(op) is not ReduceOp or op not in (Average, Sum, Adasum):
        raise wrong_op(op, (Average, Sum, Adasum))
    if predivide != 1.0 and op is not Average:
        raise ArgumentError("gradient_predivide_factor not supported with op != Average")
    if predivide <= 0:
        raise ArgumentError(f"gradient_predivide_factor is {predivide}, but must be positive")
    check_compression(compression)
    if op is Adasum:
        check_adasum(compression)
    if op is Adasum and isinstance(compression, OptimizersCompressor):
        raise ArgumentError(
            f"compression is {compression!r}, which is for op Average and Sum, but op is Adasum. Use Compression.fp16, "
            "bf16 or none"
        )
    if isinstance(check_sync, bool) or not isinstance(check_sync, int) or check_sync < 0:
        raise ArgumentError(f"check_sync is {check_sync!r}, but must be a number of steps, or 0 for never")
