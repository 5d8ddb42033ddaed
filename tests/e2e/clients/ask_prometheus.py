"""Run by test_installed_clients: asks a Prometheus that scrapes a cluster. Prints `ok` at the end."""

import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

prometheus, base_url, model, dashboard = sys.argv[1:]
WAIT_S = 60.0
PROCESSES = 5  # two workers, the coordinator, the gateway and the supervisor
SCRAPES_S = 4.0  # at least two scrapes, so that rates exist

with httpx.Client(timeout=60, trust_env=False) as client:

    def get(path: str, **query: str) -> Any:
        answer = client.get(f"{prometheus}/api/v1/{path}", params=query)
        assert answer.status_code == 200, (query, answer.text)
        return answer.json()["data"]

    def complete(number: int, **options: Any) -> int:
        asked = {"model": model, "prompt": f"Once upon a time {number} " * 20, "max_tokens": 12, **options}
        return client.post(f"{base_url}/v1/completions", json=asked).status_code

    def send_traffic() -> None:
        with ThreadPoolExecutor(6) as pool:
            assert set(pool.map(complete, range(6))) == {200}
        assert complete(0, session_id="one") == complete(0, session_id="one") == 200
        assert complete(0, prompt="word " * 30_000) == 400
        with client.stream("POST", f"{base_url}/v1/completions", json={
            "model": model, "prompt": "Once", "max_tokens": 500, "ignore_eos": True, "stream": True,
        }) as left:  # fmt: skip
            next(left.iter_lines())

    deadline, targets = time.monotonic() + WAIT_S, []
    while len(targets) < PROCESSES or {target["health"] for target in targets} != {"up"}:
        assert time.monotonic() < deadline, targets
        time.sleep(0.5)
        try:
            targets = get("targets")["activeTargets"]
        except httpx.TransportError:
            targets = []
    print([target["scrapeUrl"] for target in targets])
    for _ in range(2):
        send_traffic()
        time.sleep(SCRAPES_S)

    # Rules and panels name what the processes export.
    rules = [rule for group in get("rules")["groups"] for rule in group["rules"]]
    assert rules and not [rule for rule in rules if rule["health"] == "err"], rules
    panels = [
        target["expr"]
        for panel in json.loads(Path(dashboard).read_text())["panels"]
        for target in panel.get("targets", ())
    ]
    assert panels
    exported = {one["metric"] for one in get("targets/metadata", limit="10000")}
    text = re.sub(
        r"\b(by|on|ignoring|without|group_left) \([^)]*\)|\{[^}]*\}",
        "",
        " ".join([*panels, *(rule["query"] for rule in rules)]),
    )
    names = {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"\b(?:crossdock|process)_\w+", text)}
    assert names and not names - exported, names - exported

    # What stays empty is about tenants, refusals and faults, which this cluster has not seen.
    empty = [query for query in panels if not get("query", query=query.replace("$__rate_interval", "1m"))["result"]]
    print("without data:", *empty, sep="\n")
    assert len(empty) < len(panels) / 4, (len(empty), len(panels))
    # What looks for metrics at the API's own address finds the gateway's.
    assert "crossdock_gateway_" in client.get(f"{base_url}/metrics").text
print("ok")
