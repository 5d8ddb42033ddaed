"""The rules of the house, checked on the source: who may import whom, what pure modules may not touch, what is banned
everywhere, and how large files and functions may grow. ARCHITECTURE.md has the table in words.

Each check is a function of (path, source), tried on a planted violation as well, so that it is known to see something.
"""

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINES_MAX = 500
FUNCTION_LINES_MAX = 60

EVERYTHING = frozenset(
    "proto runtime kvtransfer engine scheduler coordinator gateway worker prefill_worker decode_worker "
    "launcher lab".split()
)
MAY_IMPORT = {
    "proto": frozenset[str](),
    "kvtransfer": frozenset({"proto"}),
    "engine": frozenset({"proto"}),
    "runtime": frozenset({"proto"}),
    "scheduler": frozenset({"proto", "runtime"}),
    "coordinator": frozenset({"proto", "runtime", "scheduler"}),
    "gateway": frozenset({"proto", "runtime"}),
    "worker": frozenset({"proto", "runtime", "engine", "kvtransfer"}),
    "prefill_worker": frozenset({"proto", "runtime", "engine", "kvtransfer", "worker"}),
    "decode_worker": frozenset({"proto", "runtime", "engine", "kvtransfer", "worker"}),
    "launcher": EVERYTHING - {"lab"},
    "lab": EVERYTHING,
}

PURE = (
    "prefill_worker/fetches.py",
    "prefill_worker/tier.py",
    "decode_worker/lending.py",
    "proto/*.py",
    "scheduler/*.py",
    "scheduler/*/*.py",
    "coordinator/*.py",
    "coordinator/*/*.py",
    "kvtransfer/transport_choice.py",
    "kvtransfer/memory/layout.py",
    "kvtransfer/session/*.py",
    "kvtransfer/transports/tcp/handshake.py",
    "runtime/tenancy/priority_classes.py",
    "runtime/tenancy/tenants.py",
    "runtime/tenancy/faults.py",
    "engine/kv/allocator.py",
    "engine/sampling/finish.py",
    "engine/kv/prefix_tree.py",
    "engine/kv/split.py",
    "engine/kv/sequence.py",
    "gateway/text/block_hashes.py",
    "gateway/shares.py",
    "gateway/shares.py",
    "gateway/batches/line_queue.py",
    "gateway/batches/lines.py",
    "gateway/http/multipart.py",
    "gateway/anthropic/convert.py",
    "gateway/response_store.py",
    "gateway/responses/convert.py",
    "gateway/streams/liveness.py",
    "gateway/streams/prompt_scores.py",
    "gateway/streams/final_messages.py",
    "gateway/streams/state.py",
    "gateway/streams/types.py",
    "gateway/streams/keeper.py",
    "decode_worker/batch.py",
    "decode_worker/core.py",
    "decode_worker/ended.py",
    "decode_worker/progress.py",
    "decode_worker/requests.py",
    "decode_worker/senders.py",
    "decode_worker/suffixes.py",
    "prefill_worker/core.py",
    "prefill_worker/prompts.py",
    "worker/ports.py",
    "runtime/lease/lease.py",
    "runtime/link/failure_detector.py",
    "worker/service.py",
    "worker/changeover.py",
    "worker/step_watch.py",
    "launcher/bench/continuity_figures.py",
    "launcher/cluster/file.py",
    "launcher/doctor/causes.py",
    "launcher/doctor/rules.py",
    "launcher/doctor/snapshot.py",
    "launcher/doctor/vllm.py",
    "launcher/cluster/plan.py",
    "launcher/local/core_plan.py",
    "launcher/cluster/units.py",
    "launcher/local/restart.py",
    "launcher/sessions.py",
    "lab/*.py",
    "lab/estimates/*.py",
    "lab/play/*.py",
)
"""Files that decide. Each pattern must match a file."""
DRIVERS = frozenset(
    {
        "coordinator/__main__.py",
        "coordinator/event_log/recorder.py",
        "coordinator/accounting/ledger.py",
        "coordinator/accounting/sqlite_store.py",
        "coordinator/dashboard/site.py",
        "coordinator/postgres/leader_lease.py",
        "coordinator/main.py",
        "coordinator/policy_keeper.py",
        "coordinator/postgres/database.py",
        "coordinator/serve.py",
    }
)
"""Files that turn decisions into I/O, where the rest of their folder decides."""
IMPURE_MODULES = frozenset(
    "asyncio zmq torch time random secrets threading multiprocessing socket subprocess structlog logging uvloop aiohttp".split()
)
BANNED_MODULES = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"})
BANNED_CALLS = re.compile(
    r"^(torch\.(load|save)|.*\.(send_pyobj|recv_pyobj|\w+_object_list)|time\.sleep|asyncio\.wait_for|eval|exec)$"
)
"""`asyncio.wait_for` of Python 3.11 drops a cancellation that comes with its result; `asyncio.timeout` does not."""
LAB_DRIVERS = ("lab/commands/", "lab/scenarios/")
WORLD_TOOLS = ("__main__", "batch", "test_", "planted")
"""Files of the fault world that run it, where the others are part of it."""
FIRST_OF_A_DICT = re.compile(r"del (.*)\[next\(iter\(\1\)\)\]$")

