"""Profiles fitted to what requests to a server took; the server here is the simulator, whose times are known."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from lab.advise import Slo
from lab.commands.profiles.from_vllm import ServerFailed, _first_model, kv_tokens_of, read_timings, run, samples_of
from lab.commands.profiles.settings import FromVllmSettings
from lab.estimates.from_timings import MeasuredServer, RequestTiming, TimingsError, fitted, profile_of, simulated
from lab.goals import Goals
from lab.play.request import Sent
from lab.profile import ProfileCapacity, merged
from launcher.load import records as load_records
from launcher.load.records import RequestRecord, RunFile
from runtime.settings.options import SettingsError
from tests.lab.profiles import GPU

SERVER = MeasuredServer(ProfileCapacity(8000, 16, 64, 8192), step_tokens=1024, bytes_per_token=131072.0)
TRUE = (6.0, 0.05, 4e-6, 9.0, 0.15, 5e-5)  # as `profile_of` takes them


def traffic(rate: float, seconds: float, seed: int) -> list[Sent]:
    rng = np.random.default_rng(seed)
    at_s, found = 0.0, []
    while (at_s := at_s + rng.exponential(1 / rate)) < seconds:
        found.append(Sent(at_s, int(rng.lognormal(6.0, 0.8)) + 1, int(rng.lognormal(4.0, 0.6)) + 2))
    return found


def taken(sent: Sequence[Sent], noise: float = 0.0) -> list[RequestTiming]:
    outcome = simulated(profile_of(TRUE, SERVER, {}), SERVER, sent)
    rng = np.random.default_rng(9)
    found = []
    for one, ttft_ms, tpot_ms in zip(sent, outcome.ttft_ms.tolist(), outcome.tpot_ms.tolist(), strict=True):
        ttft_ms, tpot_ms = (value * float(np.exp(rng.normal(0, noise))) for value in (ttft_ms, tpot_ms))
        end_s = one.at_s + (ttft_ms + tpot_ms * (one.output_tokens - 1)) / 1000
        found.append(RequestTiming(one.at_s, one.prompt_tokens, one.output_tokens, ttft_ms, end_s))
    return found


@pytest.mark.long
@pytest.mark.parametrize("noise", [0.1, 0.0])
def test_fit_predicts_unseen_loads(noise: float) -> None:
    """A profile fitted to timings predicts the attainment at loads that it has not seen."""
    seen = traffic(4, 60, 1) + [one._replace(at_s=one.at_s + 60) for one in traffic(9, 60, 2)]
    profile, misfit = fitted(taken(seen, noise), SERVER, {"model": "m"})
    assert profile.origin == "from a server"
    assert max(map(abs, misfit)) < 0.2
    slo, true = Slo(400.0, 20.0), profile_of(TRUE, SERVER, {})
    for rate in (3, 6, 9):
        unseen = traffic(rate, 120, 10 + rate)
        mine, theirs = (simulated(one, SERVER, unseen).attainment(Goals(slo)) for one in (profile, true))
        assert abs(mine - theirs) < 0.08, rate


def test_too_few_timings_are_refused() -> None:
    """Fewer than 60 requests, or answers of one token only, are refused."""
    timings = taken(traffic(4, 60, 1))
    with pytest.raises(TimingsError, match="59 requests are too few"):
        fitted(timings[:59], SERVER, {})
    with pytest.raises(TimingsError, match="no answer has more than one token"):
        fitted([one._replace(output_tokens=1) for one in timings], SERVER, {})


METRICS = b"""# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="2048"} 1.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 4.0
"""


def test_server_metrics_are_parsed() -> None:
    """KV room is read from a server's metrics, and unreadable metrics are named."""
    samples = samples_of(METRICS)
    assert kv_tokens_of(samples) == 32768
    assert kv_tokens_of({}) == 0
    with pytest.raises(ServerFailed, match="cannot be read"):
        samples_of(b"\xff\xfe{")


def test_timings_come_from_csv_or_run(tmp_path: Path) -> None:
    """Timings are read from a CSV file or from the file of a run, without failed requests."""
    file = tmp_path / "t.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens,ttft_ms,end_s\n1.5,100,20,80,2.5\n")
    assert read_timings(str(file)) == [RequestTiming(1.5, 100, 20, 80.0, 2.5)]
    done = RequestRecord(0, "default", 0.0, 100, 20, sent_s=1.5, first_s=1.58, ended_s=2.5, tokens=20, outcome="ok")
    failed = RequestRecord(1, "default", 0.0, 100, 20, sent_s=1.5, outcome="http_500")
    run = tmp_path / "run.json"
    run.write_text(load_records.encoded(RunFile(1, {}, {}, {}, {}, [done, failed])))
    [timing] = read_timings(str(run))
    assert timing.ttft_ms == pytest.approx(80.0)
    assert timing[1:3] == (100, 20)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("arrival_s,prompt_tokens\n1,2\n", "no column output_tokens"),
        ("arrival_s,prompt_tokens,output_tokens,ttft_ms,end_s\n1,2,3,80\n", "line 2"),
        ("arrival_s,prompt_tokens,output_tokens,ttft_ms,end_s\n1,2,3,80,1.01\n", "line 2"),
        ("arrival_s,prompt_tokens,output_tokens,ttft_ms,end_s\n1,2,0,80,3\n", "line 2"),
        ("arrival_s,prompt_tokens,output_tokens,ttft_ms,end_s\n1,nan,3,80,3\n", "line 2"),
        ("arrival_s,prompt_tokens,output_tokens,ttft_ms,end_s\n1,inf,3,80,3\n", "line 2"),
    ],
)
def test_bad_timings_are_named(tmp_path: Path, text: str, why: str) -> None:
    """A bad file of timings is refused with what is wrong in it."""
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(SettingsError, match=why):
        read_timings(str(tmp_path / "t.csv"))
    (tmp_path / "t.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(SettingsError, match="not what crossdock bench serve --json prints"):
        read_timings(str(tmp_path / "t.json"))


def test_unreadable_model_list_is_refused() -> None:
    """A list of models that cannot be read is refused, and an empty one names no model."""
    known = _first_model(b'{"data": [{"id": "m", "max_model_len": 8192, "object": "model"}]}')
    assert (known.id, known.max_model_len) == ("m", 8192)
    assert _first_model(b'{"data": []}').id == ""
    for answer in (
        b"{",
        b'{"data": null}',
        b'{"data": [{"max_model_len": -1}]}',
        b'{"data": [{"max_model_len": "long"}]}',
    ):
        with pytest.raises(ServerFailed, match="cannot be read"):
            _first_model(answer)


def test_empty_timings_file_is_refused(tmp_path: Path) -> None:
    """A file of timings without requests is refused, and no profile is written."""
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens,ttft_ms,end_s\n")
    settings = FromVllmSettings(timings=str(tmp_path / "t.csv"), kv_tokens=4096, out=str(tmp_path / "p.json"))
    with pytest.raises(SettingsError, match="--timings: 0 requests are too few"):
        run(settings)
    assert not (tmp_path / "p.json").exists()


def test_merged_profile_keeps_both_origins() -> None:
    """A profile merged from two kinds of hardware keeps the origin of each."""
    fitted_one = profile_of(TRUE, SERVER, {"model": "m"})
    both = merged(fitted_one, GPU)
    assert (both.about["prefill"]["origin"], both.about["decode"]["origin"]) == ("from a server", "calibrated")
    assert both.origin == merged(GPU, fitted_one).origin == "from a server"
