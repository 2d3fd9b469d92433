"""What DistributedOptimizer adds to the wrapped optimizer's class, whatever it reduces: gradients or steps."""

import copy
import warnings
from typing import Any

import torch

from dcoll.optimizer.check_sync import check_tensors
from dcoll.optimizer.optimizer_arguments import find_duplicates


class Wrapper:
    """Base of the classes that are mixed into the wrapped optimizer's; `_dcoll` is what does their work."""

    _dcoll: Any
    _dcoll_wrapped: torch.optim.Optimizer
    _dcoll_check: int
    _dcoll_steps: int
    param_groups: list[dict[str, Any]]  # torch's, as is `state`
    state: Any

    find_duplicates = staticmethod(find_duplicates)

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes there are before a step."""
        passes: int = self._dcoll.passes
        return passes

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return {p: self._dcoll.name_of(p) for p in self._dcoll_params()}

    def _dcoll_params(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _dcoll_stepped(self) -> None:
        """After every step: check_sync."""
        self._dcoll_steps += 1
        # Of whether there was a step a scheduler asks the optimizer it was made for, which may be the wrapped one.
        self._dcoll_wrapped._opt_called = True  # type: ignore[attr-defined]
        if self._dcoll_check and self._dcoll_steps % self._dcoll_check == 0:
            params = self._dcoll_params()
            names = [self._dcoll.name_of(p) for p in params]
            check_tensors(self._dcoll.comm, names, params, f"after step {self._dcoll_steps}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch. The wrapped optimizer sees the new state too."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self._dcoll_wrapped.state, self._dcoll_wrapped.param_groups = self.state, self.param_groups

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.optim.Optimizer:
        kind = type(self._dcoll_wrapped)
        warnings.warn(
            f"a copy of a DistributedOptimizer is a plain {kind.__name__}, which steps on its own rank's gradients: "
            "pass it to DistributedOptimizer",
            stacklevel=3,
        )
        memo[id(self)] = plain = _plain(kind)
        state: Any = self.__getstate__()
        plain.__setstate__(copy.deepcopy(state, memo))
        return plain

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled or copied, it becomes the plain optimizer it wraps: hooks and buckets belong to this process."""
        return _plain, (type(self._dcoll_wrapped),), self.__getstate__()


def _plain(cls: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return cls.__new__(cls)
