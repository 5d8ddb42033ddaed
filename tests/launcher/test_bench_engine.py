"""`python -m benchmarks engine`: the arithmetic of its floors, its figures, and llama-bench beside it."""

import io
import json
import shlex
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from benchmarks.engine import cases, llama_bench, machine, rounds
from benchmarks.engine.floor import MachineRates, ModelSize, Work
from benchmarks.settings import EngineBenchSettings
from launcher import tables
from launcher.http.streams import BenchFailed
from runtime.settings.options import SettingsError
from tests import tiny_models

SIZE = ModelSize(
    body_weights=100_000_000, head_weights=20_000_000, number_bytes=4, layers=30, heads=9, kv_heads=3, head_dim=64
)
COLUMNS = {"name", "tokens_per_s", "lowest", "highest", "ms", "floor_ms", "time_over_floor", "against_transformers"}


# --- floors -------------------------------------------------------------------------------------------------------------


def test_decode_reads_weights_once_and_kv() -> None:
    """A decode step is counted as one read of all weights and of every stream's KV."""
    assert SIZE.kv_bytes_per_token == 46_080  # K and V, 30 layers, 3 heads of 64 float32
    work = SIZE.decode_step(16, 200)
    assert work.read_bytes == 4 * 120_000_000 + 16 * 200 * 46_080
    assert work.flops == 2 * 120_000_000 * 16


def test_prefill_work_excludes_the_head() -> None:
    """Prefill is counted as its tokens and their attention, without the output head."""
    work = SIZE.prefill(1000)
    assert work.flops == 2 * 100_000_000 * 1000 + 30 * 2 * 9 * 64 * 1000**2
    assert work.read_bytes == 4 * 100_000_000
    assert SIZE.prefill(1400, chunks=6).read_bytes == 6 * 4 * 100_000_000
    assert SIZE.prefill(1400, chunks=6).flops == SIZE.prefill(1400).flops


def test_floor_is_reading_or_computing_time() -> None:
    """The floor is the longer of the times for reading the bytes and computing the operations."""
    rates = MachineRates(read_bytes_per_s=10e9, flops_per_s=100e9)
    assert Work(480e6, 240e6).floor_s(rates) == pytest.approx(0.048)
    assert Work(480e6, 20e9).floor_s(rates) == pytest.approx(0.2)


