"""Scripts that initialise MPI themselves: the thread level they choose is enough, or refused in words that help."""

import pytest
from mpirun import HERE, launch

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.mpi


def test_serialized_is_enough() -> None:
    done = launch(2, str(HERE / "threads.py"), "serialized", DCOLL_TRANSPORT="mpi")
    assert done.returncode == 0, done.text
    assert done.stdout.count("works") == 2, done.text


@pytest.mark.parametrize("level", ["funneled", "single"])
def test_less_is_refused(level: str) -> None:
    done = launch(1, str(HERE / "threads.py"), level)
    assert done.returncode == 0, done.text
    assert f"MPI was initialized with MPI_THREAD_{level.upper()} before dcoll.init()" in done.stdout, done.text
    assert "mpi4py.rc.thread_level = 'multiple'" in done.stdout, done.text
