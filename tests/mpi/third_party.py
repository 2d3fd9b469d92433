"""A rank that trains with a package written for Horovod: python third_party.py PACKAGE FOLDER.

Every program takes the rank's share of each batch, trains a small model for a few steps, and returns what must come out
the same on all ranks, and on one rank that takes whole batches. FOLDER has a package named horovod, which is dcoll, and
takes the results.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

BATCH, BATCHES, STEPS, RATE = 8, 4, 6, 0.1
Results = list[torch.Tensor]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(BATCH * BATCHES, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (BATCH * BATCHES,), generator=generator)


def new_model(rank: int) -> torch.nn.Sequential:
    """Another on each rank: what counts is rank 0's."""
    torch.manual_seed(rank)
    layers = torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
    return torch.nn.Sequential(*layers).double()


def values(module: torch.nn.Module) -> Results:
    return [parameter.detach().clone() for parameter in module.parameters()]


def train_with_ignite(_: Path) -> Results:
    import ignite.distributed as idist
    from ignite.engine import Engine, create_supervised_evaluator
    from ignite.metrics import Accuracy, Loss

    results: Results = []

    def training(_: int) -> None:
        assert idist.model_name() == "horovod-dist"
        ranks = idist.get_world_size()
        loader = idist.auto_dataloader(TensorDataset(*data()), batch_size=BATCH, shuffle=False)
        model = idist.auto_model(new_model(idist.get_rank()))
        optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9))

        def step(_: Engine, batch: list[torch.Tensor]) -> float:
            optimizer.zero_grad()
            loss = cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            return loss.item()

        Engine(step).run(loader, max_epochs=2)
        evaluator = create_supervised_evaluator(model, metrics={"loss": Loss(cross_entropy), "accuracy": Accuracy()})
        metrics = evaluator.run(loader).metrics
        results.extend([*values(model), *(torch.tensor(metrics[name]) for name in ("loss", "accuracy"))])
        mine = torch.tensor([1.0, idist.get_rank()])
        assert idist.all_reduce(mine.clone(), "MAX").tolist() == [1, ranks - 1]
        assert idist.all_gather({"rank": idist.get_rank()}) == [{"rank": rank} for rank in range(ranks)]
        assert idist.broadcast(mine, src=ranks - 1).tolist() == [1, ranks - 1]
        if ranks > 1:  # there is a group of all ranks already
            assert idist.all_gather(mine, group=[0]).tolist() == mine.tolist()
        idist.barrier()

    with idist.Parallel(backend="horovod") as parallel:
        parallel.run(training)
    return results


