"""The rules of the layout that no compiler checks: who includes whom, how long a file may be, which settings exist."""

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The include rule. bind may also include kernels: tests and benchmarks call them one by one.
MAY_INCLUDE = {
    "base": {"base"},
    "plan": {"base", "plan"},
    "kernels": {"base", "kernels"},
    "transport": {"base", "transport"},
    "device": {"base", "kernels", "transport", "device"},
    "engine": {"base", "plan", "kernels", "transport", "device", "engine"},
    "bind": {"base", "plan", "kernels", "device", "engine", "bind"},
}
# Within these layers: a file includes its own folder and those above it. "" is the layer's own folder.
FOLDERS = {
    "transport": ["os", "", "mapped", "mpi", "ucx"],
    "engine": [
        *("core", "board", "schedule", "node", "p2p", "levels", "watch", "links", "collective", "communicator"),
        "buckets",
    ],
}
# The same of dcoll's folders, which also import modules that lie below all of them.
PYTHON_FOLDERS = ["job", "compression", "collectives", "optimizer", "torch", "elastic", "runner", "doctor"]
BELOW_ALL_FOLDERS = {"_C", "errors", "gradient_errors", "ops"}
LONGEST_FILE = 450
LONGEST_FUNCTION = 60
MOST_METHODS = 40  # of a class
# Longer ones, and how long they may be.
LONG_FUNCTIONS = {
    "examples/elastic.py main": 62,  # Horovod's script, changed in the import alone
}
CPP = (".h", ".cc", ".cu", ".cuh")
# Environment variables that are read when dcoll is built or tested, not when it runs.
BUILD_VARIABLES = {"DCOLL_CUDA", "DCOLL_MPI", "DCOLL_UCX", "DCOLL_REQUIRE_GPU"}


def sources(*folders: str, suffixes: tuple[str, ...] = (*CPP, ".py", ".pyi", ".cmake")) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)


def forbidden_includes(layer: str, text: str) -> list[str]:
    includes = re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.MULTILINE)
    return [path for path in includes if path.split("/")[0] not in MAY_INCLUDE[layer]]


def test_every_layer_has_a_rule() -> None:
    assert {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()} == set(MAY_INCLUDE)


@pytest.mark.parametrize("layer", MAY_INCLUDE)
def test_layers_include_only_what_they_may(layer: str) -> None:
    files = sources(f"csrc/{layer}", suffixes=CPP)
    assert files
    broken = {str(path.relative_to(ROOT)): forbidden_includes(layer, path.read_text()) for path in files}
    assert {path: includes for path, includes in broken.items() if includes} == {}


def test_the_include_rule_can_fail() -> None:
    assert forbidden_includes("plan", '#include "base/types.h"\n#include <vector>\n#include "plan/steps.h"\n') == []
    assert forbidden_includes("plan", '#include "transport/transport.h"\n') == ["transport/transport.h"]
    assert forbidden_includes("engine", '  #  include "bind/bind.h"\n') == ["bind/bind.h"]
    # Without its layer in front, an include would escape the rule.
    assert forbidden_includes("plan", '#include "steps.h"\n') == ["steps.h"]


def folder_of(path: str) -> str:
    """engine/core/call.h -> core; transport/window.h -> "" """
    return path.split("/")[1] if path.count("/") == 2 else ""


def includes_upwards(path: str, text: str) -> list[str]:
    """What this file includes of its layer that lies in a folder which may include it."""
    layer = path.split("/", maxsplit=1)[0]
    order = FOLDERS[layer]
    included = re.findall(rf'^\s*#\s*include\s+"({layer}/[^"]+)"', text, re.MULTILINE)
    return [one for one in included if order.index(folder_of(one)) > order.index(folder_of(path))]


@pytest.mark.parametrize("layer", FOLDERS)
def test_folders_include_only_those_before_them(layer: str) -> None:
    files = sources(f"csrc/{layer}", suffixes=CPP)
    names = {str(path.relative_to(ROOT / "csrc")): path.read_text() for path in files}
    assert {folder_of(name) for name in names} == set(FOLDERS[layer])
    broken = {name: includes_upwards(name, text) for name, text in names.items()}
    assert {name: includes for name, includes in broken.items() if includes} == {}


def test_the_order_of_folders_can_fail() -> None:
    upwards = '#include "engine/core/call.h"\n#include "engine/node/pull.h"\n'
    assert includes_upwards("engine/board/agreement.h", upwards) == ["engine/node/pull.h"]
    assert includes_upwards("engine/node/slots.h", upwards) == []
    assert includes_upwards("transport/window.h", '#include "transport/os/fd.h"\n') == []
    assert includes_upwards("transport/os/fd.h", '#include "transport/window.h"\n') == ["transport/window.h"]


