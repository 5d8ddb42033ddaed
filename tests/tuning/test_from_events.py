"""`crossdock calibrate --from-events`: an event log of a virtual cluster whose steps take other times than the profile says."""

import json
import random
from functools import partial
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from coordinator.events import Limits, PeerDown, PeerUp
from launcher.tuning import calibrate, event_log
from launcher.tuning.event_log import Logged, LoggedDecode, LoggedStep
from launcher.tuning.from_events import of_logs, samples_of
from launcher.tuning.settings import CalibrateSettings, TuneSettings
from launcher.tuning.traffic import traffic
from proto.messages import Chunk, Role
from proto.progress import DecodeProgress
from runtime.settings.options import SettingsError
from simulation.cluster.cluster import VirtualCluster
from tests.coordinator.logged_core import LoggedCore, as_logged
from tests.coordinator.world import Harness, worker_hello
from tests.tuning.driving import Modelled
from tests.tuning.test_autopilot import PROFILE
from tuning.profile import Profile, decoded, encoded

TRUE = PROFILE.scaled(prefill=1.5, decode=0.8)


def log_of(path: Path, seconds: float, seed: int = 1) -> Path:
    """Of a cluster whose steps take what `TRUE` says."""
    cluster = VirtualCluster(
        Limits(step_tokens=1024), Modelled(profile=TRUE), prefill=1, decode=1, decode_blocks=4096, max_seqs=64,
        batched=True, core=LoggedCore, seed=seed,
    )  # fmt: skip
    source, at, number = random.Random(seed), 0.0, 0
    while (at := at + source.expovariate(3.0)) < seconds:
        output = (source.randrange(2, 60),)
        number += 1
        cluster.at(
            at, partial(cluster.submit, output_tokens=output), f"r{number}", "t", source.randrange(10, 2_000), 100
        )
    cluster.run(seconds + 30.0)
    path.write_bytes(as_logged(cluster.core).event_log(ended=True))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("from_events")
    log_of(folder / "events.log", 60.0)
    log_of(folder / "short.log", 0.5)
    (folder / "profile.json").write_bytes(encoded(PROFILE))
    return folder


def corrected(folder: Path, *logs: str, out: str = "out.json", profile: str = "profile.json") -> Profile:
    settings = CalibrateSettings(
        from_events=[str(folder / log) for log in logs], profile=str(folder / profile), out=str(folder / out)
    )
    assert calibrate.run(settings) == 0
    return decoded((folder / out).read_bytes(), "out")


