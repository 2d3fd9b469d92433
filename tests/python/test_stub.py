"""dcoll/_C.pyi, which mypy believes, against the compiled module: names, and what functions take."""

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import dcoll
from dcoll import _C

STUB = ast.parse((Path(dcoll.__file__).parent / "_C.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
SUBMODULES = {"_Kernels": _C.kernels, "_Plan": _C.plan}


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def declared(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """What a module or a class of the stub has, by name. What takes the same as another method is that one."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign):
            found[ast.unparse(node.target)] = node
        elif isinstance(node, ast.Assign):
            same = re.fullmatch(r"_\w+\(_Starts\.(\w+)\)", ast.unparse(node.value))
            found[ast.unparse(node.targets[0])] = members("_Starts")[same[1]] if same else node
    return found


def members(name: str) -> dict[str, ast.stmt]:
    """Of a class of the stub, with those of its bases there."""
    bases = [ast.unparse(base) for base in CLASSES[name].bases]
    inherited = {key: node for base in bases if base in CLASSES for key, node in members(base).items()}
    return inherited | declared(CLASSES[name].body)


def taken(arguments: ast.arguments) -> list[tuple[str, bool]]:
    """The parameters but self, and whether each may be left out."""
    plain = [*arguments.posonlyargs, *arguments.args]
    optional = [False] * (len(plain) - len(arguments.defaults)) + [True] * len(arguments.defaults)
    pairs = [(one.arg, may) for one, may in zip(plain, optional, strict=True) if one.arg != "self"]
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return pairs + [(one.arg, default is not None) for one, default in named]


def bound(function: Any) -> list[tuple[str, bool]] | None:
    """The same of the module's, out of the signature that pybind11 writes; None: that has none, or no names."""
    line = (inspect.getdoc(function) or "").split("\n")[0]
    signature = re.sub(r"<[^<>]*>", "None", line)  # defaults that are objects
    if "arg0" in signature or not re.match(r"\w+\(.*\) -> ", signature):
        return None
    (definition,) = ast.parse(f"def {signature}: ...").body
    assert isinstance(definition, ast.FunctionDef)
    return taken(definition.args)


def differing(body: dict[str, ast.stmt], owner: Any) -> dict[str, object]:
    """The functions that the stub has with other parameters than the module."""
    functions = {name: node for name, node in body.items() if isinstance(node, ast.FunctionDef)}
    open_ended = {name for name, node in functions.items() if node.args.kwarg is not None}
    pairs = {
        name: (taken(node.args), bound(getattr(owner, name)))
        for name, node in functions.items()
        if name in (public(functions) | {"__init__"}) - open_ended
    }
    return {name: pair for name, pair in pairs.items() if pair[1] is not None and pair[0] != pair[1]}


def test_the_module() -> None:
    assert public(declared(STUB.body)) ^ public(dir(_C)) == set()
    assert differing(declared(STUB.body), _C) == {}


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "_Starts" and "__getattr__" not in members(name)])
def test_the_classes(name: str) -> None:
    owner = SUBMODULES.get(name) or getattr(_C, name)
    inherited = public(dir(RuntimeError)) if isinstance(owner, type) and issubclass(owner, Exception) else set()
    assert public(members(name)) ^ (public(dir(owner)) - inherited) == set()
    assert differing(members(name), owner) == {}


def test_a_difference_is_found() -> None:
    (function,) = ast.parse("def hash_memory(blocks: int, more: int = 0) -> None: ...").body
    assert differing({"hash_memory": function}, _C) == {
        "hash_memory": ([("blocks", False), ("more", True)], [("blocks", False)])
    }
    compared = [name for name in members("Communicator") if bound(getattr(_C.Communicator, name)) is not None]
    assert {"allreduce", "allreduce_sync", "alloc", "close"} <= set(compared)
    assert bound(_C.Reducer.__init__) is not None
