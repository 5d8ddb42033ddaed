"""A rolling upgrade under load, with real processes: first old workers with a new coordinator and new gateways, and at the end
new workers with an old coordinator and old gateways. No stream is lost, and no token changes."""

from pathlib import Path

import httpx
import pytest

from tests.e2e.other_versions import extract, make_next, previous_commit
from tests.e2e.parts import ROOT, parts
from tests.e2e.test_rolling import NAMES, Twins, come, load

WORKERS = {"prefill-0", "decode-0", "prefill-1", "decode-1"}
STEPS = (("prefill-0", "decode-0"), ("prefill-1", "decode-1", "gateway-0"), ("gateway-1", "coordinator"))
"""What is changed together: fewer steps than in a rolling restart take less time, and leave one of each kind too."""
UNKNOWN = "crossdock_link_unknown_messages_total"


def leave_early(up: Twins) -> None:
    """A client that goes away in the middle of its stream, at each gateway."""
    body = {"model": up.model_id, "prompt": [9, 8, 7], "max_tokens": 400, "ignore_eos": True, "stream": True}
    for url in up.urls:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60.0, trust_env=False) as answer:
            assert answer.status_code == 200
            next(answer.iter_lines())


def change_under_load(up: Twins, home: Path, other: Path) -> None:
    """Start with this tree's workers and the rest from `other`; end the other way round."""
    up.trees = {name: ROOT if name in WORKERS else other for name in NAMES}
    up.begin_all(home)
    with load(up) as loads:
        for step in STEPS:
            come(up, loads)
            leave_early(up)
            for name in step:
                up.terminate(name)
            for name in step:
                up.wait_gone(name)
                up.trees[name] = other if name in WORKERS else ROOT
                up.begin(name)
            up.wait_complete()
        come(up, loads)
        leave_early(up)
        counters = up.status().counters
        assert not counters.get("protocol_errors"), counters


@pytest.mark.long
def test_upgrade_and_downgrade_under_load(tiny: Path, tmp_path: Path) -> None:
    """A cluster goes to the next version and back under load, and unknown messages are ignored."""
    with parts(tiny, kind=Twins) as up:
        change_under_load(up, tmp_path, make_next(tmp_path / "next"))
        ignored = up.scrape("coordinator")[UNKNOWN, frozenset({("port", "control")})]
        assert ignored == 4, "each worker of the next version sent a message that is unknown here"


@pytest.mark.long
def test_upgrade_from_previous_commit(tiny: Path, tmp_path: Path) -> None:
    """A cluster goes from the previous commit to this tree and back under load."""
    commit = previous_commit()
    if not commit:
        pytest.skip("git has no earlier commit here that this tree could work with (or the clone is shallow)")
    with parts(tiny, kind=Twins) as up:
        change_under_load(up, tmp_path, extract(commit, tmp_path / "previous"))