def test_tied_head_is_counted_once(tmp_path: Path) -> None:
    """Of the tiny llama: 64 wide, 96 in its MLP, 4 heads of queries and 2 of keys of 16, 3 layers, 320 tokens."""
    body = 3 * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96)
    for tied in (False, True):
        path = tiny_models.make("llama", tmp_path / str(tied), tie_word_embeddings=tied)
        size = cases.size_of(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
        assert (size.body_weights, size.head_weights) == (body, 64 * 320)
        assert size.kv_bytes_per_token == 2 * 3 * 2 * 16 * 4


# --- figures ------------------------------------------------------------------------------------------------------------


def _measured(name: str, seconds: list[float], floors_s: list[float], plain: bool = False) -> rounds.Measured:
    case = cases.Case(name, 4, Work(0, 0), lambda: 0.0, plain)
    return rounds.Measured(case, seconds, floors_s)


def test_row_compares_with_floor_and_transformers() -> None:
    """A row compares each time with the floor of its own round, and with transformers where it was measured."""
    ours, plain, other = rounds.rows(
        [
            _measured("decode", [0.2, 0.1, 0.4], [0.1, 0.1, 0.1]),
            _measured("decode", [0.4, 0.4, 0.5], [0.2, 0.2, 0.2], plain=True),
            _measured("prefill", [1.0, 2.0, 8.0], [1.0, 1.0, 8.0]),
        ]
    )
    assert (ours["tokens_per_s"], ours["lowest"], ours["highest"]) == pytest.approx((20, 10, 40))
    assert (ours["ms"], ours["floor_ms"], ours["time_over_floor"]) == pytest.approx((200, 100, 2))
    assert ours["against_transformers"] == pytest.approx(2) and plain["against_transformers"] is None
    assert (plain["name"], plain["time_over_floor"]) == ("decode, transformers", pytest.approx(2))
    assert other["against_transformers"] is None
    # The machine was eight times slower in the last round, and so was the floor.
    assert other["time_over_floor"] == pytest.approx(1)
    assert set(ours) == set(plain) == set(other) == COLUMNS


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(machine, "BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "CPU_MATRIX", 64)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def _run(settings: EngineBenchSettings, model: Path) -> tuple[dict[str, Any], str]:
    out = io.StringIO()
    result = rounds.run(settings, str(model), tables.console(file=out))
    return json.loads(json.dumps(result)), out.getvalue()


@pytest.mark.usefixtures("small_machine")
def test_every_engine_case_has_a_floor(tmp_path: Path) -> None:
    """A bench of a real engine gives settings, model, backend and a floor for every case."""
    model = tiny_models.make("llama", tmp_path / "llama", max_position_embeddings=2048)
    result, text = _run(EngineBenchSettings(rounds=1), model)
    assert set(result) == {"settings", "model_type", "dtype", "backend", "floor", "rows"}
    assert (result["model_type"], result["dtype"]) == ("llama", "float32")
    assert f"llama, float32 on cpu, backend {result['backend']}, 1 thread(s), 1 rounds" in text
    names = [row["name"] for row in result["rows"]]
    assert names == [
        "decode, 1 stream",
        "decode, 1 stream, transformers",
        "decode, 4 streams",
        "decode, 8 streams",
        "decode, 16 streams",
        "decode, 16 streams, temperature 1, top_p 0.9",
        "decode, 1 stream of 1,900 tokens",
        "prefill of 1,000",
        "prefill of 1,000, transformers",
        "prefill of 1,400 in chunks of 256",
    ]
    against = [row["name"] for row in result["rows"] if row["against_transformers"]]
    assert against == ["decode, 1 stream", "prefill of 1,000"]
    for row in result["rows"]:
        assert set(row) == COLUMNS and row["tokens_per_s"] > 0 and row["floor_ms"] > 0 and row["time_over_floor"] > 0
        assert row["name"] in text
    rates = result["floor"]
    assert {"sum", "dot"} <= set(rates["read_gb_per_s"]) and "torch" in rates["gflop_per_s"]
    by_kernels = "engine" in rates["read_gb_per_s"] and "engine" in rates["gflop_per_s"]
    assert by_kernels == result["backend"].startswith("cpu")


@pytest.mark.usefixtures("small_machine")
def test_cases_beyond_context_are_left_out(tmp_path: Path) -> None:
    """Cases longer than the model's context are left out of the bench."""
    result, _ = _run(EngineBenchSettings(rounds=1), tiny_models.make("llama", tmp_path / "llama"))  # 512 tokens
    assert [row["name"] for row in result["rows"]] == [
        "decode, 1 stream",
        "decode, 1 stream, transformers",
        "decode, 4 streams",
        "decode, 8 streams",
        "decode, 16 streams",
        "decode, 16 streams, temperature 1, top_p 0.9",
    ]


# --- llama-bench --------------------------------------------------------------------------------------------------------


def _stand_in(folder: Path, body: str) -> EngineBenchSettings:
    """A program that notes its arguments in `asked` beside it, then does what `body` says."""
    program, gguf = folder / "llama-bench", folder / "model.gguf"
    note = f"import json, sys\nopen({str(folder / 'asked')!r}, 'w').write(json.dumps(sys.argv[1:]))\n"
    program.with_suffix(".py").write_text(f"{note}{body}\n")
    program.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$0.py" "$@"\n'
    )  # its path may be long, or have a blank
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    gguf.write_bytes(b"GGUF")
    return EngineBenchSettings(threads=2, llama_bench=str(program), gguf=str(gguf))


def test_llama_bench_figures_become_rows(tmp_path: Path) -> None:
    """llama-bench runs on the same number of threads, and its figures become rows of the result."""
    tests = [
        {
            "model_type": "llama 0.1B all F32",
            "n_prompt": 1000,
            "n_gen": 0,
            "avg_ts": 410.0,
            "samples_ts": [400, 500, 330],
        },
        {"model_type": "llama 0.1B all F32", "n_prompt": 0, "n_gen": 64, "avg_ts": 25.0},
    ]
    settings = _stand_in(tmp_path, f"print(json.dumps({tests!r}))")
    llama_bench.check(settings)
    prefill, decode = llama_bench.rows(settings)
    asked = json.loads((tmp_path / "asked").read_text())
    assert asked == ["-m", settings.gguf, "-t", "2", "-p", "1000", "-n", "64", "-o", "json"]
    assert prefill["name"] == "prefill of 1,000, llama-bench (llama 0.1B all F32)"
    assert (prefill["tokens_per_s"], prefill["lowest"], prefill["highest"], prefill["ms"]) == (400, 330, 500, 2500)
    assert (decode["tokens_per_s"], decode["ms"], decode["floor_ms"]) == (25, 40, None)
    assert set(prefill) == set(decode) == COLUMNS


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("sys.exit('no such model')", "status 1: no such model"),
        ("print('| model |')", "not what -o json prints"),
        ("print('[{}]')", "not what -o json prints"),
        ("print('{\"a\": 1}')", "not what -o json prints"),
    ],
)
def test_failing_llama_bench_names_the_option(tmp_path: Path, body: str, said: str) -> None:
    """A llama-bench that fails gives an error that names --llama-bench and the cause."""
    with pytest.raises(BenchFailed, match=r"^--llama-bench: ") as failed:
        llama_bench.rows(_stand_in(tmp_path, body))
    assert said in str(failed.value)


def test_missing_bench_inputs_are_named_first(tmp_path: Path) -> None:
    """A missing program, file or companion option is named before anything is measured."""
    settings = _stand_in(tmp_path, "")
    gone = str(tmp_path / "gone")
    with pytest.raises(SettingsError, match=r"^--llama-bench: there is no program .*gone"):
        llama_bench.check(settings.model_copy(update={"llama_bench": gone}))
    with pytest.raises(SettingsError, match=r"^--gguf: there is no file .*gone"):
        llama_bench.check(settings.model_copy(update={"gguf": gone}))
    with pytest.raises(ValidationError, match="--llama-bench: needs --gguf"):
        EngineBenchSettings(llama_bench=settings.llama_bench)
    with pytest.raises(ValidationError, match="--gguf: needs --llama-bench"):
        EngineBenchSettings(gguf=settings.gguf)
