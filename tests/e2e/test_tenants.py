"""Keys, rates and the ledger on a real cluster, through a kill -9 of the coordinator."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from launcher.admin.tenants import new_key
from launcher.admin.usage import UsageSettings, read
from tests.e2e.live import Live, live

PROMPT, TOKENS = list(range(6, 46)), 450


def ask(up: Live, key: str, max_tokens: int, **fields: Any) -> httpx.Response:
    body = {"model": up.model_id, "prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, **fields}
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{up.base_url}/v1/completions", json=body, headers=headers, timeout=120.0, trust_env=False)


def usage(db: Path, tenant: str) -> dict[str, Any]:
    (entry,) = read(UsageSettings(db=str(db), tenant=tenant))
    return entry


def test_tenant_limits_survive_coordinator_kill(tiny: Path, tmp_path: Path) -> None:
    """Tenants are told apart, limited and billed, also through a kill of the coordinator."""
    (ann, ann_hash), (bob, bob_hash) = new_key(), new_key()
    file, db = tmp_path / "tenants.toml", tmp_path / "usage.sqlite"
    file.write_text(
        f'[tenants.acme.users.ann]\nkeys = ["{ann_hash}"]\nlimits = {{ requests_per_min = 2, kv_blocks = 10 }}\n'
        f'[tenants.acme.users.bob]\nkeys = ["{bob_hash}"]\n'
    )
    with live(tiny, tmp_path, "--tenants", str(file), "--usage-db", str(db)) as up:
        assert ask(up, "sk-nobody", 5).status_code == 401
        assert ask(up, bob, 5, priority="interactive").status_code == 403
        first = ask(up, ann, 5)
        assert first.status_code == 200
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert ask(up, ann, 7).status_code == 200
        refused = ask(up, ann, 5)
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 34
        assert "requests_per_min of acme/ann" in refused.json()["error"]["message"]
        up.wait_idle()
        with ThreadPoolExecutor() as pool:
            streaming = pool.submit(ask, up, bob, TOKENS)
            up.wait_for("a stream decodes", lambda: "decoding" in up.status().running)
            up.one("coordinator").send_signal(signal.SIGKILL)
            assert streaming.result().json()["usage"]["completion_tokens"] == TOKENS
        up.wait_registered(2)
        # The rate of the last minute outlives the coordinator.
        again = ask(up, ann, 5)
        assert again.status_code == 429 or int(again.headers["x-ratelimit-remaining-requests"]) == 0
        never = ask(up, ann, TOKENS)
        assert never.status_code == 429 and never.headers["x-should-retry"] == "false"
        file.write_text(file.read_text().replace("requests_per_min = 2", "requests_per_min = 50"))
        up.wait_for("the new file is in force", lambda: ask(up, ann, 3).status_code == 200)
        up.wait_idle()
    today = usage(db, "acme/ann")
    assert today["open"] == 0 and today["outcomes"] == {"finished": today["requests"]}
    assert today["charged_tokens"] == today["prompt_tokens"] + today["output_tokens"]
    assert today["prompt_tokens"] + today["cached_tokens"] == len(PROMPT) * today["requests"]
    assert today["cached_tokens"] > 0, "the same prompt again is not computed again"
    streamed = usage(db, "acme/bob")
    # If it ended while no coordinator was there, its row is open at the estimate until it is written off.
    expected = len(PROMPT) + TOKENS if streamed["outcomes"] == {"finished": 1} else len(PROMPT) + 128
    assert (streamed["requests"], streamed["charged_tokens"]) == (1, expected)
