"""Scripts that initialise MPI themselves: the thread level they choose is enough, or refused in words that help. And
scripts that have epoll descriptors of their own beside those of MPI."""

import pytest
from mpirun import HERE, launch

pytest.importorskip("mpi4py", reason="needs mpi4py: pip install mpi4py")
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


@pytest.mark.parametrize("mpi_by", ["dcoll", "mpi4py"])
def test_epoll_descriptors_of_others_burn_no_core(mpi_by: str) -> None:
    """CPU time of waits beside descriptors that always have news, and without. While the other rank uses a second of it
    a wait that burns its core uses as much, however busy the machine is."""
    tcp = {"OMPI_MCA_btl": "self,tcp"}  # whose descriptors a wait sleeps on

    def waits(beside: str) -> list[float]:
        done = launch(2, str(HERE / "beside_epoll.py"), beside, mpi_by, DCOLL_TRANSPORT="mpi", **tcp)
        assert done.returncode == 0, done.text
        return [float(word) for word in done.stdout.partition("cpu ")[2].split()]

    alone, beside = waits("none"), waits("foreign")
    assert len(alone) == len(beside) == 2
    assert max(beside) < max(alone) + 0.5, (alone, beside)