def test_event_log_corrects_a_profile(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An event log corrects the step costs of a profile and leaves transfer and host costs."""
    found = corrected(folder, "events.log", "short.log")
    for size in (1, 4, 16):
        assert found.decode.curve(size) == pytest.approx(TRUE.decode.curve(size), rel=0.03)
    for tokens in (64, 512, 1024):
        assert found.prefill.step_ms(tokens, 0.0) == pytest.approx(TRUE.prefill.step_ms(tokens, 0.0), rel=0.05)
    said = capsys.readouterr().out
    assert "Prefill steps take 1.50 times what the profile says" in said and "decode steps take 0.80 times" in said
    assert found.about["corrected"]["how"].startswith("prefill steps take 1.50 times")
    again = corrected(folder, "events.log", out="again.json", profile="out.json")
    assert again.decode.curve(4) == pytest.approx(found.decode.curve(4), rel=0.01)
    assert found.transfer == PROFILE.transfer and found.host == PROFILE.host, "of these it says nothing"


def test_too_few_steps_are_refused(folder: Path) -> None:
    """A log with too few step times is refused with the option's name, and no file is written."""
    with pytest.raises(SettingsError, match=r"--from-events: too few step times: \d+ of prefill, \d+ of decode; .* 32"):
        corrected(folder, "short.log", out="none.json")
    assert not (folder / "none.json").exists()


def test_profile_of_other_model_is_refused(folder: Path) -> None:
    """A profile of another model is refused unless --force is given."""
    (folder / "other.json").write_bytes(encoded(PROFILE.replaced(about={"model": "llama"})))
    log, other, out = str(folder / "events.log"), str(folder / "other.json"), str(folder / "forced.json")
    wanted = "of the model m, but the profile is of llama; --force uses it all the same"
    with pytest.raises(SettingsError, match=f"--from-events: {wanted}"):
        calibrate.run(CalibrateSettings(from_events=[log], profile=other, out=out))
    assert not (folder / "forced.json").exists()
    assert calibrate.run(CalibrateSettings(from_events=[log], profile=other, out=out, force=True)) == 0
    profile = decoded((folder / "other.json").read_bytes(), "other")
    with pytest.raises(SettingsError, match=f"--trace: {wanted}"):
        traffic(TuneSettings(trace=log), profile)
    assert len(traffic(TuneSettings(trace=log, force=True), profile)) > 50
    assert len(traffic(TuneSettings(trace=log), PROFILE)) > 50


def test_wrong_input_files_are_named(folder: Path) -> None:
    """A file that is no event log or no profile is named with its option."""
    with pytest.raises(SettingsError, match=r"--from-events: .*profile.json: "):
        corrected(folder, "profile.json")
    with pytest.raises(SettingsError, match=r"--profile: .*events.log"):
        corrected(folder, "events.log", profile="events.log")


def test_log_gives_pure_decode_steps(tmp_path: Path) -> None:
    """An event log gives decode step times only of workers that only decode."""
    h = Harness.make(decode=2, core=LoggedCore)
    h.post(PeerUp(30, msgspec.structs.replace(worker_hello(Role.DECODE, 30), process="mixed-0")))
    h.now = 2.0
    for incarnation in (20, 30):
        h.receive(incarnation, DecodeProgress(4, 10, 0, (), (), 4, 100.0, 12, 6_000))
    h.receive(21, DecodeProgress(4, 10, 0))
    h.post(PeerDown(21, "gone"))
    h.post(PeerUp(40, worker_hello(Role.DECODE, 40)))
    (tmp_path / "log").write_bytes(as_logged(h.core).event_log())
    logged = event_log.read(tmp_path / "log", "--from-events", Console(quiet=True))
    assert logged.decode == [LoggedDecode(2.0, 4, 100.0, 12, 6_000)]
    assert logged.models == {"m"} and max(logged.most_workers[Role.DECODE].values()) == 3
    assert max(logged.most_workers[Role.PREFILL].values()) == 1


def test_several_models_are_refused(folder: Path, tmp_path: Path) -> None:
    """A log with workers of several models is refused, and the models are named."""
    h = Harness.make(core=LoggedCore)
    h.post(PeerUp(30, msgspec.structs.replace(worker_hello(Role.DECODE, 30), model="other")))
    (tmp_path / "log").write_bytes(as_logged(h.core).event_log())
    with pytest.raises(SettingsError, match="--from-events: workers of several models: m, other"):
        corrected(folder, str(tmp_path / "log"))


def side_by_side() -> Logged:
    """One host: prompts are computed half of the time."""
    logged = Logged(hosts={"h"})
    for second in range(100):
        logged.steps.append(LoggedStep(second + 0.5, 10, (Chunk("r", 1, 0, 4096),), 500.0))
        logged.decode.append(LoggedDecode(second + 1.0, 10, 1_000.0, 10, 0))
    return logged


def test_shared_steps_are_not_slow() -> None:
    """Steps beside the other role on one host are expected to take longer."""
    profile = PROFILE.replaced(beside_decode=1.25, beside_prefill=1.5)
    found = samples_of(profile, side_by_side())
    assert {one.slow for one in found[Role.PREFILL]} == {1.25}
    assert {round(one.slow, 6) for one in found[Role.DECODE]} == {1.25}
    several = side_by_side()
    several.hosts.add("other")
    assert {one.slow for one in samples_of(profile, several)[Role.DECODE]} == {1.0}


def test_shared_cores_leave_role_unchanged() -> None:
    """The costs of a role stay as they are where its workers share cores."""
    profile, logged = PROFILE.replaced(decode_cores=1), side_by_side()
    logged.most_workers[Role.DECODE]["h"], logged.most_workers[Role.PREFILL]["h"] = 2, 2
    found = of_logs(profile, [logged], Console(quiet=True))
    assert found.decode == profile.decode and found.prefill != profile.prefill


def test_json_is_the_profile(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The --json output is the corrected profile."""
    settings = CalibrateSettings(
        from_events=[str(folder / "events.log")],
        profile=str(folder / "profile.json"),
        out=str(folder / "j.json"),
        as_json=True,
    )
    calibrate.run(settings)
    assert json.loads(capsys.readouterr().out)["about"]["corrected"]["how"]