Check = Callable[[str, str], list[str]]


@cache
def parsed(source: str) -> ast.Module:
    """Each file is parsed once, whatever number of tests looks at it."""
    return ast.parse(source)


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")


def check_import_table(path: str, source: str) -> list[str]:
    package = PurePosixPath(path).parts[0]
    allowed = MAY_IMPORT[package] | {package}
    found = []
    for line, name in _imports(parsed(source)):
        top = name.split(".")[0]
        if name.startswith("."):
            found.append(f"{path}:{line}: relative import; write the package's name")
        elif (top in EVERYTHING and top not in allowed) or top in ("tests", "benchmarks", "tools"):
            found.append(f"{path}:{line}: {package} may not import {top}")
    return found


def _is_pure(path: str) -> bool:
    """A pattern is a whole path; `match` alone would take it for the end of one."""
    name = PurePosixPath(path)
    return any(name.match(pattern) and len(name.parts) == pattern.count("/") + 1 for pattern in PURE)


def check_pure(path: str, source: str) -> list[str]:
    if path in DRIVERS or not _is_pure(path):
        return []
    found = [
        f"{path}:{line}: a pure module may not import {name}"
        for line, name in _imports(parsed(source))
        if name.split(".")[0] in IMPURE_MODULES
    ]
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.AsyncFunctionDef | ast.Await):
            found.append(f"{path}:{node.lineno}: a pure module may not await")
    return found


def check_only_pure(path: str, source: str) -> list[str]:
    """The ratio lab and the fault world run what decides, and nothing that does: no socket, thread or tensor comes in with an
    import. The lab's commands and what reads its scenarios do more."""
    package = "lab" if path.startswith("tests/world/") else PurePosixPath(path).parts[0]
    if package != "lab" or path.startswith(LAB_DRIVERS) or PurePosixPath(path).name.startswith(WORLD_TOOLS):
        return []
    found = []
    for line, name in _imports(parsed(source)):
        module = name.replace(".", "/") + ".py"
        if name.split(".")[0] in EVERYTHING - {package} and (module in DRIVERS or not _is_pure(module)):
            found.append(f"{path}:{line}: {package} may import pure modules only, not {name}")
        elif name.split(".")[0] in IMPURE_MODULES - {"random"}:
            found.append(f"{path}:{line}: {package} may not import {name}")
    return found


def check_bans(path: str, source: str) -> list[str]:
    tree = parsed(source)
    found = [
        f"{path}:{line}: {name} is banned" for line, name in _imports(tree) if name.split(".")[0] in BANNED_MODULES
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append(f"{path}:{node.lineno}: bare except")
        if isinstance(node, ast.Call) and BANNED_CALLS.match(name := ast.unparse(node.func)):
            found.append(f"{path}:{node.lineno}: {name} is banned")
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "torch"):
            wrong = {alias.name for alias in node.names} & {"sleep", "load", "save"}
            found += [f"{path}:{node.lineno}: {node.module}.{name} is banned" for name in sorted(wrong)]
        if isinstance(node, ast.Delete) and FIRST_OF_A_DICT.match(name := ast.unparse(node)):
            found.append(f"{path}:{node.lineno}: {name} walks past all that was deleted before; use an OrderedDict")
    return found


def check_sizes(path: str, source: str) -> list[str]:
    lines = source.count("\n")
    found = [f"{path}: {lines} lines; at most {LINES_MAX}"] if lines > LINES_MAX else []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines; at most {FUNCTION_LINES_MAX}")
    return found


CHECKS: tuple[Check, ...] = (check_import_table, check_pure, check_only_pure, check_bans, check_sizes)