def train_with_lightning(folder: Path) -> Results:
    import horovod.torch as hvd
    import pytorch_lightning as lightning

    losses: Results = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            hvd.init()
            self.model = new_model(hvd.rank())

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return cross_entropy(self.model(batch[0]), batch[1])

        def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
            losses.append(cross_entropy(self.model(batch[0]), batch[1]))

        def on_validation_epoch_end(self) -> None:
            assert self.all_gather(torch.tensor([hvd.rank()])).tolist() == list(range(hvd.size()))
            losses[:] = [self.trainer.strategy.reduce(torch.stack(losses).mean())]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            # The strategy multiplies the rate by the number of ranks.
            return torch.optim.SGD(self.model.parameters(), lr=RATE / hvd.size(), momentum=0.9)

    module = Module()
    loaders = [DataLoader(TensorDataset(*data()), batch_size=BATCH // hvd.size()) for _ in range(2)]
    trainer = lightning.Trainer(
        strategy="horovod", accelerator="cpu", max_epochs=2, num_sanity_val_steps=0, gradient_clip_val=0.5,
        logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        enable_checkpointing=False,  # its callback has a name that NumPy 2 has not
    )  # fmt: skip
    trainer.fit(module, *loaders)
    assert (trainer.world_size, trainer.global_rank, trainer.global_step) == (hvd.size(), hvd.rank(), 2 * BATCHES)
    trainer.save_checkpoint(file := folder / f"{hvd.size()}.ckpt")
    if hvd.rank() == 0:
        saved = torch.load(file, weights_only=False)["state_dict"]
        assert all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())
    return [*values(module), *losses]


def train_with_open_clip(folder: Path) -> Results:
    """Its whole program. Gradients that go through Horovod's allgather are divided by the number of ranks there, and
    the learning rate makes up for it. That of the logits' scale goes around it, and is divided here."""
    declare_operators_of_torchvision()
    import horovod.torch as hvd
    import open_clip
    from open_clip_train.main import main
    from PIL import Image

    hvd.init()
    images = folder / f"{hvd.rank()}-of-{hvd.size()}"
    images.mkdir()
    lines = ["filepath,title"]
    for number in range(BATCH):
        pixels = torch.rand(16 * 16 * 3, generator=torch.Generator().manual_seed(number)) * 256
        Image.frombytes("RGB", (16, 16), bytes(pixels.to(torch.uint8).tolist())).save(images / f"{number}.png")
        lines.append(f"{images / f'{number}.png'},{' '.join(['cat', 'dog', 'sea'][: number // 3 + 1])} {number}")
    (images / "data.csv").write_text("\n".join(lines))
    text = {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    vision = {"image_size": 16, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8}
    (images / "tiny.json").write_text(json.dumps({"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}))
    open_clip.add_model_config(images / "tiny.json")
    # The sampler of this kind of data asks torch.distributed for its place, Horovod or not.
    store = f"file://{folder}/gloo{hvd.size()}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=hvd.rank(), world_size=hvd.size())
    models: list[torch.nn.Module] = []

    def on_forward(module: torch.nn.Module, _: tuple[object, ...]) -> None:
        if isinstance(module, open_clip.CLIP) and not models:
            models.append(module)
            module.logit_scale.register_hook(lambda gradient: gradient / hvd.size())

    hook = torch.nn.modules.module.register_module_forward_pre_hook(on_forward)
    options = {
        "model": "tiny", "dataset-type": "csv", "train-data": images / "data.csv", "csv-separator": ",",
        "batch-size": BATCH // hvd.size(), "epochs": 3, "opt": "timm/sgd", "momentum": 0.9, "lr": RATE * hvd.size(),
        "wd": 0, "warmup": 0, "lr-scheduler": "const", "workers": 0, "logs": images, "name": "tiny", "device": "cpu",
        "precision": "fp32",
    }  # fmt: skip
    flags = ["--horovod", "--gather-with-grad", "--aug-cfg", "scale=(1.0,1.0)", "ratio=(1.0,1.0)"]
    main([word for name, value in options.items() for word in (f"--{name}", str(value))] + flags)
    hook.remove()
    torch.distributed.destroy_process_group()
    return values(models[0])


def declare_operators_of_torchvision() -> None:
    """A torchvision that was built for CUDA cannot load its operators beside a torch that was not. Only its images are
    needed here, but it cannot be imported without these two names."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")


def train_with_kfac(_: Path) -> Results:
    """Compared with each other alone: in some versions the factors depend on the size of a rank's batch. And only
    nearly: the rank that has computed an inverse has it in another order in memory, by which products round."""
    import horovod.torch as hvd
    import kfac

    hvd.init()
    if hasattr(kfac, "comm"):
        kfac.comm.init_comm_backend()
    model = new_model(hvd.rank()).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # Eigenvectors are asked of a function that torch has removed.
    preconditioner = kfac.KFAC(model, lr=RATE, use_eigen_decomp=False, distribute_layer_factors=False)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for inputs, targets in shares(hvd.rank(), hvd.size()):
        optimizer.zero_grad()
        cross_entropy(model(inputs.float()), targets).backward()
        optimizer.synchronize()
        preconditioner.step()
        with optimizer.skip_synchronize():
            optimizer.step()
    return values(model)


def train_with_factors(_: Path) -> Results:
    """What a K-FAC preconditioner asks of Horovod, without one: between the reduction of the gradients and the step,
    all layers' factors are averaged at once, and their inverses broadcast from the ranks that have computed them."""
    import horovod.torch as hvd

    hvd.init()
    rank, ranks = hvd.rank(), hvd.size()
    model = new_model(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    layers = [module for module in model if isinstance(module, torch.nn.Linear)]
    seen: dict[torch.nn.Module, torch.Tensor] = {}
    gradients: dict[torch.nn.Module, torch.Tensor] = {}
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, given: seen.update({module: given[0].detach()}))
        layer.register_full_backward_hook(lambda module, _, output: gradients.update({module: output[0]}))
    for inputs, targets in shares(rank, ranks):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.synchronize()
        factors: Results = []
        for layer in layers:
            with_bias = torch.cat([seen[layer], torch.ones(len(inputs), 1)], 1)
            factors.append(with_bias.T @ with_bias / len(inputs))
            factors.append(gradients[layer].T @ gradients[layer] * len(inputs))
        for handle in [hvd.allreduce_async_(factor, op=hvd.Average) for factor in factors]:
            hvd.synchronize(handle)
        inverses = [torch.empty_like(factor) for factor in factors]
        for i in range(rank, len(factors), ranks):
            inverses[i].copy_(torch.linalg.inv(factors[i] + 0.1 * torch.eye(len(factors[i]))))
        for handle in [hvd.broadcast_async_(inverse, root_rank=i % ranks) for i, inverse in enumerate(inverses)]:
            hvd.synchronize(handle)
        for layer, left, right in zip(layers, inverses[1::2], inverses[::2], strict=True):
            natural = left @ torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1) @ right
            layer.weight.grad.copy_(natural[:, :-1])
            layer.bias.grad.copy_(natural[:, -1])
        with optimizer.skip_synchronize():
            optimizer.step()
    return values(model)


def train_with_grace(_: Path) -> Results:
    """Its communicators and compressors, called as its optimizer does, which is a patch to Horovod's sources."""
    import horovod.torch as hvd
    from grace_dl.torch.helper import grace_from_params

    hvd.init()
    results: Results = []
    kinds = ("none", "none", "allreduce"), ("topk", "residual", "allgather"), ("none", "none", "broadcast")
    for compressor, memory, communicator in kinds:
        grace = grace_from_params(
            {"compressor": compressor, "memory": memory, "communicator": communicator, "world_size": hvd.size(),
             "compress_ratio": 1}
        )  # fmt: skip
        sparse = grace_from_params(
            {"compressor": "topk", "memory": "residual", "communicator": "allgather", "world_size": hvd.size()}
        )
        for algorithm in (grace, sparse):
            model = new_model(hvd.rank())
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
            for inputs, targets in shares(hvd.rank(), hvd.size()):
                optimizer.zero_grad()
                cross_entropy(model(inputs), targets).backward()
                sent = [algorithm.send_step(value.grad, name) for name, value in model.named_parameters()]
                for parameter, handles in zip(model.parameters(), sent, strict=True):
                    parameter.grad = algorithm.receive_step(*handles)
                optimizer.step()
            if algorithm is grace:
                results.extend(values(model))
            else:
                everyones = hvd.allgather_object(values(model))
                assert all(torch.equal(a, b) for other in everyones for a, b in zip(other, everyones[0], strict=True))
    return results


def shares(rank: int, ranks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A rank's part of every batch."""
    inputs, targets = data()
    starts = [step % BATCHES * BATCH for step in range(STEPS)]
    return [(inputs[i + rank : i + BATCH : ranks], targets[i + rank : i + BATCH : ranks]) for i in starts]


PROGRAMS: dict[str, Callable[[Path], Results]] = {
    "ignite": train_with_ignite,
    "lightning": train_with_lightning,
    "open_clip": train_with_open_clip,
    "kfac": train_with_kfac,
    "factors": train_with_factors,
    "grace": train_with_grace,
}


def run(name: str, folder: str) -> None:
    sys.path.insert(0, folder)  # where horovod is
    import dcoll as hvd

    results = PROGRAMS[name](Path(folder))
    hvd.init()  # what ended its own use of Horovod
    torch.save(results, f"{folder}/{hvd.rank()}-of-{hvd.size()}.pt")


if __name__ == "__main__":
    run(*sys.argv[1:])
