"""`scripts/simulate`: one seed told, many summed up, and what is wrong with its options."""

import pytest

from tests.world.__main__ import main


def test_one_seed_gives_one_story(capsys: pytest.CaptureFixture[str]) -> None:
    """The same seed prints the same timeline twice."""
    assert main(["--seed", "7", "--timeline", "r0"]) == 0
    told = capsys.readouterr().out
    assert "client asks r0" in told and "All promises held." in told
    assert main(["--seed", "7", "--timeline", "r0"]) == 0
    assert capsys.readouterr().out == told


def test_many_seeds_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    """A run over many seeds sums up the injected faults and the violations."""
    assert main(["--seeds", "24", "--processes", "2", "--faults", "crash,pause"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "What was injected into 24 seeds" in told and "crash" in told and "partition" not in told
    assert "seeds/s" in told and "Violations: 0." in told


def test_unknown_fault_kind_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown kind of fault is refused by name."""
    with pytest.raises(SystemExit):
        main(["--faults", "meteor"])
    assert "argument --faults: unknown: meteor; there are crash," in " ".join(capsys.readouterr().err.split())


def test_failure_is_reported_with_its_seed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A violated promise ends with status 1 and names the seed that shows it again."""
    from gateway.streams.state import Submission

    monkeypatch.setattr(Submission, "backoff_s", lambda self, limits: 0.0)
    statuses = {seed: main(["--seed", str(seed)]) for seed in range(6)}
    told = capsys.readouterr().out
    assert 1 in statuses.values()
    failed = min(seed for seed, status in statuses.items() if status == 1)
    assert f"scripts/simulate --seed {failed} --timeline r" in told and "bounded retries" in told
