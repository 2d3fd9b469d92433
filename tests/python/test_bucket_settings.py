"""How large buckets are when nothing was said."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from dcoll.optimizer.optimizer_arguments import bucket_settings


def bucket_mb(num_nodes: int) -> float:
    return bucket_settings(SimpleNamespace(num_nodes=num_nodes))[0]  # type: ignore[arg-type]


def test_small_inside_a_node_larger_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DCOLL_BUCKET_MB", raising=False)
    assert (bucket_mb(1), bucket_mb(2)) == (4, 25)


@pytest.mark.parametrize("chosen", ["0", "0.5", "100"])
def test_the_variable_decides_everywhere(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCOLL_BUCKET_MB", chosen)
    assert bucket_mb(1) == bucket_mb(2) == float(chosen)
