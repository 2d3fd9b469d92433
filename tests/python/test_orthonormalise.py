"""PowerSGD's Gram-Schmidt against a twin in NumPy, to the bit on every instruction set; and that it is orthonormal."""

import numpy as np
import pytest
from power_sgd_twin import orthonormalised

from dcoll import _C

K = _C.kernels
SHAPES = [(1, 1), (1, 40), (2, 3), (4, 4), (4, 16), (3, 17), (4, 1536), (9, 33), (6, 4), (3, 0)]
"""Rank and rows. A rank of more than the rows leaves zeros."""


pytestmark = pytest.mark.usefixtures("isa")


def made(kind: str, rank: int, rows: int) -> np.ndarray:
    dice = np.random.default_rng(rank * 10000 + rows)
    p = dice.standard_normal((rank, rows))
    if kind == "nearly dependent":
        p = p[:1] + 1e-6 * p
    elif kind == "one direction":
        p = p[:1] * np.arange(1, rank + 1)[:, None]
    elif kind == "zeros":
        p *= 0
    elif kind == "a zero between":
        p[rank // 2] = 0
    elif kind == "unit vectors twice":
        p = np.eye(rows)[np.arange(rank) // 2 % max(rows, 1)] if rows else p
    elif kind == "huge":
        p *= 1e30
    elif kind == "tiny":
        p *= 1e-30
    elif kind == "denormal":
        p *= 1e-42
    elif kind == "huge and tiny":
        p *= 10.0 ** dice.choice([-30, 0, 30], (rank, 1))
    return p.astype(np.float32)


KINDS = ["random", "nearly dependent", "one direction", "zeros", "a zero between", "unit vectors twice"]
MAGNITUDES = ["huge", "tiny", "denormal", "huge and tiny"]


def run(*factors: np.ndarray) -> list[np.ndarray]:
    """All in one call; what lies behind each stays."""
    found = [np.append(p.ravel(), np.float32(77)) for p in factors]
    K.orthonormalise([(one.ctypes.data, p.shape[1], len(p)) for one, p in zip(found, factors, strict=True)])
    assert all(one[-1] == 77 for one in found)
    return [one[:-1].reshape(p.shape) for one, p in zip(found, factors, strict=True)]


@pytest.mark.parametrize("kind", KINDS + MAGNITUDES)
def test_orthonormal_and_the_twins(kind: str) -> None:
    given = [made(kind, *shape) for shape in SHAPES]
    for p, found in zip(given, run(*given), strict=True):
        assert found.tobytes() == orthonormalised(p).tobytes(), p.shape
        q = found.astype(np.float64)
        rank, rows = p.shape
        wanted = np.eye(rank) * (np.arange(rank) < rows)
        np.testing.assert_allclose(q @ q.T, wanted, atol=1e-6)
        of = p.astype(np.float64)
        of /= np.maximum(np.linalg.norm(of, axis=1, keepdims=True), 1e-300)
        np.testing.assert_allclose(of @ q.T @ q, of, atol=1e-6)  # nothing of p is outside


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_element_makes_all_of_its_matrix_nan(bad: float) -> None:
    for at in ((0, 0), (3, 1535), (2, 7)):
        p = made("random", 4, 1536)
        p[at] = bad
        good, found = run(made("random", 4, 40), p)
        assert np.isnan(found).all()
        assert np.isfinite(good).all()


def test_of_nothing() -> None:
    assert run() == []
    K.orthonormalise([(0, 0, 4)])
