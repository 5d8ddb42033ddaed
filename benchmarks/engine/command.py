"""`python -m benchmarks engine`: sets the number of threads before torch is imported, then measures (`rounds`)."""

import os

from benchmarks.engine import llama_bench
from benchmarks.settings import EngineBenchSettings
from launcher.models import resolve
from launcher.reports import console_for, write_json


def run(settings: EngineBenchSettings) -> int:
    """`python -m benchmarks engine`. Raises `SettingsError` and `BenchFailed`."""
    llama_bench.check(settings)
    console = console_for(settings)
    model = resolve.ready(settings.model, "", console)
    # OpenMP reads these once, when torch is first imported, which is below.
    os.environ |= {"OMP_NUM_THREADS": str(settings.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    from benchmarks.engine import rounds

    write_json(settings, rounds.run(settings, str(model.path), console))
    return 0
