"""PowerSGD of all ranks in one process, in float64 and NumPy: what a step has to give."""

import zlib
from collections.abc import Sequence

import numpy as np
import torch


def gradient_of(shape: Sequence[int], rank: int, step: int, name: str = "", seed: int = 0) -> torch.Tensor:
    """Known to all ranks, and different on each; a little alike in every step, as gradients are."""
    made = [torch.Generator().manual_seed(seed + zlib.crc32(f"{name} {of}".encode())) for of in (0, rank, (rank, step))]
    parts = [torch.randn(*shape, generator=one, dtype=torch.float64) for one in made]
    return parts[0] + parts[1] / 2 + parts[2] / 4


def dot(a: np.ndarray, b: np.ndarray) -> float:
    """Sixteen sums, of every sixteenth product, and then halves onto halves."""
    sums = np.zeros(16)
    for products in (a * b).reshape(-1, 16):
        sums += products
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return sums[0]


def _take_out(found: np.ndarray, k: int, rows: int) -> bool:
    first = second = np.sqrt(dot(found[k], found[k]))
    for _ in range(2 if k else 0):
        first = second
        for before in found[:k]:
            found[k] -= dot(before, found[k]) * before
        second = np.sqrt(dot(found[k], found[k]))
    if k >= rows or not second > first / 2:
        return False
    found[k] /= second
    return True


def orthonormalised(p: np.ndarray) -> np.ndarray:
    """What kernels::orthonormalise makes of float32 (rank, rows), to the bit: numpy, too, rounds every operation."""
    if not np.isfinite(p).all():
        return np.full_like(p, np.nan)
    rank, rows = p.shape
    found = np.zeros((rank, -(-rows // 16) * 16))
    found[:, :rows] = p
    for k in range(rank):
        if _take_out(found, k, rows):
            continue
        found[k] = 0
        if k < rows:
            used = np.zeros(rows)
            for before in found[:k, :rows]:
                used += before * before
            found[k, used.argmin()] = 1
            _take_out(found, k, rows)
    return found[:, :rows].astype(np.float32)


class Twin:
    """Of one matrix."""

    def __init__(self, q: torch.Tensor, ranks: int) -> None:
        """q: what all begin with, (rank, columns)."""
        self.q = q.double().numpy()
        self.first = self.q
        self.errors: list[np.ndarray | float] = [0.0] * ranks

    def step(self, gradients: Sequence[torch.Tensor], scale: float = 1.0) -> torch.Tensor:
        """The average of the ranks' gradients, projected; times scale."""
        values = [g.reshape(len(g), -1).numpy() + e for g, e in zip(gradients, self.errors, strict=True)]
        p = np.linalg.qr(np.mean([v @ self.q.T for v in values], axis=0))[0]
        shares = [p.T @ v for v in values]
        self.errors = [v - p @ share for v, share in zip(values, shares, strict=True)]
        self.q = np.mean(shares, axis=0)
        return torch.as_tensor(p @ self.q * scale).reshape(gradients[0].shape)
