"""What scripts import from horovod.common.exceptions."""

from dcoll.elastic.base_state import HostsUpdatedInterrupt
from dcoll.errors import HorovodInternalError

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