def circle(includes: dict[str, list[str]]) -> list[str]:
    """A way from a file back to it, if there is one."""
    done: set[str] = set()

    def walk(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        found = next((found for one in includes.get(name, []) if (found := walk(one, [*way, name]))), [])
        done.add(name)
        return found

    return next((found for name in includes if (found := walk(name, []))), [])


def test_no_headers_include_each_other() -> None:
    include = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
    headers = {
        str(path.relative_to(ROOT / "csrc")): include.findall(path.read_text())
        for path in sources("csrc", suffixes=(".h", ".cuh"))
    }
    assert circle(headers) == []
    assert circle({"a": ["b"], "b": ["c"], "c": ["b"]}) == ["b", "c", "b"]


def imports_of(name: str, text: str, modules: set[str]) -> list[str]:
    """The modules of dcoll that this one imports, at its top or within a function; but for types alone."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    # A module's own packages were imported before it begins; they re-export what is below them.
    return sorted(one for one in found & modules if not f"{name}.".startswith(f"{one}."))


def modules() -> dict[str, str]:
    """The text of every module of dcoll, by its dotted name."""
    files = [path for path in sources("dcoll") if path.suffix == ".py"]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files]
    return {name: path.read_text() for name, path in zip(names, files, strict=True)}


def test_no_modules_import_each_other() -> None:
    texts = modules()
    assert circle({name: imports_of(name, text, set(texts)) for name, text in texts.items()}) == []
    lazy = "def f():\n    from dcoll import world\nif TYPE_CHECKING:\n    import dcoll.run\n"
    assert imports_of("dcoll.a", lazy, {"dcoll.world", "dcoll.run", "dcoll.a"}) == ["dcoll.world"]


def imports_upwards(name: str, text: str, known: set[str]) -> list[str]:
    """What this module imports that lies in a folder which may import it. Outside all folders are the few modules that
    every folder may import, and those that gather the names of all and are imported by none.
    """
    place = PYTHON_FOLDERS.index(name.split(".")[1])
    places = {one: one.split(".")[1] for one in imports_of(name, text, known)}
    below = {*BELOW_ALL_FOLDERS, *PYTHON_FOLDERS[: place + 1]}
    return [one for one, folder in places.items() if folder not in below]


def test_python_folders_import_only_those_before_them() -> None:
    texts = modules()
    folders = {path.name for path in (ROOT / "dcoll").iterdir() if (path / "__init__.py").exists()} - {"common"}
    assert folders == set(PYTHON_FOLDERS)
    inside = {name: text for name, text in texts.items() if name.count(".") and name.split(".")[1] in PYTHON_FOLDERS}
    broken = {name: imports_upwards(name, text, set(texts)) for name, text in inside.items()}
    assert {name: imports for name, imports in broken.items() if imports} == {}
    known = {"dcoll.job.world", "dcoll.collectives.movement", "dcoll.errors", "dcoll.plan"}
    upwards = "from dcoll.errors import E\nfrom dcoll.job import world\nfrom dcoll.collectives import movement\n"
    assert imports_upwards("dcoll.job.stall", upwards, known) == ["dcoll.collectives.movement"]
    assert imports_upwards("dcoll.optimizer.buckets", upwards + "import dcoll.plan", known) == ["dcoll.plan"]


def differ_by_one_letter(a: str, b: str) -> bool:
    if len(a) == len(b):
        return sum(x != y for x, y in zip(a, b, strict=True)) == 1
    return any(b[:i] + b[i + 1 :] == a for i in range(len(b)))


def test_no_names_of_files_differ_by_one_letter() -> None:
    """Within a folder: one of such two is taken for the other."""
    for folder in {path.parent for path in sources("csrc", "dcoll")}:
        names = sorted({path.stem for path in folder.iterdir() if path.suffix in (*CPP, ".py")})
        assert [(a, b) for a in names for b in names if differ_by_one_letter(a, b)] == [], folder
    assert differ_by_one_letter("collective", "collectives")
    assert differ_by_one_letter("cast", "cost")
    assert not differ_by_one_letter("pull", "pull")


TYPE = re.compile(r"(?:enum class|enum|class|struct|union) (?:alignas\(\w+\) )?([\w:]+)[^;]*\{")


def types_of(text: str) -> list[str]:
    """Every type that a file defines for other files to see, with its namespace. Needs clang-format's indentation."""
    found, namespace, hidden = [], "", False
    for line in text.splitlines():
        if opened := re.match(r"namespace ?([\w:]*) ?\{", line):
            namespace, hidden = (opened[1] or namespace), not opened[1]
        elif line == "}  // namespace":
            hidden = False
        elif (defined := TYPE.match(line)) and not hidden:
            found.append(f"{namespace}::{defined[1]}")
    return found


def test_no_two_types_have_one_name() -> None:
    """Two of one name in different files are one to the linker, which takes the members of either for both."""
    places: dict[str, list[str]] = {}
    for path in sources("csrc", suffixes=CPP):
        for name in types_of(path.read_text()):
            places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert len(places) > 100
    assert {name: files for name, files in places.items() if len(set(files)) > 1} == {}
    hidden = "namespace a {\nnamespace {\nstruct B {\n}  // namespace\nclass C final : public D {\nstruct E;\n"
    assert types_of(hidden) == ["a::C"]


def test_the_core_knows_neither_python_nor_torch_nor_mpi() -> None:
    foreign = re.compile(
        r"^\s*#\s*include\s+<((?:pybind11|torch|ATen|c10|numpy|uc[pst])/[^>]*|Python\.h|mpi\.h)>", re.MULTILINE
    )
    found = {
        str(path.relative_to(ROOT)): match
        for path in sources("csrc", suffixes=CPP)
        if path.relative_to(ROOT).parts[1] != "bind"
        for match in foreign.findall(path.read_text())
    }
    # The plugins' own headers are the only doors.
    assert found == {"csrc/transport/mpi/transport.h": "mpi.h", "csrc/transport/ucx/transport.h": "ucp/api/ucp.h"}


def test_files_can_be_read_in_one_sitting() -> None:
    """The compiled module's one stub file is as long as that module's interface, and is looked up, not read."""
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in sources("csrc", "dcoll", "tests", "bench", "examples", "cmake")
        if path.suffix != ".pyi"
    }
    assert {path: length for path, length in lengths.items() if length > LONGEST_FILE} == {}


