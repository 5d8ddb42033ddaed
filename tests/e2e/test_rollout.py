"""A rollout on real processes, under load and kills: no pair and no answer has two revisions, and no answer is lost."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import pytest
import uvloop

from launcher.admin.status import converse
from proto.policy import RevisionStatus, RolloutAction, RolloutAnswer, RolloutRequest
from tests import tiny_models
from tests.e2e.parts import ROOT, Parts, parts

PROMPTS = [[*range(20, 60), 60 + number] for number in range(4)]
TOKENS = 120
REVISIONS = ("v1", "v2")


class SideBySide(Parts):
    """A pair of workers for each revision. Each has weights of its own, so that an answer tells where its tokens are from."""

    folders: dict[str, Path]
    expected: dict[str, list[list[int]]]

    def begin(self, folders: dict[str, Path], folder: Path) -> None:
        self.folders, self.model_id = folders, "rolled"
        self.model = folders["v1"]
        self.usage_db = str(folder / "usage.sqlite")
        self.start_again("coordinator")
        self.start("gateway", "--model-id", self.model_id)
        self.workers = [f"{role}_worker-{revision}" for revision in REVISIONS for role in ("prefill", "decode")]
        for name in self.workers:
            self.start_again(name)
        self.wait_registered(4)

    def start_again(self, name: str) -> None:
        role, _, revision = name.partition("-")
        if revision:
            self.model = self.folders[revision]
            self.start(role, "--model-id", self.model_id, "--revision", revision, name=name)
        else:
            self.start(role, "--step-tokens", "64", "--usage-db", self.usage_db, name=name)

    def rollout(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "launcher.cli", "rollout", *arguments, "--coordinator", self.coordinator]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def revision(self, name: str) -> RevisionStatus:
        question = RolloutRequest(RolloutAction.STATUS)
        answer = uvloop.run(converse(self.coordinator, question, RolloutAnswer, 5_000))
        return next(one for one in answer.revisions if one.revision == name)

    def answered_by(self, number: int) -> str:
        """The revision of a new answer; it has the tokens of one and no others."""
        found = self.token_ids(PROMPTS[number], TOKENS, ignore_eos=True)
        return next(name for name in REVISIONS if self.expected[name][number] == found)

    def check_pairs(self) -> None:
        pairs = self.status().kv_pairs
        assert pairs and all(pair.prefill.partition("-")[2] == pair.decode.partition("-")[2] for pair in pairs), pairs


class Load:
    """Clients that send one request after another."""

    def __init__(self, up: SideBySide) -> None:
        self._up, self._enough = up, threading.Event()
        self.answers: list[str] = []
        self._pool = ThreadPoolExecutor(len(PROMPTS))
        self._running = [self._pool.submit(self._run, number) for number in range(len(PROMPTS))]

    def _run(self, number: int) -> None:
        while not self._enough.is_set():
            self.answers.append(self._up.answered_by(number))

    def more(self, count: int = 6) -> list[str]:
        """The next answers."""
        before = len(self.answers)
        self._up.wait_for("answers come", lambda: len(self.answers) >= before + count or self._failed())
        self._check()
        return self.answers[before:]

    def _failed(self) -> bool:
        return any(one.done() for one in self._running)

    def _check(self) -> None:
        for one in self._running:
            if one.done():
                one.result()

    def stop(self) -> None:
        self._enough.set()
        for one in self._running:
            one.result(120)


@contextmanager
def side_by_side(tmp_path: Path) -> Iterator[SideBySide]:
    folders = {name: tiny_models.make("llama", tmp_path / name, seed=seed) for seed, name in enumerate(REVISIONS)}
    with parts(folders["v1"], kind=SideBySide) as up:
        up.begin(folders, tmp_path)
        up.rollout("start", "v2", "--share", "1.0")
        new = [up.token_ids(prompt, TOKENS, ignore_eos=True) for prompt in PROMPTS]
        up.rollout("abort")
        old = [up.token_ids(prompt, TOKENS, ignore_eos=True) for prompt in PROMPTS]
        up.expected = {"v1": old, "v2": new}
        assert all(one != other for one, other in zip(old, new, strict=True))
        yield up


def kill_under_load(up: SideBySide, load: Load, names: Iterator[str], count: int) -> None:
    for _ in range(count):
        load.more()
        name = next(names)
        up.kill(name)
        up.start_again(name)
        up.wait_registered(4)
        up.check_pairs()


def roll_out(up: SideBySide, kills: int) -> None:
    load, names = Load(up), cycle(["coordinator", *reversed(up.workers)])
    try:
        up.rollout("start", "v2", "--share", "0.5")
        kill_under_load(up, load, names, kills // 2)
        assert {"v1", "v2"} <= set(load.more(24))
        up.rollout("abort")
        up.wait_for("the trial is over", lambda: not up.revision("v2").running)
        assert set(load.more(12)[len(PROMPTS) :]) == {"v1"}
        up.rollout("start", "v2", "--share", "0.5")
        kill_under_load(up, load, names, kills - kills // 2)
        up.rollout("promote")
        up.wait_for("nothing is left on the old revision", lambda: not up.revision("v1").running)
        assert set(load.more(12)[len(PROMPTS) :]) == {"v2"}
        for name in [name for name in up.workers if name.endswith("v1")]:
            process = up.processes.pop(name)
            process.terminate()
            assert process.wait(30) == 0
        assert set(load.more(12)) == {"v2"} and up.revision("v2").failed == 0
    finally:
        load.stop()
    up.wait_idle()


@pytest.mark.timeout(400)
def test_rollout_is_aborted_and_promoted(tmp_path: Path) -> None:
    """Under load and kills, a rollout is aborted, begun again and promoted: all answers are whole, and of one revision."""
    with side_by_side(tmp_path) as up:
        roll_out(up, 2)
        assert "v2" in up.rollout("status")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_rollout_survives_many_kills(tmp_path: Path) -> None:
    """The same with 20 kills of workers of both revisions and of the coordinator."""
    with side_by_side(tmp_path) as up:
        roll_out(up, 20)
