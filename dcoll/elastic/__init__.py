"""Training that survives a failed collective: Horovod's elastic API.

    import dcoll as hvd

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0, batch=0)

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 90):
            ...
            state.commit()

When a collective fails, run() goes back to the last commit, joins the job anew and calls the function again. The ranks
are those that mpirun started: a job whose processes die ends (docs/migration.md).
"""

from dcoll.elastic.base_state import HostsUpdatedInterrupt, HostUpdate, ObjectState, State
from dcoll.elastic.loop import notify_hosts_updated, run
from dcoll.elastic.sampler import ElasticSampler
from dcoll.elastic.state import TorchState

__all__ = [
    "ElasticSampler",
    "HostUpdate",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "notify_hosts_updated",
    "run",
]
