"""What scripts import from horovod.common.elastic."""

from dcoll.elastic.base_state import ObjectState, State

__all__ = ["ObjectState", "State"]
