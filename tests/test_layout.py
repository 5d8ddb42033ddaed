"""The layout of the product's code: folders that can be surveyed, files that can be read, and no import cycle, neither between
modules nor between the folders and files of one package. Imports for type checking count as well.
"""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.test_tidy import EVERYTHING, ROOT, parsed

FILES_MAX = 15
LINES_MAX = 500

FOLDERS_MAY_IMPORT = {
    "coordinator": {
        "accounting": "",
        "dashboard": "reporting",
        "event_log": "",
        "postgres": "accounting",
        "recovery": "reporting",
        "reporting": "accounting",
        "rollouts": "accounting",
    },
    "scheduler": {
        "fairness": "",
        "kv_admission": "",
        "placement": "fairness kv_admission waiting workers",
        "waiting": "fairness kv_admission",
        "workers": "fairness kv_admission waiting",
    },
    "gateway": {
        "anthropic": "http openai streams text",
        "batches": "http openai responses text",
        "http": "streams",
        "openai": "http streams structured text tools",
        "responses": "http openai streams text",
        "streams": "text",
        "structured": "http",
        "text": "",
        "tools": "http structured text",
        "tracing": "http",
        "vllm": "http openai text",
    },
    "kvtransfer": {"memory": "", "session": "", "transports": "memory session"},
    "launcher": {
        "admin": "local",
        "batch": "http local",
        "bench": "http load local models",
        "cluster": "http load local models",
        "doctor": "admin http local",
        "http": "",
        "load": "http",
        "local": "http models",
        "models": "",
    },
    "lab": {
        "cluster": "",
        "commands": "cluster estimates play scenarios",
        "estimates": "play",
        "play": "",
        "scenarios": "cluster",
    },
    "runtime": {
        "grammar": "",
        "lease": "process storage",
        "link": "process settings",
        "metrics": "link process settings storage",
        "process": "storage",
        "settings": "process",
        "storage": "",
        "tenancy": "process",
    },
}
"""Which folders of a package each of its folders may import. Files beside the folders are not in the table."""

Imports = Mapping[str, set[str]]


def sources() -> dict[str, Path]:
    """Every module of the product, by its dotted name."""
    found = {}
    for package in sorted(EVERYTHING):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imports(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """Which modules each one imports, of those given by name with their source."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, source in modules.items():
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    one = f"{node.module}.{alias.name}"
                    found[name].add(one if one in modules else node.module)
            elif isinstance(node, ast.Import):
                found[name].update(alias.name for alias in node.names)
        found[name] &= set(modules)
    return found


def cycles(graph: Imports) -> list[list[str]]:
    """Groups of nodes that reach each other."""
    reached = {node: _reached(graph, node) for node in graph}
    groups = {
        frozenset(other for other in reached[node] if node in reached.get(other, ()))
        for node in graph
        if node in reached[node]
    }
    return sorted(sorted(group) for group in groups)


def _reached(graph: Imports, start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for other in graph.get(waiting.pop(), ()):
            if other not in found:
                found.add(other)
                waiting.append(other)
    return found


def children(graph: Imports, package: str) -> dict[str, set[str]]:
    """The same imports between the files and folders directly in `package`."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, others in graph.items():
        one = _child(package, name)
        found[one] |= {_child(package, other) for other in others} - {one, ""} if one else set()
    found.pop("", None)
    return found


def _child(package: str, name: str) -> str:
    """The part of `package` that a module lies in; empty for none."""
    rest = name.removeprefix(f"{package}.") if package else name
    return rest.partition(".")[0] if rest != name or not package else ""


def _graph() -> dict[str, set[str]]:
    return imports({name: path.read_text("utf-8") for name, path in sources().items()})


def _packages(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[0] for name in names}


def test_modules_have_no_import_cycles() -> None:
    assert not cycles(_graph())


def test_folders_have_no_import_cycles() -> None:
    graph = _graph()
    found = {package: cycles(children(graph, package)) for package in _packages(graph)}
    assert not {package: groups for package, groups in found.items() if groups}


def test_import_cycle_is_detected() -> None:
    graph = imports(
        {
            "a.x": "from a.b import y",
            "a.b.y": "if TYPE_CHECKING:\n    import a.c.z",
            "a.c.z": "from a.x import name",
            "a.b.w": "",
            "a.c.v": "",
        }
    )
    assert cycles(graph) == [["a.b.y", "a.c.z", "a.x"]]
    assert cycles(children(graph, "a")) == [["b", "c", "x"]]
    folders = imports({"a.b.y": "import a.c.v", "a.c.v": "", "a.c.z": "import a.b.w", "a.b.w": ""})
    assert not cycles(folders)
    assert cycles(children(folders, "a")) == [["b", "c"]]


def folder_problems(graph: Imports, package: str, table: Mapping[str, str]) -> list[str]:
    """Where the imports between the folders of a package differ from its table."""
    found = children({name: others for name, others in graph.items() if name.startswith(f"{package}.")}, package)
    folders = {name.split(".")[1] for name in graph if name.startswith(f"{package}.") and name.count(".") > 1}
    problems = [f"{package}/{folder} is not in the table" for folder in sorted(folders - table.keys())]
    for folder, allowed in table.items():
        used = found.get(folder, set()) & folders
        problems += [f"{package}/{folder} may not import {other}" for other in sorted(used - set(allowed.split()))]
        problems += [f"{package}/{folder} does not import {other}" for other in sorted(set(allowed.split()) - used)]
    return problems


@pytest.mark.parametrize("package", FOLDERS_MAY_IMPORT)
def test_folder_imports_match_the_table(package: str) -> None:
    """Folders of a package import exactly the folders that their table allows."""
    assert not folder_problems(_graph(), package, FOLDERS_MAY_IMPORT[package])


def test_forbidden_folder_import_is_detected() -> None:
    """The check detects forbidden imports, missing imports and folders that are not in the table."""
    sources = {"a.fair.x": "from a.money import y", "a.money.y": "", "a.new.z": ""}
    graph = {name: imports(sources).get(name, set()) for name in sources}
    table = {"fair": "", "money": "fair"}
    assert folder_problems(graph, "a", table) == [
        "a/new is not in the table",
        "a/fair may not import money",
        "a/money does not import fair",
    ]


def test_folders_and_files_stay_small() -> None:
    """No folder has too many files, and no file too many lines."""
    files = Counter(path.parent.relative_to(ROOT).as_posix() for path in sources().values())
    large = {folder: count for folder, count in files.items() if count > FILES_MAX}
    long = {
        path.relative_to(ROOT).as_posix(): lines
        for path in sources().values()
        if (lines := path.read_text("utf-8").count("\n")) > LINES_MAX
    }
    assert (large, long) == ({}, {})


def test_every_folder_has_a_docstring() -> None:
    for name, path in sources().items():
        if path.name == "__init__.py":
            docstring = ast.get_docstring(parsed(path.read_text("utf-8"))) or ""
            assert len(docstring) > 40, f"{name} needs a docstring: what lives here, and where to start reading"
