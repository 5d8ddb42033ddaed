"""Mixed workers from the options to the processes: how the pool is split, how they are written, where they sit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.engine import Engine, ModelInfo
from engine.kv.split import prefill_blocks
from kvtransfer.transports.registry import WrongTransport
from lab.advise import Workers
from lab.commands import check as tune_check
from lab.commands import tune
from lab.commands.settings import TuneCheckSettings
from lab.search import Candidate
from launcher.cluster import units
from launcher.cluster.file import ClusterError, incomplete, parse
from launcher.cluster.plan import check, plan_host
from launcher.cluster.units import Installed
from launcher.load.tenants import Ratio
from launcher.local.core_plan import PREFILL_NICE, plan_cpu
from proto.messages import Role
from runtime.settings.command_line import parse as parse_options
from runtime.settings.options import SettingsError
from runtime.settings.options import load as load_settings
from runtime.settings.serve import ServeSettings
from runtime.settings.workers import WorkerSettings
from tests.lab.profiles import GPU
from tests.launcher.built import build
from worker.process import MixedPoolTooSmall, engine_shares, split

FILE = """
insecure = true
[hosts.a]
address = "10.0.0.1"
coordinator = true
gateways = 1
workers = "{workers}"
gpus = {gpus}
[mixed]
max_seqs = 7
"""


def engine(blocks: int, context_tokens: int) -> Engine:
    info = ModelInfo(
        model_path="m", model_type="llama", context_tokens=context_tokens, vocab_size=8, layers=1, kv_heads=1, head_dim=4,
        dtype="float32", block_size=16, block_bytes=1 << 20, eos_token_ids=(), attention_tokens=0, fingerprint="f",
    )  # fmt: skip
    return Engine(SimpleNamespace(), info, torch.zeros(blocks, 1))  # type: ignore[arg-type]


def test_prefill_share_of_mixed_pool() -> None:
    """A mixed worker's prefill half gets a quarter of the blocks, at least a context, at most half."""
    assert prefill_blocks(1000, 100) == 250
    assert prefill_blocks(300, 100) == 100
    assert prefill_blocks(150, 100) == 75
    assert prefill_blocks(1, 100) == 1
    parts = split(engine(1000, 1600), WorkerSettings(role="mixed", model="m"))
    assert [(role, part.blocks) for role, part in parts.items()] == [(Role.PREFILL, 250), (Role.DECODE, 750)]
    parts[Role.PREFILL].tokens_forwarded += 5
    assert parts[Role.DECODE].tokens_forwarded == 0, "each counts its own"


def test_small_mixed_pool_names_the_option() -> None:
    """A pool without room for a context in each half is refused with --kv-gib."""
    assert split(engine(200, 1600), WorkerSettings(role="mixed", model="m"))
    with pytest.raises(
        MixedPoolTooSmall, match=r"two contexts of 1600 tokens.* 0\.195 GiB .* there are 0\.194"
    ) as refused:
        split(engine(199, 1600), WorkerSettings(role="mixed", model="m"))
    assert refused.value.option == "--kv-gib"


def test_mixed_name_and_address_are_checked() -> None:
    """A mixed worker needs a name short enough for both halves and an address that others reach."""
    assert WorkerSettings(role="mixed", model="m", name="n" * 56)
    for given, why in (
        ({"name": "n" * 57}, "--name: at most 56"),
        ({"kv_bind": "tcp://0.0.0.0:1"}, "--advertise: needed"),
    ):
        with pytest.raises(SettingsError, match=why):
            load_settings(WorkerSettings, {"role": "mixed", "model": "m"} | given)


def test_unfit_mixed_worker_names_the_option() -> None:
    """A worker that cannot be mixed is refused with the option that is the cause."""
    settings = WorkerSettings(role="decode", model="m", kv_transport="nccl")
    with pytest.raises(WrongTransport, match="nccl does not work within one process") as refused:
        engine_shares(engine(1000, 1600), Role.MIXED, settings, ("nccl",))
    assert refused.value.option == "--kv-transport"
    whole = engine(199, 1600)
    assert engine_shares(whole, Role.PREFILL, settings, ("nccl",)) == {Role.PREFILL: whole}
    with pytest.raises(MixedPoolTooSmall):
        engine_shares(whole, Role.MIXED, settings, ("shm",))


@pytest.mark.parametrize(
    ("text", "ratio"), [("2P1D", Ratio(2, 1)), ("3m", Ratio(0, 0, 3)), ("1P2D+4M", Ratio(1, 2, 4))]
)
def test_mixed_ratios_parse_and_print(text: str, ratio: Ratio) -> None:
    """Ratios with mixed workers are parsed and printed in the form that tune reports."""
    assert Ratio.parse(text) == ratio
    assert str(ratio) == str(Workers(ratio.prefill, ratio.decode, ratio.mixed)) == text.upper()
    assert ratio.total == sum((ratio.prefill, ratio.decode, ratio.mixed))


@pytest.mark.parametrize("text", ["", "+", "0M", "1P1D+", "+2M", "1P1D2M", "2M+1P1D", "65M", "1P", "2D"])
def test_malformed_ratio_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a ratio like 2P1D, 3M or"):
        Ratio.parse(text)


def test_serve_counts_follow_the_options() -> None:
    """Given counts replace the default 1P1D, and a cluster without a prefill or decode side is refused."""

    def counts(**given: Any) -> tuple[int, int, int]:
        found = ServeSettings(**given)
        return found.prefill, found.decode, found.mixed

    assert counts() == (1, 1, 0) and counts(mixed=2) == (0, 0, 2) and counts(mixed=2, decode=1) == (0, 1, 2)
    assert load_settings(ServeSettings, {"mixed": "3"}).prefill == 0
    for option in ("prefill", "decode"):
        with pytest.raises(SettingsError, match=f"--{option}: 0, and no --mixed"):
            load_settings(ServeSettings, {option: "0"})


