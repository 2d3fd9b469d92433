"""How large buckets are when nothing was said."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from dcoll.optimizer.optimizer_arguments import bucket_settings


def bucket_mb(num_nodes: int, on_gpus: bool = False) -> float:
    return bucket_settings(SimpleNamespace(num_nodes=num_nodes), on_gpus)[0]  # type: ignore[arg-type]


def test_small_but_for_many_nodes_and_gpus_on_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DCOLL_BUCKET_MB", raising=False)
    assert [bucket_mb(nodes) for nodes in (1, 2, 16, 20, 100, 1000)] == [4, 4, 4, 5, 25, 25]
    assert (bucket_mb(1, True), bucket_mb(2, True)) == (4, 25)


@pytest.mark.parametrize("chosen", ["0", "0.5", "100"])
def test_the_variable_decides_everywhere(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCOLL_BUCKET_MB", chosen)
    assert bucket_mb(1) == bucket_mb(2) == float(chosen)