def _sources() -> list[tuple[str, str]]:
    return [
        (path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        for package in sorted(EVERYTHING)
        for path in sorted((ROOT / package).rglob("*.py"))
    ]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_source_keeps_the_rules(check: Check) -> None:
    problems = [problem for path, source in _sources() for problem in check(path, source)]
    assert not problems, "\n" + "\n".join(problems)


def test_fault_world_imports_pure_modules() -> None:
    """The fault world runs what decides, as the ratio lab does."""
    sources = {path: path.read_text("utf-8") for path in sorted((ROOT / "tests/world").rglob("*.py"))}
    assert not [
        one for path, text in sources.items() for one in check_only_pure(path.relative_to(ROOT).as_posix(), text)
    ]


PLANTED = [
    (check_import_table, "proto/x.py", "import runtime.link.server", "proto may not import runtime"),
    (
        check_import_table,
        "engine/x.py",
        "def f():\n    from kvtransfer.memory.layout import X",
        "engine may not import kvtransfer",
    ),
    (check_import_table, "coordinator/x.py", "from gateway import api", "coordinator may not import gateway"),
    (check_import_table, "gateway/x.py", "import engine.kv.allocator as b", "gateway may not import engine"),
    (check_import_table, "prefill_worker/x.py", "import decode_worker", "prefill_worker may not import decode_worker"),
    (check_import_table, "runtime/x.py", "import launcher", "runtime may not import launcher"),
    (check_import_table, "gateway/x.py", "from . import api", "relative import"),
    (check_pure, "coordinator/core.py", "import asyncio", "may not import asyncio"),
    (check_pure, "proto/codec.py", "from time import monotonic", "may not import time"),
    (check_pure, "kvtransfer/session/sender.py", "def f():\n    import torch.nn", "may not import torch"),
    (check_pure, "decode_worker/batch.py", "async def f(): ...", "may not await"),
    (check_only_pure, "lab/cluster/x.py", "from kvtransfer.sender import KvSender", "pure modules only"),
    (check_only_pure, "lab/cluster/x.py", "from coordinator.main import run", "pure modules only"),
    (check_only_pure, "lab/cluster/x.py", "import time", "may not import time"),
    (check_only_pure, "tests/world/faults/x.py", "import socket", "may not import socket"),
    (check_bans, "engine/x.py", "import pickle", "pickle is banned"),
    (check_bans, "engine/x.py", "import torch\ntorch.load('x')", "torch.load is banned"),
    (check_bans, "engine/x.py", "from torch import load", "torch.load is banned"),
    (check_bans, "runtime/x.py", "def f(s): s.send_pyobj(1)", "send_pyobj is banned"),
    (check_bans, "kvtransfer/x.py", "dist.broadcast_object_list([])", "broadcast_object_list is banned"),
    (check_bans, "gateway/x.py", "import time\ntime.sleep(1)", "time.sleep is banned"),
    (check_bans, "gateway/x.py", "async def f(t): await asyncio.wait_for(t, 1)", "asyncio.wait_for is banned"),
    (check_bans, "gateway/x.py", "try: pass\nexcept: pass", "bare except"),
    (check_bans, "gateway/x.py", "del self.a[next(iter(self.a))]", "use an OrderedDict"),
    (check_sizes, "gateway/x.py", "\n" * (LINES_MAX + 1), "501 lines"),
    (check_sizes, "gateway/x.py", "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX, "f has 61 lines"),
]


@pytest.mark.parametrize(("check", "path", "source", "expected"), PLANTED)
def test_planted_violation_is_detected(check: Check, path: str, source: str, expected: str) -> None:
    assert [problem for problem in check(path, source) if expected in problem]


@pytest.mark.parametrize("pattern", PURE)
def test_every_pure_pattern_matches_files(pattern: str) -> None:
    assert list(ROOT.glob(pattern)), f"{pattern} matches nothing: the file was renamed, and is no longer checked"


def test_innocent_source_passes_all_checks() -> None:
    source = "import os\nfrom proto.messages import Submit\n\ndef f() -> None:\n    os.getpid()\n"
    assert [problem for check in CHECKS for problem in check("gateway/streams/keeper.py", source)] == []


def test_every_code_folder_is_listed() -> None:
    """Each folder of code is in the import table, in the package and in the strict type checks."""
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks", "tools"}
    with (ROOT / "pyproject.toml").open("rb") as file:
        config = tomllib.load(file)
    assert (
        folders
        == EVERYTHING
        == {name.removesuffix("*") for name in config["tool"]["setuptools"]["packages"]["find"]["include"]}
        == set(config["tool"]["mypy"]["packages"]) - {"benchmarks", "tests", "tools"}
    )
    assert config["tool"]["mypy"]["strict"] is True
    assert config["tool"]["ruff"]["line-length"] == 120


def test_constraints_pin_every_requirement() -> None:
    """Each requirement is pinned to one version in the constraints and has hashes in the lock files."""
    pins = dict(
        line.lower().replace("_", "-").split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    )
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    # scripts/lock writes these; torch has no hash there, since each of its builds has others.
    base, test = (_locked(ROOT / name) for name in ("requirements.lock", "requirements-test.lock"))
    assert not base.keys() & test.keys() and (base | test).items() <= pins.items(), "run scripts/lock"
    for requirement in [
        *project["dependencies"],
        *(extras := project["optional-dependencies"])["cpu"],
        *extras["test"],
    ]:
        name = re.split(r"[<>=!~ \[]", requirement)[0].lower()
        assert name in pins, requirement
        installed = base | test if requirement in extras["test"] else base
        assert name == "torch" or name in installed, f"{name}: run scripts/lock"


def _locked(path: Path) -> dict[str, str]:
    """Package → version; each has hashes."""
    blocks = re.findall(r"^(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", path.read_text("utf-8"), re.M)
    assert len(blocks) == path.read_text("utf-8").count("=="), "a package without hashes"
    return {name: version for name, version, _ in blocks}
