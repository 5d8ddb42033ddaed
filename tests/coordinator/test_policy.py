"""Versions of the policy: what is in force, what is on trial and for whom, through files that change and restarts."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.events import Configured
from coordinator.policy_keeper import ASKED_MAX, PolicyFile, PolicyKeeper, PolicyStoreError
from coordinator.policy_versions import PolicyError, PolicyInForce, Trial, Versions, merged, tenants_of
from proto.limits import MAX_POLICY_VERSIONS
from proto.messages import Finished, Submit
from proto.policy import ArmStatus, PolicyAction, PolicyAnswer, PolicyRequest, RolloutAnswer
from runtime.tenancy.file import TenantsFile
from runtime.tenancy.tenants import Tenants, parse, tables_of
from tests.coordinator.test_draining import decoding
from tests.coordinator.world import Harness, submit

FILE = "[tenants.acme]\nweight = 2.0\n[tenants.acme.users.ann]\n[tenants.lab]\n"
OTHER = FILE.replace("2.0", "4.0")
OPTIONS: dict[str, Any] = {"step_ms": 250.0}


def of(name: str, tenant: str) -> Submit:
    return msgspec.structs.replace(submit(name), tenant=tenant)


def versions(*texts: str) -> Versions:
    made = Versions()
    for at, text in enumerate(texts):
        made.load(tables_of(text), OPTIONS, float(at))
    return made


def test_policy_versions_keep_their_numbers() -> None:
    """A changed policy or option gets the next number, and a known policy keeps its own."""
    made = versions(FILE, OTHER, FILE)
    assert [one.number for one in made.kept] == [1, 2] and made.active == 1 and made.before == [1, 2]
    made.load(tables_of(FILE), {"step_ms": 100.0}, 9.0)
    assert made.active == 3 and made.get(3).source == "version 1 with other options"


def test_secrets_are_not_in_versions() -> None:
    """Keys and cache groups of the tenants file are not part of a version."""
    with_key = FILE + f'keys = ["{"0" * 64}"]\ncache_group = "g"\n'
    made = versions(FILE, with_key)
    assert made.active == 1 and len(made.kept) == 1
    assert versions("[tenants.acme.users.keys]\nweight = 3.0\n").get(1).tables["tenants"]["acme"]["users"] == {
        "keys": {"weight": 3.0}
    }


def test_promoted_version_stays_until_new_file() -> None:
    """A promoted version stays in force when the same file is loaded again, until the file changes."""
    made = versions(FILE)
    made.promote(tables_of(OTHER), OPTIONS, 1.0)
    made.load(tables_of(FILE), OPTIONS, 2.0)
    assert made.active == 2, "as after a restart"
    made.load(tables_of(FILE + "[tenants.new]\n"), OPTIONS, 3.0)
    assert made.active == 3


def test_trial_is_promoted_or_ended() -> None:
    """A version on trial becomes the policy or ends, and impossible requests are refused."""
    made = versions(FILE)
    made.try_(tables_of(OTHER), OPTIONS, Trial(0, 0.5), 1.0)
    assert made.active == 1 and made.trial == Trial(2, 0.5)
    made.end_trial()
    with pytest.raises(PolicyError, match="no version is on trial; name a FILE"):
        made.promote(None, OPTIONS, 2.0)
    made.try_(tables_of(OTHER), OPTIONS, Trial(0, 0.5), 3.0)
    made.promote(None, OPTIONS, 4.0)
    assert made.active == 2 and made.trial is None
    made.roll_back(0, OPTIONS, 5.0)
    assert made.active == 1
    for number, why in ((1, "in force already"), (7, "no version 7")):
        with pytest.raises(PolicyError, match=why):
            made.roll_back(number, OPTIONS, 6.0)
    with pytest.raises(PolicyError, match="version 1, which is in force"):
        made.try_(tables_of(FILE), OPTIONS, Trial(0, 0.5), 7.0)


def test_rollback_with_new_options_adds_version() -> None:
    """A rollback to a version made with other options creates a version of its own."""
    made = versions(FILE)
    made.load(tables_of(OTHER), {"step_ms": 100.0}, 1.0)
    made.roll_back(1, {"step_ms": 100.0}, 2.0)
    assert made.active == 3 and made.get(3).source == "back to 1"
    assert made.get(3).tables == made.get(1).tables and made.get(3).options == {"step_ms": 100.0}


def test_oldest_versions_are_dropped_first() -> None:
    """The oldest versions are dropped first, but never those in force or on trial."""
    made = versions(FILE)
    made.try_(tables_of(OTHER), OPTIONS, Trial(0, 0.5), 0.0)
    for number in range(2 * MAX_POLICY_VERSIONS):
        trial = made.trial
        made.promote(tables_of(FILE.replace("2.0", f"{10 + number}.0")), OPTIONS, 1.0)
        made.trial = trial
    numbers = [one.number for one in made.kept]
    assert len(numbers) == MAX_POLICY_VERSIONS and {2, made.active} <= set(numbers) and 1 not in numbers
    assert set(made.before) <= set(numbers)


# --- trials -------------------------------------------------------------------------------------------------------------------


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.text(min_size=1, max_size=20))
def test_larger_share_includes_smaller_share(one: float, other: float, name: str) -> None:
    """A trial with a larger share has all organisations of one with a smaller share."""
    if Trial(1, min(one, other)).has(name):
        assert Trial(2, max(one, other)).has(name)


def test_trial_share_matches_its_fraction() -> None:
    """A trial has about its share of the organisations."""
    names = [f"org-{number}" for number in range(10_000)]
    for share in (0.0, 0.1, 0.5, 1.0):
        assert sum(map(Trial(1, share).has, names)) == pytest.approx(share * 10_000, abs=150)


def test_trial_changes_only_its_organisations() -> None:
    """A trial changes its organisations with all their users, and no others."""
    active = parse(FILE + "limits = { concurrency = 8 }\n")
    candidate = parse(OTHER + "limits = { concurrency = 2 }\n[tenants.new]\n")
    found = merged(active, candidate, Trial(2, 0.0, ("acme",)))
    assert found.policies["acme/ann"].organisation_weight == 4.0
    assert found.policies["lab"] == active.policies["lab"] and "new" not in found.policies
    assert found.weights()["standard/acme"] == 4.0
    with pytest.raises(PolicyError, match="a trial cannot change priority_classes"):
        merged(active, parse("[priority_classes.gold]\nweight = 1.0\n"), Trial(2, 0.5))


def test_requests_count_under_their_version() -> None:
    """Requests are counted under the version in force when they came, and only during a trial."""
    h = Harness.make()
    made = versions(FILE)
    h.post(Configured(tenants_of(made), 0.0, None, made.in_force))
    decoding(h, of("before", "acme"))
    made.try_(tables_of(OTHER), OPTIONS, Trial(0, 0.0, ("acme",)), 1.0)
    h.now = 1.0
    h.post(Configured(tenants_of(made), 0.0, None, made.in_force))
    for name, tenant in (("a", "acme"), ("b", "acme/ann"), ("c", "lab")):
        decoding(h, of(name, tenant))
    for name in ("before", "a", "b", "c"):
        h.receive(h.core.cluster.requests[name].decode_incarnation, Finished(name, 1, 4, 0))
    arms = h.core.accounts.goodput.by_arm
    assert (arms["candidate"].offered, arms["candidate"].finished) == (2, 2)
    assert (arms["active"].offered, arms["active"].finished) == (1, 1), "what came before the trial is not counted"


# --- the keeper ---------------------------------------------------------------------------------------------------------------


class Kept:
    """A keeper with its file, as a coordinator has it; `put` is what the core was told."""

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        self.folder, self.durable = folder, durable
        self.put: list[tuple[Tenants, PolicyInForce]] = []
        if not (folder / "t.toml").exists():
            (folder / "t.toml").write_text(FILE)

    async def start(self) -> "PolicyKeeper":
        self.file = TenantsFile(self.folder / "t.toml")
        store = PolicyFile(self.folder / "policies.json") if self.durable else None
        keeper = PolicyKeeper(store, self.file, OPTIONS, lambda *told: self.put.append(told))
        self.put.append(await keeper.start())
        return keeper


async def ask(keeper: PolicyKeeper, *requests: PolicyRequest) -> list[PolicyAnswer]:
    answers: list[PolicyAnswer] = []
    serving = asyncio.create_task(keeper.serve(lambda: (ArmStatus("active", 3, 2, 1),)))
    try:
        async with asyncio.timeout(10):
            for request in requests:
                done = asyncio.Event()
                keeper.on_request(request, lambda answer, done=done: (answers.append(answer), done.set()))  # type: ignore[misc]
                await done.wait()
    finally:
        serving.cancel()
    return answers


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(body())  # type: ignore[arg-type]


def content(text: str) -> str:
    return msgspec.json.encode(tables_of(text)).decode()


def test_policies_survive_restart(tmp_path: Path) -> None:
    """Versions promoted or on trial are in force again after a restart."""

    async def body() -> None:
        kept = Kept(tmp_path)
        keeper = await kept.start()
        tried = PolicyRequest(PolicyAction.TRY, content=content(OTHER), organisations=("acme",))
        [answer] = await ask(keeper, tried)
        assert (answer.refusal, answer.active, answer.trial, answer.durable) == ("", 1, 2, True)
        assert kept.put[-1][0].policies["acme"].organisation_weight == 4.0
        again = Kept(tmp_path)
        keeper = await again.start()
        assert again.put[-1] == kept.put[-1]
        await ask(keeper, PolicyRequest(PolicyAction.PROMOTE))
        last = Kept(tmp_path)
        await last.start()
        assert last.put[-1][1].number == 2 and last.put[-1][1].trial is None
        assert (tmp_path / "policies.json").stat().st_mode & 0o077 == 0

    run(body)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (PolicyRequest(PolicyAction.TRY, content="{", share=0.5), "not tables in JSON"),
        (PolicyRequest(PolicyAction.TRY, content='{"a": 1}', share=0.5), "a"),
        (PolicyRequest(PolicyAction.TRY, content=content(OTHER)), "a trial needs a share or organisations"),
        (PolicyRequest(PolicyAction.PROMOTE, content=content(OTHER.replace("4.0", "-1.0"))), "weight"),
        (PolicyRequest(PolicyAction.PROMOTE, content="[" * 100_000), "not tables in JSON"),
        (PolicyRequest(PolicyAction.PROMOTE), "no version is on trial"),
        (PolicyRequest(PolicyAction.ROLLBACK), "no version was in force before"),
        (PolicyRequest(PolicyAction.LIST, 9), "there is no version 9"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_impossible_request_changes_nothing(tmp_path: Path, request_: PolicyRequest, why: str) -> None:
    """A policy request that cannot be done is refused, and nothing is changed or stored."""

    async def body() -> None:
        kept = Kept(tmp_path)
        keeper = await kept.start()
        before = (tmp_path / "policies.json").read_bytes()
        refused, listed = await ask(keeper, request_, PolicyRequest(PolicyAction.LIST))
        assert why in refused.refusal and listed.active == 1 and len(listed.versions) == 1
        assert len(kept.put) == 1 and (tmp_path / "policies.json").read_bytes() == before

    run(body)


@pytest.mark.parametrize("text", ["{}", content("[tenants.stranger]\n")])
def test_policy_without_tenants_is_refused(tmp_path: Path, text: str) -> None:
    """No request makes every tenant unknown, whether it promotes, promotes what is on trial, or rolls back."""

    async def body() -> None:
        (tmp_path / "t.toml").write_text("")
        await Kept(tmp_path).start()
        (tmp_path / "t.toml").write_text(FILE)
        kept = Kept(tmp_path)
        keeper = await kept.start()
        share = PolicyRequest(PolicyAction.TRY, content=text, share=1.0)
        end = PolicyRequest(PolicyAction.PROMOTE)
        answers = await ask(keeper, PolicyRequest(PolicyAction.PROMOTE, content=text), share, end)
        back, listed = await ask(keeper, PolicyRequest(PolicyAction.ROLLBACK), PolicyRequest(PolicyAction.LIST))
        for answer in (answers[0], answers[2], back):
            assert "tenants that are in force" in answer.refusal or "no version is on trial" in answer.refusal
        assert listed.active == 2 and "acme" in kept.put[-1][0].policies

    run(body)


def test_unchanged_policies_are_not_written(tmp_path: Path) -> None:
    """A start with the same file and options needs no room on the disk."""

    async def body() -> None:
        await Kept(tmp_path).start()
        (tmp_path / "policies.json.new").mkdir()
        assert (await Kept(tmp_path).start()) is not None

    run(body)


def test_unstored_policy_is_not_in_force(tmp_path: Path) -> None:
    """A policy that cannot be stored is refused, and a damaged store stops the start."""

    async def body() -> None:
        kept = Kept(tmp_path)
        keeper = await kept.start()
        (tmp_path / "policies.json.new").mkdir()
        [answer] = await ask(keeper, PolicyRequest(PolicyAction.PROMOTE, content=content(OTHER)))
        assert "policies.json" in answer.refusal and len(kept.put) == 1
        (tmp_path / "policies.json").write_text("{")
        with pytest.raises(PolicyStoreError, match=r"policies\.json"):
            await Kept(tmp_path).start()

    run(body)


def test_changed_file_is_next_version(tmp_path: Path) -> None:
    """A changed tenants file becomes the next version and is put in force."""

    async def body() -> None:
        kept = Kept(tmp_path, durable=False)
        keeper = await kept.start()
        (tmp_path / "t.toml").write_text(OTHER)
        kept.file._look(True)
        keeper.file_changed(kept.file.tenants)
        [answer] = await ask(keeper, PolicyRequest(PolicyAction.LIST, 2))
        assert answer.active == 2 and answer.content == content(OTHER) and not answer.durable
        assert kept.put[-1][0].policies["acme"].organisation_weight == 4.0

    run(body)


def test_waiting_policy_requests_are_bounded(tmp_path: Path) -> None:
    """Policy requests over the bound are refused at once with a word to try again."""

    async def body() -> None:
        keeper = await Kept(tmp_path).start()
        answers: list[PolicyAnswer | RolloutAnswer] = []
        for _ in range(ASKED_MAX + 2):
            keeper.on_request(PolicyRequest(PolicyAction.LIST), answers.append)
        assert len(answers) == 2 and all("try again" in answer.refusal for answer in answers)

    run(body)
