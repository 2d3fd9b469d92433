"""What scripts import from horovod.torch.functions."""

from dcoll.collectives.movement import allgather_object, broadcast_object
from dcoll.optimizer.starting_state import broadcast_optimizer_state, broadcast_parameters

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
