"""A cluster of mixed workers alone: every process has one engine, and is two workers to the rest of the cluster."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.local.ports import free_port
from tests.e2e.live import at_once
from tests.e2e.parts import parts
from tests.e2e.test_rolling import GRACE_S, Twins, come, drain, load

NAMES = ("mixed-0", "mixed-1")
HALVES = [f"{name}-{half}" for name in NAMES for half in ("decode", "prefill")]


class MixedTwins(Twins):
    """Two mixed workers, and one gateway."""

    def begin(self, name: str) -> None:
        if name in NAMES:
            self.start("worker", "--drain-timeout-s", GRACE_S, name=name)
        else:
            super().begin(name)

    def begin_all(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {"gateway-0": free_port("127.0.0.1")}
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports.values()]
        self.base_url = self.urls[0]
        for name in ("coordinator", *NAMES, "gateway-0"):
            self.begin(name)
        self.wait_registered(len(HALVES))


@pytest.fixture(scope="module")
def up(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MixedTwins]:
    with parts(tiny, kind=MixedTwins) as cluster:
        cluster.begin_all(tmp_path_factory.mktemp("state"))
        yield cluster


def test_mixed_worker_shares_one_pool(up: MixedTwins, cluster_answers: dict[int, list[int]]) -> None:
    """Each mixed worker registers as two workers in one process that share its KV pool."""
    report = up.status()
    assert sorted(worker.name for worker in report.workers) == HALVES
    for name in NAMES:
        halves = {worker.role: worker for worker in report.workers if worker.name.startswith(name)}
        assert {worker.pid for worker in halves.values()} == {up.processes[name].pid}
        blocks = {str(role): worker.kv_blocks for role, worker in halves.items()}
        assert blocks["decode"] in range(3 * blocks["prefill"], 3 * blocks["prefill"] + 4), blocks
    assert at_once(lambda number: up.token_ids(_prompt(number), 40), range(12)) == list(cluster_answers.values())
    up.wait_idle()
    found = up.scrape("mixed-0-prefill")
    kv = {labels for name, labels in found if name == "crossdock_kv_blocks"}
    assert {dict(labels)["role"] for labels in kv} == {"prefill", "decode"} and len(kv) == 8
    names = {name for name, _ in found}
    assert {"crossdock_prefill_step_seconds_count", "crossdock_decode_step_seconds_count"} <= names
    assert sum(name == "process_start_time_seconds" for name, _ in found) == 1


def _prompt(number: int) -> list[int]:
    return [20 + number, *range(30, 30 + 5 * number)]


@pytest.fixture(scope="module")
def cluster_answers(cluster: object) -> dict[int, list[int]]:
    """Of a prefill and a decode worker."""
    return {number: cluster.token_ids(_prompt(number), 40) for number in range(12)}  # type: ignore[attr-defined]


def test_killed_mixed_worker_loses_nothing(up: MixedTwins) -> None:
    """The other one goes on with its streams, whose answers `load` compares; then it comes back."""
    with load(up) as loads:
        come(up, loads)
        up.kill("mixed-1")
        come(up, loads)
        up.begin("mixed-1")
        up.wait_registered(len(HALVES))
        come(up, loads)
    counters = up.status().counters
    assert counters["prefill_lost"] == 1 and counters["decode_lost"] == 1, sorted(counters.items())


def test_sigterm_drains_both_roles(up: MixedTwins) -> None:
    """SIGTERM drains both roles of a mixed worker, and no worker is lost."""
    before = up.status().counters
    with load(up) as loads:
        come(up, loads)
        up.terminate("mixed-0")
        up.wait_gone("mixed-0")
        come(up, loads)
        assert sorted(worker.name for worker in up.status().workers) == HALVES[2:]
        up.begin("mixed-0")
        up.wait_registered(len(HALVES))
        come(up, loads)
    lost = {key: n for key, n in up.status().counters.items() if key.endswith("_lost")}
    assert lost == {key: n for key, n in before.items() if key.endswith("_lost")}


def test_worker_name_drains_both_roles(up: MixedTwins) -> None:
    """A drain by the name of a mixed worker drains both of its roles."""
    with load(up) as loads:
        come(up, loads)
        drained = drain(up, "mixed-0", "--wait", "--drain-timeout-s", GRACE_S)
        assert drained.returncode == 0 and "mixed-0 is drained" in drained.stdout, drained.stderr
        assert {worker.name for worker in up.status().workers if worker.draining} == set(HALVES[:2])
        come(up, loads)
        assert drain(up, "mixed-0", "--undo").returncode == 0
        assert not any(worker.draining for worker in up.status().workers)


def test_one_role_is_drained_alone(up: MixedTwins) -> None:
    with load(up) as loads:
        come(up, loads)
        assert drain(up, "mixed-0-decode", "--wait", "--drain-timeout-s", GRACE_S).returncode == 0
        come(up, loads)
        assert drain(up, "mixed-0-decode", "--undo").returncode == 0
