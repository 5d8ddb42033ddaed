"""Run by test_installed_clients: asks a Prometheus that scrapes a cluster. Prints `ok` at the end."""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import httpx

prometheus, base_url, model, dashboard = sys.argv[1:]
WAIT_S = 60.0
PROCESSES = 5  # two workers, the coordinator, the gateway and the supervisor

with httpx.Client(timeout=30, trust_env=False) as client:

    def get(path: str, **query: str) -> Any:
        answer = client.get(f"{prometheus}/api/v1/{path}", params=query)
        assert answer.status_code == 200, (query, answer.text)
        return answer.json()["data"]

    asked = {"model": model, "prompt": "Once", "max_tokens": 5}
    assert client.post(f"{base_url}/v1/completions", json=asked).status_code == 200
    deadline, targets = time.monotonic() + WAIT_S, []
    while len(targets) < 4 or {target["health"] for target in targets} != {"up"}:
        assert time.monotonic() < deadline, targets
        time.sleep(0.5)
        try:
            targets = get("targets")["activeTargets"]
        except httpx.TransportError:
            targets = []
    print([target["scrapeUrl"] for target in targets])
    rules = [rule for group in get("rules")["groups"] for rule in group["rules"]]
    assert rules and not [rule for rule in rules if rule["health"] == "err"], rules
    expressions = re.findall(r'"expr": ("(?:[^"\\]|\\.)*")', Path(dashboard).read_text())
    assert expressions
    answered = 0
    for text in map(json.loads, expressions):
        query = re.sub(r"\$__\w+", "1m", re.sub(r'=~"\$\w+"', '=~".*"', text))
        answered += bool(get("query", query=query)["result"])
    assert answered > len(expressions) / 2, (answered, len(expressions))
    # What looks for metrics at the API's own address finds the gateway's.
    assert "crossdock_gateway_" in client.get(f"{base_url}/metrics").text
print("ok")
