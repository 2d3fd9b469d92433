"""The all-reduces whose usual calls are done in C are functions to whoever looks at them."""

import copy
import gc
import inspect
import pickle
import pydoc
import typing
import weakref

import numpy as np
import pytest
import torch

import dcoll
from dcoll import _C
from dcoll.job.world import WORLD

FUNCTIONS = [dcoll.allreduce, dcoll.allreduce_, dcoll.allreduce_async, dcoll.allreduce_async_]
each = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)


@each
def test_signature_and_documentation(function: object) -> None:
    assert callable(function)
    parameters = inspect.signature(function).parameters
    plain = ["tensor", "average", "name", "op", "prescale_factor", "postscale_factor", "process_set", "algo"]
    where = 3 if function is dcoll.allreduce else len(plain)  # Horovod's place; the others have it there not at all
    assert list(parameters) == [*plain[:where], "compression", *plain[where:]]
    assert parameters["op"].default is None
    assert parameters["prescale_factor"].default == 1.0
    assert typing.get_type_hints(function)["op"] == dcoll.ReduceOp | None
    assert inspect.getdoc(function)
    assert inspect.isroutine(function)
    name = function.__name__  # type: ignore[attr-defined]
    assert f"{name}(tensor" in "".join(pydoc.plain(pydoc.render_doc(function)).split())  # long ones have lines
    assert name in repr(function)
    assert f"def {name}(" in inspect.getsource(function)  # type: ignore[arg-type]


@each
def test_copies_pickles_and_references(function: object) -> None:
    assert pickle.loads(pickle.dumps(function)) is function
    assert copy.deepcopy(function) is function
    assert weakref.ref(function)() is function


def test_in_a_class_it_is_a_method(job: None) -> None:
    class Value(torch.Tensor):
        total = dcoll.allreduce

    value = torch.ones(2).as_subclass(Value)
    assert value.total(op=dcoll.Sum).tolist() == [1.0, 1.0]
    assert Value.total is dcoll.allreduce


def test_it_can_be_collected() -> None:
    def otherwise() -> None: ...

    made = _C.InlineCall(otherwise, "allreduce", tuple(dcoll.ReduceOp), False)
    made.cycle = made  # type: ignore[attr-defined]
    gone = weakref.ref(otherwise)
    del made, otherwise
    gc.collect()
    assert gone() is None


def test_it_refuses_what_cannot_work() -> None:
    with pytest.raises(TypeError, match="Communicator"):
        _C.InlineCall(print, "allreduce", tuple(dcoll.ReduceOp), False, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Communicator"):
        _C.set_job(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="operator"):
        _C.InlineCall(print, "allreduce", (0, 9), False)
    with pytest.raises(ValueError, match="operator"):
        _C.InlineCall(print, "allreduce", (0, 0), False)
    with pytest.raises(TypeError):
        _C.InlineCall(print, "allreduce", ("x",), False)  # type: ignore[arg-type]


@each
def test_errors_are_those_of_the_function(function: object, job: None) -> None:
    assert callable(function)
    with pytest.raises(TypeError, match=r"allreduce(_async)?_?\(\) got an unexpected keyword argument 'opp'"):
        function(torch.ones(1), opp=1)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'tensor'"):
        function()
    with pytest.raises(ValueError, match=r"op is 1, but must be one of dcoll\.Average"):
        function(torch.ones(1), op=1)
    with pytest.raises(ValueError, match=r"sparse.*to_dense"):
        function(torch.ones(1).to_sparse())
    with pytest.raises(ValueError, match=r"torch\.Tensor or numpy\.ndarray"):
        function([1.0])
    with pytest.warns(DeprecationWarning, match="average="):
        function(torch.ones(1), average=True)


@each
def test_without_a_job(function: object) -> None:
    assert WORLD.comm is None
    assert callable(function)
    with pytest.raises(ValueError, match=r"not been initialized; use dcoll\.init"):
        function(torch.ones(1))


def test_negated_views(job: None) -> None:
    """z.conj().imag shares z's memory, where the values have the other sign."""
    z = torch.tensor([1 + 2j, 3 + 4j])
    for view in (z.conj().imag, z[:1].conj().imag, z[1].conj().imag, z[1].conj().imag[None]):
        assert torch.equal(dcoll.allreduce(view), view.clone())
        before = view.clone()
        assert dcoll.allreduce_(view) is view
        assert torch.equal(view, before)


def test_zeros_without_memory(job: None) -> None:
    """Tangents of torch.autograd.forward_ad may be such."""
    zeros = torch._efficientzerotensor(3)
    assert zeros.data_ptr() == 0
    assert dcoll.allreduce(zeros).tolist() == [0.0, 0.0, 0.0]


def test_the_default_device_is_not_the_results(job: None) -> None:
    with torch.device("meta"):
        empty, splits = torch.empty(0, 3, device="cpu"), [2]
        assert dcoll.allgather(empty).device.type == "cpu"
        rows, counts = dcoll.alltoall(torch.ones(2, device="cpu"), splits=splits)
        assert (rows.device.type, counts.device.type) == ("cpu", "cpu")


def test_unusual_layouts_are_reduced_in_place(job: None) -> None:
    for tensor in (torch.arange(6.0).view(2, 3).t(), torch.arange(6.0)[::2]):
        before, version = tensor.clone(), tensor._version
        assert dcoll.allreduce_(tensor, op=dcoll.Sum, postscale_factor=2) is tensor
        assert torch.equal(tensor, 2 * before)
        assert tensor._version > version
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert dcoll.allreduce_(array, prescale_factor=2) is array
    assert array.tolist() == [[0, 2, 4], [6, 8, 10]]


def test_autograd_notices_an_overwritten_value(job: None) -> None:
    x = torch.ones(3, requires_grad=True)
    saved = x.detach().clone()
    loss = (x * saved).sum()
    dcoll.allreduce_(saved, op=dcoll.Sum)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_mode(job: None) -> None:
    with torch.inference_mode():
        x = torch.ones(3)
        assert dcoll.allreduce_(x, op=dcoll.Sum) is x
        assert dcoll.allreduce(x).tolist() == [1.0] * 3


def test_shutdown_takes_the_communicator_away(job: None) -> None:
    comm = WORLD.comm
    assert comm is not None
    before = gc.get_referrers(comm)
    dcoll.allreduce(torch.ones(1))
    _C.set_job(None)
    assert WORLD.comm is comm
    WORLD.comm = None
    with pytest.raises(ValueError, match="not been initialized"):
        dcoll.allreduce(torch.ones(1))
    assert len(gc.get_referrers(comm)) <= len(before)


class Unsayable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize("error", [ValueError("a file called \udcff"), Unsayable()], ids=["surrogate", "no text"])
def test_an_error_whose_text_cannot_be_told_is_the_callers(error: Exception, job: None) -> None:
    class Raises:
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
            raise error

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: None) -> torch.Tensor:
            return tensor

    with pytest.raises(type(error)) as raised:
        dcoll.allreduce(torch.ones(3), compression=Raises)
    assert raised.value is error
