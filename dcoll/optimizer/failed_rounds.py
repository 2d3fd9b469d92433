"""What a GradientSync does when a backward raises: its round comes to nothing, on all ranks alike.

The other ranks wait for the buckets that this one has not submitted. It refuses them one by one, as many calls as the
others make, which fail with the reason; so all have an error, none steps, and all are in step when they go on. A
backward that raises before any hook was called is noticed by the wrapped function of torch (backward.py), and only then
its graph is searched for the parameters that it would have come by.
"""

from collections.abc import Callable

import torch

from dcoll import _C
from dcoll.collectives import on_communicator
from dcoll.collectives.sparse import SparseGradients
from dcoll.optimizer.backward import Failure
from dcoll.optimizer.buckets import AnyReducer, first_lacking

NO_END = "its last backward did not come to its end"


class FailedRounds:
    """Base of GradientSync, which has all of this."""

    comm: _C.Communicator
    params: list[torch.Tensor]
    sparse: SparseGradients
    name_of: Callable[[torch.Tensor], str]
    _reducer: AnyReducer
    _frozen: list[torch.Tensor]
    _state: _C.HookState
    _begun: bool
    _reduced: bool
    _began_in: int
    _ended_in: int

    def _end(self) -> None: ...
    def _end_round(self) -> None: ...

    def backward_failed(self, failure: Failure) -> None:
        """Of a pass before the last one the others hear nothing: it counts, with what it brought."""
        if failure.number == self._ended_in:
            return
        if failure.number == self._began_in or failure.reaches((*self.params, *self.sparse.params, *self._frozen)):
            if self._state.idle:
                self._begun = True
                self._end()
            else:
                self.throw_away(failure.reason)

    def throw_away(self, why: str, forget: bool = True) -> None:
        """End a round that this rank cannot finish. Does not wait. forget: what is in .grad is of that round."""
        lacking = first_lacking(self._reducer, self.params)
        if lacking is not None:  # first, for a long reason is cut off
            why = f"the gradient of parameter {self.name_of(lacking)} never came: {why}"
        self._end_round()
        # Of a model whose gradients are all sparse the others make one call before they fail.
        turns = self._reducer.abandon() or len(self.sparse.params[:1])
        on_communicator.refuse(self.comm, turns, why)
        if forget:
            self._forget()

    def _forget(self) -> None:
        """Gradients of which some are reduced and some are not are no gradients."""
        for p in (*self.params, *self.sparse.params):
            p.grad = None
        self._reduced = self._state.sums_again = False
