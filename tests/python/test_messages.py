"""What users are told of mistakes that no other test makes: what was got, what is allowed, what to do."""

import argparse
from collections.abc import Callable

import numpy as np
import pytest
import torch

import dcoll as hvd
from dcoll import plan
from dcoll.runner.command_lines import identify
from dcoll.runner.hosts import UsageError, parse_hosts


def optimizer(**options: object) -> object:
    model = torch.nn.Linear(2, 2)
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options)


def unnamed() -> object:
    model = torch.nn.Linear(2, 3)
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), [("weight", model.weight)])


def twice() -> object:
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(inner, groups=[[model.weight], [model.weight]])


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "alltoall, too many splits": (
        lambda: hvd.alltoall(torch.ones(4), splits=[2, 2]),
        r"alltoall got splits \[2, 2\], but needs 1 numbers, one per rank, .* sum to the tensor's 4 rows",
    ),
    "alltoall, another sum": (lambda: hvd.alltoall(torch.ones(4), splits=[3]), r"got splits \[3\], .* 4 rows"),
    "NumPy as bfloat16": (
        lambda: hvd.allreduce(np.ones(3), compression=hvd.Compression.bf16),
        r"NumPy has no bfloat16: use Compression\.fp16, or pass torch\.as_tensor\(array\)",
    ),
    "unnamed": (unnamed, r"parameters were not named: group 0 parameter 1 \[3\]\. Pass the names of all"),
    "groups of what": (lambda: optimizer(groups="two"), "groups is 'two', but must be a non-negative number of groups"),
    "groups of numbers": (lambda: optimizer(groups=[[1, 2]]), r"groups must consist of torch\.Tensor"),
    "groups, twice": (twice, "a parameter can only appear once in groups"),
    "groups of strangers": (
        lambda: optimizer(groups=[[torch.nn.Parameter(torch.ones(1))]]),
        "groups has a parameter that is not one of the optimizer's",
    ),
    "batch norm of a vector": (
        lambda: hvd.SyncBatchNorm(3)(torch.ones(3)),
        r"SyncBatchNorm got an input of shape \[3\], but takes \(N, C, \.\.\.\)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str, job: None) -> None:
    call, text = MISTAKES[mistake]
    with pytest.raises(hvd.ArgumentError, match=text):
        call()


@pytest.mark.parametrize("text", ["node1:0", "node1:x", "", "node1,,node2", "-H"])
def test_hosts(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a host; write host:slots, like node1:4,node2:4"):
        parse_hosts(text)


def test_a_launcher_that_does_not_run() -> None:
    with pytest.raises(UsageError, match=r"nowhere/mpirun --version does not answer: .*No such file"):
        identify("nowhere/mpirun")


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (plan.parse_bytes, "many", "'many' is not a size: write a number of bytes, or e.g. 64K"),
        (plan.parse_rate, "0gbit", "'0gbit' is not a rate: write e.g. 200mbit"),
        (plan.parse_time, "5s", "'5s' is not a time: write e.g. 20us"),
        (plan.parse_ranks_per_node, "3,0", "'3,0' is not a number of ranks: write e.g. 2, or 3,1,2"),
    ],
)
def test_words_on_the_command_line(parse: Callable[[str], object], text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        parse(text)
