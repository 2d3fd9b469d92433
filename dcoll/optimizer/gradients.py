"""Gradients of a set of parameters, reduced in fused buckets while backward runs.

Each parameter's .grad lies in a bucket of the core's Reducer. Autograd calls a hook when a gradient is complete
(csrc/bind/gradient_hook.cc); the hook reports it ready, and the core reduces every bucket that became full. A callback
at the end of backward brings in small gradients (late_gradients.py), sends the rest and waits: then .grad is reduced.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dcoll import _C, gradient_errors
from dcoll.collectives import on_communicator
from dcoll.collectives.sparse import SparseAsDense, SparseGradients, agree_on_kinds
from dcoll.compression.codecs import NoneCompressor
from dcoll.errors import ArgumentError, text_of
from dcoll.ops import Average, ReduceOp, Sum
from dcoll.optimizer.backward import NO_TASK, graph_task, hook, is_nested, running, untraced, watch
from dcoll.optimizer.buckets import AnyReducer, Layout, Views, agree_on_order, new_label
from dcoll.optimizer.failed_rounds import NO_END, FailedRounds
from dcoll.optimizer.late_gradients import LateGradients, late_ones
from dcoll.optimizer.optimizer_arguments import check_passes
from dcoll.optimizer.owners import check, take_over

_NO_BACKWARD = -2  # no graph task has this number


class GradientSync(FailedRounds):
    """Keeps the gradients of `params` equal on all ranks of `comm`."""

    _reducer: AnyReducer  # made by _build(), anew when the set of parameters changes

    def __init__(
        self,
        comm: _C.Communicator,
        params: Iterable[torch.Tensor],
        name_of: Callable[[torch.Tensor], str],
        op: ReduceOp = Average,
        passes: int = 1,
        bucket_bytes: int = 25 << 20,
        first_bucket_bytes: int = 1 << 20,
        predivide: float = 1.0,
        sparse_as_dense: bool = False,
        present_comm: Callable[[], _C.Communicator | None] = lambda: None,
        compression: Any = NoneCompressor,
        group_of: Callable[[Sequence[torch.Tensor]], list[int]] = lambda _: [],
        late_bytes: int = 4096,
        any_thread: bool = False,
    ) -> None:
        """passes: backward passes whose gradients are added up locally before they are reduced.
        late_bytes: gradients up to this size are taken when backward has ended (late_gradients.py).
        any_thread: backward may run on other threads than this one; not where ranks are threads.
        present_comm: the job's communicator now, which changes when the job is left (None) and joined again.
        """
        check_passes(passes)
        self.comm = comm
        self._present_comm = present_comm
        self.name_of = name_of
        self.op = op
        self.passes = passes
        self._layout = Layout(new_label(comm), op, bucket_bytes, first_bucket_bytes, predivide, compression, group_of)
        self._as_dense = SparseAsDense() if sparse_as_dense else None

        self.params: list[torch.Tensor] = []  # whose gradients go through the buckets, by the Reducer's numbers
        self.sparse = SparseGradients()  # those that are gathered
        self._frozen: list[torch.Tensor] = []  # need no gradient now, but may later
        self._gradients = Views(self._layout.scheduled, name_of)
        self._views, self.residuals = self._gradients.tensors, self._gradients.residuals
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._late = self._told = LateGradients()  # _told: those that were late when the backward began
        self._late_bytes = late_bytes
        self._thread = threading.get_ident()
        self._any_thread = any_thread
        self.hook_lock = threading.RLock()
        self._noticed = self._nested = False  # a hook was called in the backward that runs, in one inside it
        # For the hooks: the Reducer, the graph task whose hooks are coming in, and whether they have anything to do.
        self._state = _C.HookState()
        self._outer_task = _NO_BACKWARD  # the one at whose end finish() runs
        self._passes_left = passes - 1  # before the one in which gradients are reduced
        self._local = 0  # no_sync() contexts that are open
        self._set_idle()
        self._begun = False  # a backward ran since the last finish()
        self._began_in = self._ended_in = 0  # the backward, as running() numbers them, that a hook noticed; that ended
        self._reduced = False  # finish() ran since the last step() or zero_grad()
        self._ordered, self._joins = False, 0
        self._waited_before = 0.0  # by Reducers that were replaced
        self._attach(list(params))

    # --- the set of parameters -------------------------------------------------------------------------------------

    def _attach(self, params: list[torch.Tensor]) -> None:
        for p in params:
            check(p, self.name_of)
        take_over(self, params)
        sparse_now = {id(p) for p in self.sparse.params}
        self._frozen = [p for p in params if not p.requires_grad]
        self.params = [p for p in params if p.requires_grad and id(p) not in sparse_now]
        self._build()

    def release(self) -> None:
        """Remove the hooks: gradients are no longer reduced."""
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        self._late.set([], [])

    def _build(self) -> None:
        """A Reducer, views and hooks for self.params."""
        self.release()
        if hasattr(self, "_reducer"):
            self._waited_before += self._reducer.wait_seconds()
        self._make_reducer()
        hooks = [
            _C.GradientHook(self, self._views, graph_task, self._state, i, view.is_contiguous())
            for i, view in enumerate(self._views)
        ]
        late = late_ones(self.params, self._late_bytes)
        if (late or self._frozen or self.comm.size > 1) and not watch(self):
            late = []
        without = set(late)
        self._late.set([self.params[i] for i in late], [hooks[i] for i in late])
        self._hooks = [
            p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            for i, (p, hook) in enumerate(zip(self.params, hooks, strict=True))
            if i not in without
        ]
        self._hooks += [
            p.register_post_accumulate_grad_hook(self._sparse_hook)  # type: ignore[no-untyped-call]
            for p in self.sparse.params
            if p.requires_grad
        ]

    def _hook_late(self) -> None:
        """Hooks for late parameters too. On several threads nobody can tell which backward brought their gradients."""
        self._hooks += self._late.register()
        self._late, self._late_bytes = LateGradients(), -1

    def _make_reducer(self) -> None:
        self._reducer = self._layout.reducer(self.comm, self.params, [self.name_of(p) for p in self.params])
        self._ordered = self.comm.size == 1  # nothing travels, so no order is better than another
        self._dense: set[int] = set()  # whose gradients all ranks know to be dense
        self._state.reducer = self._reducer if isinstance(self._reducer, _C.Reducer) else None
        self._gradients.make(self._reducer, self.params)

    def _follow_job(self) -> None:
        """After shutdown() and init(): buckets and a Reducer of the new communicator. Collective, then."""
        comm = self._present_comm()
        if comm is None or comm is self.comm:
            return
        self.comm = comm
        self._waited_before += self._reducer.wait_seconds()
        self._end_round()
        self._reduced = self._state.sums_again = False
        self._make_reducer()

    @untraced
    def extend(self, params: Iterable[torch.Tensor]) -> None:
        """More parameters. Collective: the same ones on every rank. Where gradients are reduced, theirs are too."""
        self._follow_job()
        new = list(params)
        self._attach([*self.params, *self.sparse.params, *self._frozen, *new])
        new = [p for p in new if p.requires_grad]
        if self._reduced and new and self.comm.size > 1:
            self._reduce_now(new)

    def _thaw(self) -> None:
        """Parameters that began to require a gradient."""
        if thawed := [p for p in self._frozen if p.requires_grad]:
            self._frozen = [p for p in self._frozen if not p.requires_grad]
            self.extend(thawed)

    def _reduce_now(self, new: Sequence[torch.Tensor]) -> None:
        """Gradients that came before their parameters had hooks, one by one, this once; here or on other ranks."""
        kinds = agree_on_kinds(self.comm, new, self.name_of, self._as_dense is not None)
        if any(dim for _, dim in kinds):
            self.sparse.add([(p, dim) for p, (_, dim) in zip(new, kinds, strict=True) if dim])
            self._attach([*self.params, *self._frozen])
            self.sparse.gather(self.comm, self.op, self._called, new)
        used = {id(p) for p, (dense, _) in zip(new, kinds, strict=True) if dense}
        scale = self._layout.predivide
        for i, (p, view) in enumerate(zip(self.params, self._views, strict=True)):
            if id(p) not in used:
                continue
            if p.grad is None:
                p.grad = view.zero_()
            else:
                self._in_bucket(i, as_it_is=True)
            on_communicator.allreduce_sync(self.comm, view, self.op, self._called(p), 1.0 / scale, scale, in_place=True)

    def _called(self, p: torch.Tensor) -> str:
        """What a collective for it alone is called."""
        return f"{self.name_of(p)} of {self._layout.label}"

    # --- during backward -------------------------------------------------------------------------------------------

    @hook
    def bring_in(self, index: int) -> None:
        """A gradient that the hook found out of the ordinary, or ready a second time."""
        if self._in_bucket(index) and not self._reducer.mark_ready(index):
            raise gradient_errors.ready_twice(self.name_of(self.params[index]))

    @untraced
    def _sparse_hook(self, p: torch.Tensor) -> None:
        if graph_task() != self._state.task:
            self.begin_backward()
        if self._state.sums_again and not self._state.idle and self.sparse.is_sum(p.grad):
            raise gradient_errors.summed_twice(self.name_of(p))

    def _in_bucket(self, index: int, as_it_is: bool = False) -> bool:
        """Bring a gradient that autograd or the user put elsewhere into its bucket. False: it is sparse, and stays."""
        p, view = self.params[index], self._views[index]
        grad = p.grad
        assert grad is not None
        if grad is view:
            if self._state.sums_again:
                raise gradient_errors.summed_twice(self.name_of(p))
            return True
        if grad.layout is not torch.strided:
            if self._state.sums_again and self.sparse.is_sum(grad):
                raise gradient_errors.summed_twice(self.name_of(p))
            if self._as_dense is None:
                if not grad.is_sparse:
                    raise gradient_errors.strange_layout(self.name_of(p), grad.layout)
                return False
            grad = self._as_dense.to_dense(p, grad)
        if grad.shape != view.shape or grad.dtype != view.dtype or grad.device != view.device:
            raise gradient_errors.converted(self.name_of(p), view, grad)
        self._gradients.fill(index, grad.detach(), None if as_it_is else self._reducer)
        p.grad = view
        return True

    @hook
    def begin_backward(self) -> None:
        """The first hook of a backward: see to it that its end is noticed."""
        self._follow_job()
        self._began_in = running()
        self._state.task = task = graph_task()
        if is_nested():
            # A backward inside a backward (reentrant checkpoint). Only the outer one's end is the end; if no hook of
            # the outer one comes any more, finish when everything is there.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_nested)
            self._begun = self._nested = True
        elif task != self._outer_task:
            if self._outer_task != _NO_BACKWARD:
                self.throw_away(NO_END, forget=False)
            self._outer_task = task
            self._state.task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
            self._begun = self._noticed = True
        if not self._state.idle:
            self._gradients.leave_kept(self._reducer, self.params)

    def before_backward(self) -> None:
        """No hook has been called yet; and perhaps none will be, if the backward goes through late parameters alone."""
        if threading.get_ident() != self._thread:
            if self._any_thread and self._late:
                self._hook_late()
            return
        self._told = self._late
        if self._late or self._frozen:
            self._noticed = self._nested = False
            self._late.before_backward()

    def after_backward(self) -> None:
        if self._outer_task != _NO_BACKWARD and self._began_in == running():
            self._end()  # compiled autograd has left the callback out
        if self._noticed or not (self._told or self._frozen) or threading.get_ident() != self._thread:
            return
        if (self._told and (self._told.changed() or self._nested)) or self._thawed_alone():
            self._follow_job()
            self._begun = True
            self._end()

    def _thawed_alone(self) -> bool:
        """Whether there are gradients of parameters that need them again and have no hooks yet."""
        return any(p.requires_grad and p.grad is not None for p in self._frozen)

    @untraced
    def _end(self) -> None:
        self._state.task = self._outer_task = _NO_BACKWARD
        self._ended_in = running()
        if self._local:
            return
        if not self._passes_left:
            return self.finish()
        self._passes_left -= 1
        self._set_idle()

    @untraced
    def _end_nested(self) -> None:
        self._state.task = _NO_BACKWARD
        if self._outer_task == _NO_BACKWARD and not self._state.idle and not self._reducer.missing():
            self._ended_in = running()
            self.finish()

    def _set_idle(self) -> None:
        self._state.idle = self._passes_left > 0 or self._local > 0

    def _end_round(self) -> None:
        self._state.task = self._outer_task = _NO_BACKWARD
        self._passes_left = self.passes - 1
        self._begun = self._gradients.left = False
        self._set_idle()

    def finish(self) -> None:
        """Send what has not been sent, wait for all, and give every parameter its reduced gradient. Collective."""
        try:
            self._gradients.leave_kept(self._reducer, self.params)
            self._end_round()
            missing = self._bring_in_all()
            began_empty = not self._ordered and len(self._reducer.missing()) == len(self.params)
        except BaseException as error:
            self.throw_away(f"reducing its gradients raised {text_of(error)}")
            raise
        try:
            self._reduce(missing, began_empty)
        except BaseException:
            self._forget()
            raise
        if self._frozen:
            self._thaw()

    def _reduce(self, missing: Sequence[int], began_empty: bool) -> None:
        unused = self._reducer.finish()
        without = set(unused)
        for i in missing:
            if i not in without and self.params[i].grad is None:  # a sparse one is told by _finish_sparse()
                self.params[i].grad = self._views[i]
        self._reduced = True
        self._state.sums_again = self.op is Sum and self.comm.size > 1
        if not self._finish_sparse(unused):
            self._agree_on_order(began_empty)

    def _bring_in_all(self) -> list[int]:
        """Have the Reducer take what is there, and tell what was not in this backward."""
        self._late.take()
        if self._joins != self.comm.joins:
            self._joins, self._dense = self.comm.joins, set()  # who was in join() has missed some
        missing = self._reducer.missing()
        for i in missing:
            # An earlier backward left a gradient, which counts: ranks that have one now must not average with zeros.
            if (grad := self.params[i].grad) is not None:
                if self._in_bucket(i):
                    self._reducer.mark_ready(i)
                elif i in self._dense:  # the others do not ask again, but wait for the last bucket, and hear of this
                    raise gradient_errors.of_another_kind(self.name_of(self.params[i]), grad, self.comm)
        self.sparse.refuse_dense(self.comm, self.name_of)
        if self._state.sums_again:
            self.sparse.refuse_sums(self.name_of)
        return missing

    def _agree_on_order(self, knows_none: bool) -> None:
        """After the first backward: fill the buckets in the order in which rank 0's gradients became ready."""
        if self._ordered:
            return
        order = agree_on_order(self.comm, self._reducer, self._layout.label, knows_none)
        if order is None:
            return  # on all ranks alike; all are asked again after the next backward
        self._ordered = True
        self._reducer.rebuild(order)
        self._gradients.make(self._reducer, self.params)

    # --- sparse gradients ------------------------------------------------------------------------------------------

    def _finish_sparse(self, unused: Sequence[int]) -> bool:
        """Gather the gradients known to be sparse. True when some newly are, and the buckets were made anew without."""
        found = False  # the ranks tell each other the kind of each first gradient, and of what had none
        if self._as_dense is None and (unused or len(self._dense) < len(self.params)):
            asked = sorted(set(range(len(self.params))) - self._dense | set(unused))
            found = self.sparse.find(self.comm, [self.params[i] for i in asked], self.name_of)
            self._dense.update(set(asked).difference(unused))
        if found:
            self._attach([*self.params, *self._frozen])  # a bucket would carry their zeros
        self.sparse.gather(self.comm, self.op, self._called)
        if self._as_dense is not None:
            self.sparse.note(self._as_dense.restore(self.comm, self.params, self._views), self.op)
        return found

    # --- between backwards -----------------------------------------------------------------------------------------

    @untraced
    def before_step(self, closure_follows: bool = False) -> None:
        """Reduce what is not reduced yet: fewer backward passes than announced, gradients set by hand, or none, where
        there was no backward, as other ranks had one: its share is what is there. A closure may still bring one.
        """
        self._follow_job()
        if self._outer_task != _NO_BACKWARD and graph_task() == NO_TASK:
            self.throw_away(NO_END)
        if self._begun or not (self._reduced or (closure_follows and not self._set_by_hand())):
            self.finish()

    def _set_by_hand(self) -> bool:
        return any(p.grad is not None and p.grad is not v for p, v in zip(self.params, self._views, strict=True))

    @untraced
    def after_step(self) -> None:
        """The gradients were used: adding to them starts a new sum."""
        self._reduced = self._state.sums_again = False

    def _in_backward(self) -> bool:
        """Whether this is called in the middle of a backward that has come by these parameters."""
        task = graph_task()
        return task != NO_TASK and (
            (self._begun and task == self._outer_task) or (bool(self._late) and self._late.changed())
        )

    @untraced
    def before_zero_grad(self, set_to_none: bool) -> None:
        """The gradients are about to be thrown away."""
        self._follow_job()
        if self._in_backward() and not self._state.idle:
            raise AssertionError(
                "optimizer.zero_grad() was called in the middle of backward(), while gradients are being reduced: "
                "call it after backward() or before"
            )
        if self._begun:
            if len(self._reducer.missing()) < len(self.params):
                self.throw_away(NO_END)
            self._end_round()
        self._reduced = self._state.sums_again = False
        if self._frozen:
            self._thaw()
        self._late.none_left = set_to_none

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes per step; takes effect with the next round."""
        check_passes(passes)
        if self._begun:
            raise ArgumentError("backward_passes_per_step cannot change between backward() and step()")
        self.passes = passes
        self._end_round()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add up gradients on this rank alone; the next one outside reduces the sums."""
        self._local += 1
        self._set_idle()
        try:
            yield
        finally:
            self._local -= 1
            self._set_idle()

    def wait_seconds(self) -> float:
        """Time spent waiting for communication that backward did not hide."""
        return self._waited_before + self._reducer.wait_seconds()