def test_mixed_worker_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mixed worker is one process with options that parse, and a core of its own."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1})
    built = build(ServeSettings(mixed=2, port=0))
    workers = [spec for spec in built.processes if spec.name.startswith("mixed-")]
    assert [spec.name for spec in workers] == ["mixed-0", "mixed-1"] and len(built.processes) == 4
    for spec, core in zip(workers, "01", strict=True):
        at = spec.arguments.index("-m")
        assert spec.arguments[at + 1] == "worker"
        settings = parse_options(WorkerSettings, [*spec.arguments[at + 2 :], "--role", "mixed"])
        assert settings.role == "mixed" and Role(settings.role).registers_as == (Role.PREFILL, Role.DECODE)
        assert (settings.cpu_cores, settings.nice) == (core, PREFILL_NICE)


def test_mixed_workers_share_the_cores() -> None:
    """Cores are shared out among mixed workers, and a note says when they are too few."""
    plan = plan_cpu(tuple(range(5)), prefill=0, decode=0, mixed=2, on_gpu=False)
    assert [seat.cores for seat in plan.mixed] == [(0, 1), (2, 3)] and plan.control == (0, 1, 2, 3, 4)
    crowded = plan_cpu((0, 1), prefill=0, decode=0, mixed=3, on_gpu=False, threads=2)
    assert "3 mixed workers share 2" in crowded.note and "--threads 2" in crowded.note
    beside = plan_cpu(tuple(range(8)), prefill=1, decode=2, mixed=1, on_gpu=False)
    assert (len(beside.prefill), len(beside.decode), len(beside.mixed)) == (1, 2, 1)
    taken = [core for seat in (*beside.decode, *beside.mixed) for core in seat.cores]
    assert len(set(taken)) == len(taken) and not set(taken) & set(beside.control)


def test_cluster_file_places_mixed_last() -> None:
    """A cluster file places mixed workers last, with GPUs and ports of their own."""
    file = parse(FILE.format(workers="1P1D+2M", gpus="[0, 1, 2, 3]"), Path("/"))
    assert not incomplete(file) and check(file)
    found = {process.name: process for process in plan_host(file, "a", "m").processes}
    mixed = [found["a.mixed-0"], found["a.mixed-1"]]
    assert [process.environment["CUDA_VISIBLE_DEVICES"] for process in mixed] == ["2", "3"]
    ports = [process.settings.kv_bind.rpartition(":")[2] for process in (found["a.decode-0"], *mixed)]  # type: ignore[attr-defined]
    assert len(set(ports)) == 3
    assert {process.module for process in mixed} == {"worker"}
    assert [process.settings.max_seqs for process in (found["a.decode-0"], *mixed)] == [64, 7, 7]  # type: ignore[attr-defined]
    alone = parse(FILE.format(workers="1M", gpus="[0]"), Path("/"))
    assert not incomplete(alone)
    with pytest.raises(ClusterError, match="gpus: 1 for 2 workers"):
        parse(FILE.format(workers="2M", gpus="[0]"), Path("/"))


def test_mixed_unit_has_both_roles_keys() -> None:
    """A mixed worker's unit gets the keys of prefill and decode and no other secret keys."""
    names = ("coordinator", "gateway", "prefill", "decode", "client")
    keys = tuple(name + end for name in names for end in (".key", ".key_secret"))
    plan = plan_host(parse(FILE.format(workers="1M", gpus="[0]"), Path("/")), "a", "/m")
    files = units.render(plan, Installed("/bin/python", (), "/opt", "/etc/crossdock/keys", keys))
    text = files[f"{units.UNITS}/crossdock-mixed@.service"]
    assert "-m worker" in text
    for role in names:
        assert (f"LoadCredential={role}.key_secret" in text) is (role in ("prefill", "decode"))
    assert all(units.is_ours(path) for path in files if "mixed" in path)


@pytest.mark.parametrize(
    ("workers", "command", "lines"),
    [
        (Workers(0, 0, 2), "crossdock serve --mixed 2", ['workers = "2M"', "[mixed]"]),
        (
            Workers(1, 2, 1),
            "crossdock serve --prefill 1 --decode 2 --mixed 1",
            ['workers = "1P2D+1M"', "[decode]", "[mixed]"],
        ),
    ],
)
def test_tune_prints_what_applies_it(workers: Workers, command: str, lines: list[str]) -> None:
    """Tune prints a command and cluster file lines that give the recommended workers."""
    candidate = Candidate(workers, GPU.step_tokens, 32)
    found = tune.apply_lines(SimpleNamespace(candidate=candidate), GPU)  # type: ignore[arg-type]
    assert found["command"] == command and set(lines) <= set(found["cluster_toml"])
    given = dict(zip(*[iter(command.split()[2:])] * 2, strict=True))
    settings = load_settings(ServeSettings, {name.removeprefix("--"): count for name, count in given.items()})
    assert Workers(settings.prefill, settings.decode, settings.mixed) == workers
    written = next(line for line in found["cluster_toml"] if line.startswith("workers")).split('"')[1]
    count = workers.total
    assert parse(FILE.format(workers=written, gpus=list(range(count))), Path("/")).hosts["a"].workers.total == count


def test_tune_check_runs_mixed_candidates() -> None:
    report = {"ranked": [{"workers": name} for name in ("2M", "1P1D", "2M", "1P2D+1M", "3M")]}
    ratios = tune_check._ratios(TuneCheckSettings(recommendation="best.json"), report)
    assert [str(ratio) for ratio in ratios] == ["2M", "1P1D", "1P2D+1M"]