def test_comments_are_no_wider_than_code() -> None:
    """clang-format leaves them alone, as it would break lists."""
    wide = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sources("csrc", "tests", suffixes=CPP)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 120 and line.lstrip().startswith("//")
    ]
    assert wide == []


def python_functions(text: str) -> list[tuple[str, int]]:
    """Lines of every function but for its docstring. Several of a file may have one name."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            told = 0 if ast.get_docstring(node) is None else (first.end_lineno or 0) - first.lineno + 1
            found.append((node.name, (node.end_lineno or 0) - node.lineno + 1 - told))
    return found


def cpp_functions(text: str) -> list[tuple[str, int]]:
    """Lines of every function outside of classes, and of every method defined in one. Needs clang-format's indentation:
    the brace that ends a function stands below the first letter of the line that opens it. Overloads have one name.
    """
    found = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        begin, indent = at, re.match("(?:  )?", lines[at])[0]  # type: ignore[index]  # it matches every line
        if re.match(rf"{indent}(?![ }}/#]|namespace|class|struct|enum|union|extern)", lines[at]):
            while at + 1 < len(lines) and lines[at] and lines[at][-1] not in "{};":  # a signature of several lines
                at += 1
            head = " ".join(lines[begin : at + 1])
            name = re.search(r"([\w:~]+)\(", head)
            end = next((i for i in range(at + 1, len(lines)) if lines[i].startswith(f"{indent}}}")), None)
            if head.endswith("{") and name and end:
                found.append((name[1], end - begin + 1))
                at = end
        at += 1
    return found


def test_functions_fit_a_screen() -> None:
    """No new ones that do not, and those there are grow no more. One that fits again leaves the list."""
    lengths: list[tuple[str, int]] = []
    for path in sources("csrc", "dcoll", "bench", "examples", "cmake", suffixes=(*CPP, ".py")):
        count = python_functions if path.suffix == ".py" else cpp_functions
        name = str(path.relative_to(ROOT))
        lengths += [(f"{name} {function}", lines) for function, lines in count(path.read_text())]
    assert len(lengths) > 2000
    long = {name: lines for name, lines in sorted(lengths) if lines > LONGEST_FUNCTION}  # the longest of a name
    assert {name: lines for name, lines in long.items() if lines > LONG_FUNCTIONS.get(name, 0)} == {}
    assert set(LONG_FUNCTIONS) - set(long) == set()
    python = 'def f() -> None:\n    """Two\n    lines."""\n    pass\n'
    assert python_functions(2 * python) == [("f", 2), ("f", 2)]
    cpp = "void A::f(int a,\n          int b) {\n  if (a) {\n  }\n}\nclass B {\n  int g() {\n    return 1;\n  }\n};\n"
    assert cpp_functions(cpp) == [("A::f", 5), ("g", 3)]


def missing_names(text: str) -> list[str]:
    """What is imported from dcoll by name and is not there."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "dcoll":
            assert node.module
            module = importlib.import_module(node.module)
            for name in {alias.name for alias in node.names} - {"*"}:
                if not hasattr(module, name) and importlib.util.find_spec(f"{node.module}.{name}") is None:
                    found.append(f"{node.module}.{name}")
    return found


