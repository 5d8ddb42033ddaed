"""llama.cpp's own benchmark, `llama-bench`, on the same threads: other software on the same machine."""

import json
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.settings import EngineBenchSettings
from launcher.http.streams import BenchFailed
from runtime.settings.options import SettingsError

_PROMPT_TOKENS, _OUTPUT_TOKENS = 1000, 64
_TIMEOUT_S = 1800.0


def check(settings: EngineBenchSettings) -> None:
    """Checks the settings before minutes are spent. Raises `SettingsError`."""
    if settings.llama_bench and shutil.which(_expanded(settings.llama_bench)) is None:
        raise SettingsError(f"--llama-bench: there is no program {settings.llama_bench}")
    if settings.gguf and not Path(_expanded(settings.gguf)).is_file():
        raise SettingsError(f"--gguf: there is no file {settings.gguf}")


def rows(settings: EngineBenchSettings) -> list[dict[str, Any]]:
    """Runs `llama-bench`; returns its figures as rows of the table. Raises `BenchFailed`."""
    command = [
        _expanded(settings.llama_bench), "-m", _expanded(settings.gguf), "-t", str(settings.threads),
        "-p", str(_PROMPT_TOKENS), "-n", str(_OUTPUT_TOKENS), "-o", "json",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise BenchFailed(f"--llama-bench: it was not done within {_TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise BenchFailed(f"--llama-bench: it cannot be run: {error}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise BenchFailed(f"--llama-bench: it ended with status {done.returncode}: {last[:300]}")
    try:
        return [_row(test) for test in json.loads(done.stdout)]
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise BenchFailed(f"--llama-bench: its output is not what -o json prints: {error!r}") from None


def _row(test: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of the table. The decode of `llama-bench` begins with an empty context."""
    rates = [float(rate) for rate in test.get("samples_ts") or [test["avg_ts"]]]
    median, prompt = statistics.median(rates), int(test["n_prompt"])
    name = f"prefill of {prompt:,}" if prompt else "decode, 1 stream"
    return {
        "name": f"{name}, llama-bench ({test['model_type']})",
        "tokens_per_s": median,
        "lowest": min(rates),
        "highest": max(rates),
        "ms": 1e3 * (prompt or 1) / median,
        "floor_ms": None,
        "time_over_floor": None,
        "against_transformers": None,
    }


def _expanded(path: str) -> str:
    return str(Path(path).expanduser()) if path.startswith("~") else path
