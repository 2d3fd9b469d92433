"""SyncBatchNorm (run_checks.py) against torch's own layer on the batches of all ranks together."""

import pytest
import torch

import dcoll as hvd


def _batches(shape: tuple[int, ...], sizes: list[int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # far from zero: a variance from sums of squares would be wrong
    return [torch.randn((n, *shape), generator=generator, dtype=torch.float64) + 1000.0 for n in sizes]


def _layers(channels: int, momentum: float | None = 0.1, affine: bool = True, track: bool = True) -> tuple:
    torch.manual_seed(3)
    ours = hvd.SyncBatchNorm(channels, momentum=momentum, affine=affine, track_running_stats=track).double()
    theirs = torch.nn.BatchNorm3d(channels, momentum=momentum, affine=affine, track_running_stats=track).double()
    if affine:
        with torch.no_grad():
            ours.weight.copy_(torch.randn(channels))
            ours.bias.copy_(torch.randn(channels))
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def _close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def _compare(shape: tuple[int, ...], sizes: list[int], **options: object) -> None:
    rank, size = hvd.rank(), hvd.size()
    ours, theirs = _layers(shape[0], **options)  # type: ignore[arg-type]
    for step in range(3):
        batches = _batches(shape, sizes, seed=step)
        own = batches[rank].clone().requires_grad_()
        whole = torch.cat(batches).requires_grad_()
        factor = torch.randn(whole.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        parts = list(factor.split(sizes))
        for layer in (ours, theirs):
            layer.zero_grad()
        out = ours(own)
        (out * parts[rank]).sum().backward()
        as_3d = whole.reshape(len(whole), shape[0], -1, 1, 1)
        expected = theirs(as_3d).reshape(whole.shape)
        (expected * factor).sum().backward()
        _close(out, expected.split(sizes)[rank])
        _close(own.grad, whole.grad.split(sizes)[rank])
        if ours.weight is not None:
            for name in ("weight", "bias"):
                total = hvd.allreduce(getattr(ours, name).grad, op=hvd.Sum)
                _close(total, getattr(theirs, name).grad)
        for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
            _close(one, other)
    ours.eval()
    theirs.eval()
    sample = torch.cat(_batches(shape, sizes, seed=7))
    _close(ours(sample), theirs(sample.reshape(len(sample), shape[0], -1, 1, 1)).reshape(sample.shape))
    assert size == len(sizes)


def check_equal_batches() -> None:
    for shape in ((3,), (2, 5), (4, 3, 2), (1, 2, 2, 2)):
        _compare(shape, [4] * hvd.size())


def check_uneven_and_empty_batches() -> None:
    _compare((3, 2), [1 + 2 * rank for rank in range(hvd.size())])
    _compare((3,), [3 * rank for rank in range(hvd.size())])


def check_options() -> None:
    sizes = [3] * hvd.size()
    _compare((3,), sizes, momentum=None)
    _compare((3,), sizes, affine=False)
    _compare((3,), sizes, track=False)


def check_one_value_per_rank_is_enough() -> None:
    _compare((3,), [1] * hvd.size())


def check_a_single_value_is_refused_on_every_rank() -> None:
    layer = hvd.SyncBatchNorm(3)
    with pytest.raises(ValueError, match="more than one value per channel over all ranks"):
        layer(torch.ones(int(hvd.rank() == 0), 3))


def check_low_precision_is_computed_in_float32() -> None:
    layer = hvd.SyncBatchNorm(2)
    batch = torch.arange(8.0).reshape(4, 2) + 8 * hvd.rank()
    wide = layer(batch)
    narrow = layer(batch.bfloat16())
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow, wide.bfloat16())


def check_inputs_of_one_dimension_are_refused() -> None:
    with pytest.raises(hvd.ArgumentError, match=r"shape \[3\]"):
        hvd.SyncBatchNorm(3)(torch.ones(3))


def check_the_host_waits_for_no_number() -> None:
    """Where a rank has several values it is clear that all have."""

    def refuse(*_: object) -> None:
        raise AssertionError("the host waits for a device")

    layer = hvd.SyncBatchNorm(3)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("__float__", "__int__", "__bool__", "item", "tolist", "new_tensor"):
            patch.setattr(torch.Tensor, name, refuse)
        layer(torch.randn(4, 3, requires_grad=True)).sum().backward()
