"""A rank that trains with a package built on torch.distributed, over dcoll: torch_third_party.py PACKAGE FOLDER.

Every program takes the rank's share of each batch, trains a small model for two epochs, and returns what must come out
the same on all ranks, and on one rank that takes whole batches.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from third_party import BATCH, BATCHES, RATE, Results, data, new_model, values
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import dcoll.torch  # noqa: F401  registers the backend

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
EPOCHS = 2


def share() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(*data()), batch_size=BATCH // RANKS)


def train_with_accelerate(_: Path) -> Results:
    from accelerate import Accelerator

    dist.init_process_group("dcoll")  # on CPUs it would choose Gloo, and takes what is there
    accelerator = Accelerator(cpu=True)
    model = new_model(RANK)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, share())
    for _epoch in range(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    assert accelerator.num_processes == RANKS
    assert accelerator.gather(torch.tensor([RANK])).tolist() == list(range(RANKS))
    assert accelerator.gather_for_metrics([RANK], use_gather_object=True) == list(range(RANKS))
    return [*values(accelerator.unwrap_model(model)), accelerator.reduce(loss.detach(), "mean")]


def train_with_lightning(folder: Path) -> Results:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = new_model(RANK)
            self.losses: Results = []

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return cross_entropy(self.model(batch[0]), batch[1])

        def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
            self.log("loss", cross_entropy(self.model(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.9)

    module = Module()
    trainer = Trainer(
        strategy=DDPStrategy(process_group_backend="dcoll"), accelerator="cpu", devices=RANKS, max_epochs=EPOCHS,
        num_sanity_val_steps=0, gradient_clip_val=0.5, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, share(), share())
    assert (trainer.world_size, trainer.global_rank, trainer.global_step) == (RANKS, RANK, EPOCHS * BATCHES)
    return [*values(module), trainer.callback_metrics["loss"]]


def train_with_deepspeed(_: Path) -> Results:
    import deepspeed

    deepspeed.init_distributed(dist_backend="dcoll")
    results: Results = []
    for stage in (0, 1, 2, 3):
        model = new_model(RANK).float()
        engine, _optimizer, _loader, _scheduler = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9),
            config={
                "train_micro_batch_size_per_gpu": BATCH // RANKS,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "gradient_clipping": 0.5,
            },
        )
        inputs, targets = data()
        for _epoch in range(EPOCHS):
            for first in range(RANK * BATCH // RANKS, BATCH * BATCHES, BATCH):
                part = slice(first, first + BATCH // RANKS)
                engine.backward(cross_entropy(engine(inputs[part].float()), targets[part]))
                engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            results.extend(values(model))
    return results


PROGRAMS: dict[str, Callable[[Path], Results]] = {
    "accelerate": train_with_accelerate,
    "lightning": train_with_lightning,
    "deepspeed": train_with_deepspeed,
}


def main(name: str, folder: Path) -> None:
    results = PROGRAMS[name](folder)
    if RANKS > 1:
        assert dist.get_backend() == "dcoll"
    torch.save(results, folder / f"{RANK}-of-{RANKS}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
