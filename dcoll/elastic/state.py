"""Elastic state of models, optimizers and samplers, and how scripts add types of their own: get_handler_registry()."""

import copy
from collections.abc import Callable
from typing import Any, cast

import torch

from dcoll.collectives import movement
from dcoll.elastic.base_state import ObjectState
from dcoll.elastic.sampler import ElasticSampler
from dcoll.job import world
from dcoll.optimizer import starting_state


class StateHandler:
    """Saves, restores and synchronizes one value of a TorchState."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def set_value(self, value: Any) -> None:
        """The attribute was assigned anew."""
        self.value = value
        self.save()

    def save(self) -> None:
        """Keep a copy."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take rank 0's value, and keep a copy. Collective."""
        raise NotImplementedError


class StateDictHandler(StateHandler):
    """Of whatever has state_dict() and load_state_dict()."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # A copy: load_state_dict() of optimizers keeps the tensors it is given.
        self.value.load_state_dict(copy.deepcopy(self._saved))


class ModelStateHandler(StateDictHandler):
    """Of torch.nn.Module."""

    def sync(self) -> None:
        starting_state.broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateDictHandler):
    """Of torch.optim.Optimizer."""

    def sync(self) -> None:
        starting_state.broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateDictHandler):
    """Of ElasticSampler."""

    def sync(self) -> None:
        self.value.load_state_dict(movement.broadcast_object(self.value.state_dict(), root_rank=0))
        self.save()


Registry = list[tuple[type, Callable[[Any], StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """(type, handler class) pairs: the first whose type fits a value handles it."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the pairs, to handle further types."""
    global _registry  # noqa: PLW0603  (Horovod's interface)
    _registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)


class TorchState(ObjectState):
    """The state of a training script: TorchState(model=model, optimizer=optimizer, epoch=0, batch=0).

    model, optimizer: what they say. Everything else becomes an attribute; modules, optimizers and ElasticSamplers among
    them are saved and broadcast as such, other values as Python objects. Collective calls: sync() and commit().
    """

    _handlers: dict[str, StateHandler]

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        kwargs.update(model=model, optimizer=optimizer)
        found = {name: _handler_of(value) for name, value in kwargs.items()}
        self._handlers = {name: handler for name, handler in found.items() if handler is not None}
        for name in self._handlers:
            object.__setattr__(self, name, kwargs.pop(name))
        super().__init__(cast(Callable[[Any], Any], movement.broadcast_object), world.rank, **kwargs)

    def save(self) -> None:
        """Keep a copy of everything in memory."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Go back to what was last saved."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Take everything from rank 0, and save it. Collective."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Samplers share out the rest of the epoch over the present ranks."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)
