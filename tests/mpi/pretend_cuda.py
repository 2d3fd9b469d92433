"""Tensors that say they are CUDA's, in the CPU's memory, for checks of what runs beside the core on models of a GPU.

With pretend(), torch makes such tensors where it is asked for device="cuda", and raises where one meets a tensor of the
CPU, as it does on a GPU. To dcoll they are the emulated device's. What is computed during a backward is not looked at,
and tensors that torch makes in it are CUDA's only as the gradient of one that is.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from dcoll import _C
from dcoll.optimizer import backward

CUDA = torch.device("cuda", 0)
_COPIES = {torch.Tensor.copy_, torch._foreach_copy_}
_GET_GRAD = torch.Tensor.grad.__get__  # type: ignore[attr-defined]
_ANSWERS = {
    torch.Tensor.device.__get__: CUDA,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
}


class Pretended(torch.Tensor):
    """Made by as_subclass()."""

    is_cpu = False  # type: ignore[assignment]
    is_cuda = True  # type: ignore[assignment]
    device = CUDA

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first.")

    def get_device(self) -> int:  # type: ignore[override]
        return _C.EMULATED_DEVICE


def _is_cuda(device: Any) -> bool:
    return torch.device(device).type == "cuda"


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)


class Pretence(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        with torch._C.DisableTorchFunction():
            if func in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda):
                return _moved(func, *args, **kwargs)
            if func is torch._has_compatible_shallow_copy_type:  # module.to("cuda") makes new parameters
                return isinstance(args[0], Pretended) == isinstance(args[1], Pretended)
            if func is torch.Tensor.__deepcopy__:
                return _copied(*args) if isinstance(args[0], Pretended) else func(*args)
            if func in _ANSWERS and _is_pretended(args[0]):
                return _ANSWERS[func]
            on_cuda = _check(func, args, kwargs)
            if kwargs.get("device") is not None:
                on_cuda = _is_cuda(kwargs["device"])
                kwargs["device"] = "cpu" if on_cuda else kwargs["device"]
            result = func(*args, **kwargs)
            if not on_cuda or isinstance(result, torch.Size):
                return result
            result = _pytree.tree_map_only(torch.Tensor, _pretended, result)
            if func == _GET_GRAD and result is not None:
                args[0].grad = result  # the same one, when it is asked for again
            return result


def _is_pretended(tensor: Any) -> bool:
    return isinstance(tensor, Pretended) or getattr(tensor, "pretends", False)


def _pretended(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        tensor.pretends = True  # type: ignore[attr-defined]  # it cannot be of another class
        return tensor
    if isinstance(tensor, Pretended):
        return tensor
    if tensor.is_leaf and tensor.requires_grad:  # remains one
        return tensor.detach().as_subclass(Pretended).requires_grad_()
    return tensor.as_subclass(Pretended)


def _check(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether any of them is CUDA's: then all of them have to be, but for single numbers."""
    tensors = [one for one in _pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    there = any(map(_is_pretended, tensors))
    here = any(not _is_pretended(one) and one.dim() for one in tensors)
    if there and here and func not in _COPIES and torch._C._current_graph_task_id() == -1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got some of cuda:0 and of cpu")
    return there


def _moved(func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    goes = was = isinstance(tensor, Pretended)
    if func is not torch.Tensor.to:
        goes = func is torch.Tensor.cuda
        result = _plain(tensor)
    elif isinstance(args[0] if args else None, torch.Tensor):
        goes = isinstance(args[0], Pretended)
        result = _plain(tensor).to(args[0].dtype, **kwargs)
    else:
        copy = kwargs.pop("copy", False)
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        goes = was if device is None else device.type == "cuda"
        result = _plain(tensor).to(dtype=tensor.dtype if dtype is None else dtype, copy=copy)
    if goes == was and result.data_ptr() == tensor.data_ptr():
        return tensor
    result = result if goes == was else result.clone()
    return result.as_subclass(Pretended) if goes else result


def _copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(tensor) not in memo:
        memo[id(tensor)] = tensor.detach().clone().as_subclass(Pretended).requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]  # type: ignore[no-any-return]


def pretend() -> None:
    """From now on, on this thread, in the hooks of a backward too."""
    backward.watch(backward._Probe())  # so that what dcoll does around a backward is inside of run()
    run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._EnableTorchFunction(), Pretence():
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
    Pretence().__enter__()
