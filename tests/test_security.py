"""SECURITY.md promises nothing that no test shows."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_threat_names_a_test_that_exists() -> None:
    rows = [line for line in (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    named = [re.fullmatch(r"\|.+\|.+\| `(tests/[^:`]+)(?:::(\w+))?` \|", row) for row in rows[1:]]
    assert len(named) > 20 and all(named), [row for row, match in zip(rows[1:], named, strict=True) if not match]
    absent = []
    for match in named:
        assert match is not None
        path, name = ROOT / match[1], match[2]
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
        tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
        if not tests or (name and name not in tests):
            absent.append(match[0])
    assert not absent
