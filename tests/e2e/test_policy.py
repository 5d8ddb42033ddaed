"""Versions of the policy on a real cluster: tried on one organisation, promoted, kept through a kill -9, rolled back."""

import re
import signal
import subprocess
import sys
from pathlib import Path

from launcher.admin.tenants import new_key
from tests.e2e.live import Live, live
from tests.e2e.parts import ROOT
from tests.e2e.test_tenants import ask


def policy(up: Live, *arguments: str) -> str:
    command = [sys.executable, "-m", "launcher.cli", "policy", *arguments, "--coordinator", up.coordinator]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_policy_is_promoted_and_rolled_back(tiny: Path, tmp_path: Path) -> None:
    """A policy is tried, promoted, kept through a kill and rolled back."""
    keys = {name: new_key() for name in ("acme", "lab", "uni")}
    file, stricter = tmp_path / "tenants.toml", tmp_path / "stricter.toml"
    file.write_text("".join(f'[tenants.{name}]\nkeys = ["{hashed}"]\n' for name, (_, hashed) in keys.items()))
    text = re.sub(r"(keys = .*)", r"\1\nlimits = { requests_per_min = 1 }", file.read_text())
    stricter.write_text(text)

    def two_pass(up: Live, organisation: str) -> bool:
        """Whether two requests pass within a minute."""
        statuses = [ask(up, keys[organisation][0], 2).status_code for _ in range(2)]
        assert set(statuses) <= {200, 429}
        return statuses == [200, 200]

    with live(tiny, tmp_path, "--tenants", str(file), "--usage-db", str(tmp_path / "usage.sqlite")) as up:
        assert all(two_pass(up, name) for name in ("acme", "lab"))
        shown = policy(up, "diff", str(stricter))
        assert "3 differences" in shown and "tenants.acme.limits.requests_per_min" in shown
        assert "on trial for acme" in policy(up, "try", str(stricter), "--organisations", "acme")
        assert not two_pass(up, "acme") and two_pass(up, "lab")
        arms = dict(re.findall(r"(active|baseline|candidate)\W+(\d+)\W+\d+", policy(up, "compare", "--for-s", "0")))
        assert int(arms["active"]) + int(arms["baseline"]) == 2 and int(arms["candidate"]) <= 1
        versions = {frozenset(labels) for name, labels in up.scrape("coordinator") if name.endswith("policy_info")}
        assert {dict(one)["version"] for one in versions} == {"1", "2"}
        policy(up, "promote")
        up.one("coordinator").send_signal(signal.SIGKILL)
        up.wait_registered(2)
        assert (up.status().policy.number, up.status().policy.trial) == (2, 0)
        assert not two_pass(up, "uni")
        assert "in force" in policy(up, "rollback")
        assert up.status().policy.number == 1
        assert all(two_pass(up, name) for name in keys)