def test_names_that_are_imported_exist() -> None:
    """In functions too, which no test may call: a benchmark runs once in a while."""
    paths = sources("dcoll", "tests", "bench", "examples", suffixes=(".py",))
    assert len(paths) > 200
    found = {str(path.relative_to(ROOT)): missing_names(path.read_text()) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}
    text = "def f():\n    from dcoll.compression import codec_of, codecs\n"
    assert missing_names(text) == ["dcoll.compression.codec_of"]


def python_methods(text: str) -> dict[str, int]:
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    return {node.name: sum(isinstance(one, ast.FunctionDef) for one in node.body) for node in classes}


def cpp_methods(text: str) -> dict[str, int]:
    """Methods of every class, without those of the interfaces that it implements, and without deleted and defaulted
    ones. Needs clang-format's indentation: a member begins two columns behind its class, and the lines that go on with
    it lie further in.
    """
    found = {}
    lines = text.splitlines()
    for begin, line in enumerate(lines):
        opened = re.match(r"( *)(?:class|struct) (?:\w+\(.*?\) )?(\w+)[^;]*\{$", line)
        if not opened:
            continue
        indent = opened[1]
        end = next(i for i in range(begin, len(lines)) if lines[i].startswith(f"{indent}}}"))
        body = re.sub(r" *//.*", "", "\n".join(lines[begin + 1 : end]))
        members = re.split(rf"^{indent}  (?=[^ }}])", body, flags=re.MULTILINE)[1:]
        named = [re.sub(r"operator\W+(?=\()", "operator", member) for member in members]
        heads = [re.sub(r"DCOLL_\w+\(.*", "", re.split(r"[{;=]", one)[0], flags=re.DOTALL) for one in named]
        no_methods = r"(?:using|friend|static_assert|typedef|enum|class|struct)\b"
        found[opened[2]] = sum(
            "(" in re.sub(r"<.*>", "", head, flags=re.DOTALL)
            and not re.match(no_methods, head)
            and not re.search(r"= (?:delete|default);|\) (?:const )?override\b", member)
            for head, member in zip(heads, members, strict=True)
        )
    return found


def test_no_class_has_more_methods_than_can_be_kept_in_mind() -> None:
    counts: dict[str, int] = {}
    for path in sources("csrc", "dcoll", suffixes=(*CPP, ".py")):
        count = python_methods if path.suffix == ".py" else cpp_methods
        counts |= {f"{path.relative_to(ROOT)} {name}": methods for name, methods in count(path.read_text()).items()}
    assert len(counts) > 200
    assert counts["csrc/engine/communicator/communicator.h Communicator"] > 20
    assert {name: methods for name, methods in counts.items() if methods > MOST_METHODS} == {}
    assert python_methods("class A:\n    x = 1\n\n    def f(self) -> None: ...\n") == {"A": 1}
    cpp = """
class A final {
 public:
  A(const A&) = delete;
  struct B {
    int f() { return 1; }
  };
  int g(int a,
        int b) const;  // c()
  std::function<void(int)> h;
  Mutex m DCOLL_GUARDED_BY(n(1));
  int k() const override { return 1; }
  using D = int (*)();
  int i{0};
  bool operator==(const A& other) const;
};
"""
    assert cpp_methods(cpp) == {"A": 2, "B": 1}


def test_every_setting_is_in_the_table() -> None:
    """A DCOLL_* name in a string or a comment of the sources is a setting; macros and CMake's variables are not."""
    settings = pytest.importorskip("dcoll._C").settings()
    known = {row[0] for row in settings} | BUILD_VARIABLES
    macros = {"DCOLL_VERSION", "DCOLL_CUDA"}
    mentioned: dict[str, str] = {}
    for path in sources("csrc", "dcoll", suffixes=(*CPP, ".py", ".pyi")):
        text = path.read_text()
        macros |= set(re.findall(r"#\s*define\s+(DCOLL_[A-Z0-9_]+)", text))
        mentioned |= {name: str(path.relative_to(ROOT)) for name in re.findall(r"\bDCOLL_[A-Z0-9_]*[A-Z0-9]\b", text)}
    unknown = {name: path for name, path in mentioned.items() if name not in known | macros}
    assert unknown == {}
    assert {row[0] for row in settings} <= set(mentioned)


def test_build_variables_are_documented() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [name for name in sorted(BUILD_VARIABLES) if name not in readme] == []
