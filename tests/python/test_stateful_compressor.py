"""Compressors of the user's that keep something from step to step."""

import inspect
import textwrap
from typing import Any

import gradient_models
import pytest
import torch
from gradient_models import Toy, clear, sync_of
from local_ranks import run_ranks
from torch import nn

import dcoll
from dcoll import _C, ArgumentError, Average, ReduceOp, Sum
from dcoll.compression import StatefulCompressor

every_test_twice = gradient_models.hooked_and_late


def example() -> str:
    """The one in the docstring."""
    text = inspect.getdoc(StatefulCompressor)
    assert text is not None
    return textwrap.dedent(text[text.index("    import torch") :])


class Halves(StatefulCompressor):
    """Sends the whole quarters, as two tensors, and the rest later."""

    def __init__(self) -> None:
        self.rest: dict[str, torch.Tensor] = {}

    def encode(self, name: str, tensor: torch.Tensor) -> Any:
        tensor = tensor + self.rest.get(name, 0)
        quarters = (tensor * 4).trunc()
        self.rest[name] = tensor - quarters / 4
        return quarters[:2].clone(), quarters[2:].reshape(1, -1)

    def decode(self, name: str, tensors: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        assert len(tensors) == 2
        return torch.cat([tensors[0], tensors[1].flatten()]) / 4


class Rows(Halves):
    """The same, gathered; ranks send different numbers of rows, of several dtypes."""

    gathers = True

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def encode(self, name: str, tensor: torch.Tensor) -> Any:
        first, second = super().encode(name, tensor)
        return [torch.cat([first, second.flatten(), torch.ones(self.rank)]).double(), torch.tensor(self.rank)]

    def decode(self, name: str, tensors: Any, like: torch.Tensor) -> torch.Tensor:
        assert [(len(values), int(number)) for values, number in tensors] == [(5 + r, r) for r in range(len(tensors))]
        return sum(values[:5] for values, _ in tensors) / 4  # type: ignore[no-any-return]


@pytest.mark.parametrize("op", [Average, Sum])
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_results_and_what_is_kept(n: int, gathers: bool, op: ReduceOp) -> None:
    def body(comm: _C.Communicator) -> None:
        model = Toy()
        compression = Rows(comm.rank) if gathers else Halves()
        sync = sync_of(comm, model, op=op, compression=compression)
        scale = 1 if op is Sum else n
        for step in range(4):
            clear(model, sync)
            model(0.125 + comm.rank, [0, 1, 3] if comm.rank == 0 else [0, 3]).backward()
            own = [0.25 * (step % 2)] * n  # an eighth is kept, and is a quarter with the next one
            total = sum(r + one for r, one in enumerate(own))
            assert model.w[2].grad is None
            assert model.grads()[::3] == pytest.approx([total / scale, (total + 3 * n) / scale])
            assert model.grads()[1] == pytest.approx((1 + own[0]) / scale)
            sync.after_step()
        assert set(compression.rest) == {f"w.{i}" for i in range(4)}

    run_ranks(n, body)


def test_the_example_runs() -> None:
    names: dict[str, Any] = {}
    try:
        exec(example(), names)
    finally:
        dcoll.shutdown()  # other tests of this process begin without a job

    def body(comm: _C.Communicator) -> tuple[torch.Tensor, ...]:
        model = nn.Linear(20, 10, bias=False)
        compression = names["ScaledSign"]()
        sync = sync_of(comm, model, compression=compression)
        total = torch.zeros(10, 20)
        target = torch.randn(10, 20, generator=torch.Generator().manual_seed(comm.rank))
        for _ in range(20):
            clear(model, sync)
            (model.weight * target).sum().backward()
            total += model.weight.grad
            sync.after_step()
        return total, compression.errors["weight"], target

    (total, error, target), (other_total, other_error, other_target) = run_ranks(2, body)
    assert torch.equal(total, other_total)
    torch.testing.assert_close(total + (error + other_error) / 2, 10 * (target + other_target), rtol=1e-4, atol=1e-4)


class Wrong(StatefulCompressor):
    def __init__(self, encoded: Any, decoded: Any = None) -> None:
        self.encoded, self.decoded = encoded, decoded

    def encode(self, name: str, tensor: torch.Tensor) -> Any:
        return self.encoded

    def decode(self, name: str, tensors: Any, like: torch.Tensor) -> Any:
        return self.decoded


@pytest.mark.parametrize(
    ("compression", "said"),
    [
        (Wrong([]), r"Wrong.encode\(\) returned \[\], but must return a tensor"),
        (Wrong(3), r"Wrong.encode\(\) returned 3, but must return a tensor"),
        (
            Wrong([torch.ones(1), torch.ones(1).double()]),
            "float32, torch.float64, but tensors .* cast them, or set gathers",
        ),
        (Wrong(torch.ones(1), torch.ones(2)), r"decode\(\) returned shape \[2\] for w.\d, but must return .* \[5\]"),
    ],
    ids=["no tensors", "no tensor", "dtypes", "shape"],
)
def test_what_is_wrong_is_said(compression: Wrong, said: str) -> None:
    def body(comm: _C.Communicator) -> None:
        sync_of(comm, model := Toy(), compression=compression)
        with pytest.raises(ArgumentError, match=said):
            model(1.0, [0, 1, 2, 3]).backward()

    run_ranks(2, body)
