"""A sampler that goes on in the middle of an epoch, also with another number of ranks."""

import random
from collections.abc import Iterator, Sized
from typing import Any

import torch.utils.data

from dcoll.job import world


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Shares out a dataset over the ranks, leaving out what was processed already in this epoch.

        sampler = hvd.elastic.ElasticSampler(dataset)
        loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler)

    After each batch, call record_batch(batch_idx, batch_size); at the end of an epoch, set_epoch(epoch + 1). All ranks
    get the same number of samples: the last ones are filled up from the beginning.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch: nothing of it is processed yet, and the order is another."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed one more batch of `batch_size` samples."""
        self.processed_num += batch_size * self.num_replicas

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of this rank's batch number `batch_idx`."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """What a commit keeps."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share out what is left of the epoch over the present ranks."""
        self.num_replicas = world.size()
        self.rank = world.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        filled = list(self.remaining_indices)
        while 0 < len(filled) < self.total_size:  # more than once when fewer samples are left than ranks
            filled += filled[: self.total_size - len(filled)]
        self.indices = filled[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.indices))

    def __len__(self) -> int:
        return self.num_samples
