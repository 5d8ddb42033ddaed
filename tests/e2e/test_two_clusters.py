"""Two clusters on one machine, started at once and without options that keep them apart."""

import threading
from pathlib import Path

from tests.e2e.live import Live


def test_two_clusters_start_side_by_side(tiny: Path, tmp_path: Path) -> None:
    """Two clusters start at the same time on one machine, and each keeps its ports."""
    up: dict[str, Live] = {}
    failed: list[BaseException] = []

    def start(name: str) -> None:
        try:
            up[name] = Live(tiny, tmp_path / name, port=None)
        except BaseException as error:
            failed.append(error)

    starting = [threading.Thread(target=start, args=(name,)) for name in ("one", "two")]
    try:
        for one in starting:
            one.start()
        for one in starting:
            one.join()
        assert not failed, failed
        answers = [cluster.token_ids([5, 6, 7], 4) for cluster in up.values()]
        assert answers[0] == answers[1]
        listening = [
            {cluster.base_url, cluster.coordinator, *cluster.status().metrics.values()} for cluster in up.values()
        ]
        assert [len(ports) for ports in listening] == [6, 6] and not listening[0] & listening[1]

        for cluster, ports in zip(up.values(), listening, strict=True):
            cluster.one("coordinator").kill()
            cluster.wait_registered(2)
            assert {cluster.base_url, cluster.coordinator, *cluster.status().metrics.values()} == ports
            assert cluster.token_ids([5, 6, 7], 4) == answers[0]
    finally:
        statuses = [cluster.stop() for cluster in up.values()]
    assert statuses == [0, 0]
