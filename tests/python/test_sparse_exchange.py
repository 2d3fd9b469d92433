"""Sparse sums by each way against dense ones, exactly, among threads; and which way is chosen."""

from typing import Any

import pytest
import torch
from gradient_models import clear, sync_of
from local_ranks import run_ranks
from torch import nn

from dcoll import _C
from dcoll.collectives import sparse_exchange
from dcoll.collectives.sparse_exchange import DENSE, GATHER, OWNERS, WAYS, Rows
from dcoll.ops import Average, Sum

NAMES = {GATHER: "gather", OWNERS: "owners", DENSE: "dense"}
every_way = pytest.mark.parametrize("way", WAYS, ids=NAMES.__getitem__)


def some_rows(rank: int, shape: tuple[int, ...], sparse_dim: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Whole numbers, some rows twice; rank 1 has none."""
    generator = torch.Generator().manual_seed(rank)
    count = 0 if rank == 1 else count
    indices = torch.stack([torch.randint(n, (count,), generator=generator) for n in shape[:sparse_dim]])
    values = torch.randint(-5, 6, (count, *shape[sparse_dim:]), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)


@every_way
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("shape", "sparse_dim", "dtype"),
    [
        ((50, 3), 1, torch.float32),
        ((300, 8), 1, torch.float16),
        ((7, 9, 2), 2, torch.float64),
        ((40,), 1, torch.float32),
    ],
    ids=str,
)
def test_the_sum_is_exact(way: int, ranks: int, shape: tuple[int, ...], sparse_dim: int, dtype: torch.dtype) -> None:
    def body(comm: _C.Communicator) -> list[torch.Tensor]:
        sums = []
        for count in (0, 1, 20, 200):
            param = torch.empty(shape, dtype=dtype)
            mine = some_rows(comm.rank, shape, sparse_dim, dtype, count)
            rows = Rows.of(mine if count else None, param, sparse_dim)
            universe = param.shape[:sparse_dim].numel()
            (found,) = sparse_exchange.together([sparse_exchange.start(way, comm, rows, universe, "rows")])
            assert found.keys.tolist() == sorted(set(found.keys.tolist()))
            sums.append(found.tensor(param.shape, sparse_dim))
            sums[-1].coalesce()
        return sums

    results = run_ranks(ranks, body)
    for i, count in enumerate((0, 1, 20, 200)):
        everybodys = [some_rows(rank, shape, sparse_dim, dtype, count) for rank in range(ranks)]
        want = sum(one.to_dense() for one in everybodys)
        for sums in results:
            assert torch.equal(sums[i].to_dense(), want)
            keys = {tuple(key) for one in everybodys for key in one.coalesce().indices().t().tolist()}
            assert {tuple(key) for key in sums[i].indices().t().tolist()} == keys


@every_way
def test_ranks_get_the_same_bits(way: int) -> None:
    def body(comm: _C.Communicator) -> bytes:
        torch.manual_seed(comm.rank)
        rows = Rows(torch.randperm(500)[:300].sort().values, torch.randn(300, 4))
        (found,) = sparse_exchange.together([sparse_exchange.start(way, comm, rows, 500, "rows")])
        return found.keys.numpy().tobytes() + found.values.numpy().tobytes()

    assert len(set(run_ranks(5, body))) == 1


@pytest.mark.parametrize("op", [Average, Sum], ids=str)
def test_an_embedding_goes_another_way_in_the_next_step(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 alone chooses."""
    ways: list[tuple[int, int]] = []
    start = sparse_exchange.start

    def noted(way: int, comm: _C.Communicator, *rest: Any) -> Any:
        ways.append((comm.rank, way))
        return start(way, comm, *rest)

    chosen = iter((OWNERS, DENSE, GATHER, GATHER))
    monkeypatch.setattr(sparse_exchange, "start", noted)
    monkeypatch.setattr(sparse_exchange, "fastest", lambda *_: next(chosen))

    def body(comm: _C.Communicator) -> None:
        table = nn.Embedding(40, 2, sparse=True)
        sync = sync_of(comm, table, op=op)
        for step in range(4):
            clear(table, sync)
            rows = torch.arange(2 << step) * (comm.rank + 1) % 40
            table(rows).sum().backward()
            want = torch.zeros(40, 2)
            for rank in range(comm.size):
                want.index_add_(0, torch.arange(2 << step) * (rank + 1) % 40, torch.ones(2 << step, 2))
            assert table.weight.grad is not None
            torch.testing.assert_close(table.weight.grad.to_dense(), want if op is Sum else want / comm.size)
            sync.after_step()

    run_ranks(3, body)
    for rank in range(3):
        assert [way for one, way in ways if one == rank] == [GATHER, OWNERS, DENSE, GATHER]


def test_owners_have_about_as_many_rows_each() -> None:
    for keys in (torch.arange(10000), torch.arange(10000) * 1024, torch.arange(10000) * 16 + 3):
        for owners in (2, 3, 8, 16):
            counts = torch.bincount(sparse_exchange.owners_of(keys, owners), minlength=owners)
            assert int(counts.max()) < 1.1 * 10000 / owners


def test_what_is_chosen() -> None:
    """Rows of an embedding of 100,000 x 64, of eight hosts at 1 Gbit/s."""
    network = {"alpha_us": 40.0, "overhead_us": 5.0, "beta_us_per_byte": 8e-3, "fan_in": 0.0}

    class Comm:
        size, nodes = 8, list(range(8))

        @staticmethod
        def constants() -> dict[str, Any]:
            return _C.plan.constants() | {"network": _C.plan.constants()["network"] | network}

    def chosen(sent: int, different: int) -> str:
        return NAMES[sparse_exchange.fastest(Comm, 100_000, 8 + 64 * 4, sent, different)]  # type: ignore[arg-type]

    assert chosen(8 * 1000, 8 * 1000) == "gather"  # nobody has another's rows
    assert chosen(8 * 1000, 1200) == "owners"  # nearly all have the same
    assert chosen(8 * 100_000, 100_000) == "dense"
    assert chosen(8, 1) == "gather"
