"""DistributedOptimizer: any torch optimizer, stepping on gradients that are averaged over all ranks."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dcoll import _C, collective, world
from dcoll.errors import ArgumentError
from dcoll.gradients import GradientSync
from dcoll.ops import Average, ReduceOp


class _Distributed:
    """What DistributedOptimizer adds to the wrapped optimizer's class, of which the result is a subclass."""

    _dcoll: GradientSync
    _dcoll_wrapped: torch.optim.Optimizer
    _dcoll_skip: bool

    def synchronize(self) -> None:
        """Reduce gradients that are not reduced yet. After backward() they are, and this does nothing."""
        self._dcoll.before_step()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """step() inside does not synchronize(). For scripts written for Horovod, where that had to be said."""
        before, self._dcoll_skip = self._dcoll_skip, True
        try:
            yield
        finally:
            self._dcoll_skip = before

    def communication_seconds(self) -> float:
        """Seconds spent so far waiting for communication that backward() did not hide."""
        return self._dcoll.wait_seconds()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backward passes are added up locally before the gradients are reduced."""
        self._dcoll.set_passes(passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The wrapped optimizer's step. The closure's loss is averaged, so that all ranks take the same decisions."""
        if not self._dcoll_skip:
            self._dcoll.before_step()
        result = super().step(self._synced(closure) if closure is not None else None)  # type: ignore[misc]
        self._dcoll.after_step()
        return result

    def _synced(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        sync = self._dcoll

        def synced() -> Any:
            loss = closure()
            if not self._dcoll_skip:
                sync.before_step()
            if sync.comm.size == 1 or loss is None:
                return loss
            value = torch.as_tensor(loss).detach()
            value = collective.allreduce_sync(sync.comm, value, Average, "loss of the closure", 1.0, 1.0)
            return value if isinstance(loss, torch.Tensor) else value.item()

        return synced

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch."""
        self._dcoll.before_zero_grad()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; the same group on every rank, between a step() and the next backward()."""
        super().add_param_group(param_group)  # type: ignore[misc]
        groups: list[dict[str, Any]] = self.param_groups  # type: ignore[attr-defined]
        self._dcoll.extend(groups[-1]["params"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch. The wrapped optimizer sees the new state too."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        wrapped = self._dcoll_wrapped
        wrapped.state, wrapped.param_groups = self.state, self.param_groups  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled or copied, it becomes the plain optimizer it wraps: hooks and buckets belong to this process."""
        return _plain, (type(self._dcoll_wrapped),), self.__getstate__()


def _plain(cls: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return cls.__new__(cls)


_classes: dict[type, type] = {}


def _distributed_class(base: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    if base not in _classes:
        attributes = {"__doc__": base.__doc__, "__module__": base.__module__}
        _classes[base] = type(base.__name__, (_Distributed, base), attributes)
    return _classes[base]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    bucket_mb: float | None = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
) -> Any:
    """Wrap `optimizer` so that every rank steps on the gradients of all ranks. Make it the same way on every rank.

    The result is an optimizer of the same class that shares the wrapped one's parameters and state. Gradients are
    reduced while backward() runs; when it returns, every .grad is the reduced one, and clipping, GradScaler and
    schedulers work as in one process. Use the result from then on, and build schedulers on it.

    named_parameters: model.named_parameters(), for messages.
    op: dcoll.Average or dcoll.Sum.
    backward_passes_per_step: backward passes added up locally before their gradients are reduced.
    bucket_mb: how much is reduced at once, in MiB (default: DCOLL_BUCKET_MB).
    sparse_as_dense: reduce sparse gradients as dense ones instead of gathering their entries.
    gradient_predivide_factor: divide by this before the sum and by size() / this after it, against overflow.
    """
    if isinstance(optimizer, _Distributed):
        raise ArgumentError("the optimizer is a DistributedOptimizer already: pass the plain one, once")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"got a {type(optimizer).__name__}, but optimizer must be a torch.optim.Optimizer")
    if bucket_mb is not None and not bucket_mb >= 0:
        raise ArgumentError(f"bucket_mb is {bucket_mb}, but must be 0 (a bucket per parameter) or more MiB")
    names = _Names(optimizer, named_parameters)
    comm = world.communicator()
    default_mb, first_mb = _bucket_settings(comm)
    bucket_mb = default_mb if bucket_mb is None else bucket_mb
    sync = GradientSync(
        comm,
        (p for group in optimizer.param_groups for p in group["params"]),
        names,
        op,
        backward_passes_per_step,
        int(bucket_mb * (1 << 20)),
        int(min(first_mb, bucket_mb) * (1 << 20)),
        gradient_predivide_factor,
        sparse_as_dense,
        lambda: world.WORLD.comm,
    )
    cls = _distributed_class(type(optimizer))
    wrapper: Any = cls.__new__(cls)
    # Everything but `step`, which a scheduler made for the wrapped optimizer has replaced in it.
    wrapper.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    wrapper._dcoll = sync
    wrapper._dcoll_wrapped = optimizer
    wrapper._dcoll_skip = False
    weakref.finalize(wrapper, sync.release).atexit = False
    return wrapper


def _bucket_settings(comm: _C.Communicator) -> tuple[float, float]:
    """DCOLL_BUCKET_MB and DCOLL_FIRST_BUCKET_MB."""
    now = {name: float(value) for name, _, _, _, value in _C.settings() if name.endswith("BUCKET_MB")}
    bucket_mb = now["DCOLL_BUCKET_MB"]
    if bucket_mb < 0:
        # A collective inside a node costs microseconds, so buckets are small: each is reduced while it is in the cache,
        # and little is left to do when backward ends. Between nodes larger messages make up for the latency.
        bucket_mb = 4.0 if comm.num_nodes == 1 else 25.0
    return bucket_mb, now["DCOLL_FIRST_BUCKET_MB"]


class _Names:
    """What to call a parameter in messages."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
    ) -> None:
        pairs = [] if named_parameters is None else list(named_parameters)
        if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
            raise ArgumentError("named_parameters should be pairs of name and parameter: model.named_parameters()")
        names = [name for name, _ in pairs]
        duplicates = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if duplicates:
            raise ArgumentError(
                f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}"
            )
        self._groups = optimizer.param_groups
        self._given: dict[int, str] = {}
        for name, p in pairs:
            self._given.setdefault(id(p), name)
        self._keep_alive = [p for _, p in pairs]  # an id is only a name while its object lives
        if named_parameters is None:
            for g, group in enumerate(optimizer.param_groups):
                self._given.update((id(p), f"param.{g}.{i}") for i, p in enumerate(group["params"]))
            return
        unnamed = [
            f"group {g} parameter {i} {list(p.shape)}"
            for g, group in enumerate(optimizer.param_groups)
            for i, p in enumerate(group["params"])
            if id(p) not in self._given
        ]
        if unnamed:
            raise ArgumentError(
                "named_parameters was specified, but one or more model parameters were not named: "
                f"{'; '.join(unnamed)}. Pass the names of all parameters of the optimizer, or none."
            )

    def __call__(self, param: torch.Tensor) -> str:
        given = self._given.get(id(param))
        if given is not None:
            return given
        for g, group in enumerate(self._groups):
            for i, p in enumerate(group["params"]):
                if p is param:
                    return f"param.{g}.{i}"
        return f"param {list(param.shape)}"
