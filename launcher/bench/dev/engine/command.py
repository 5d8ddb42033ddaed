"""`crossdock bench dev engine`: sets the number of threads before torch is imported, then measures (`rounds`)."""

import os

from launcher.bench.dev.engine import llama_bench
from launcher.bench.settings import EngineBenchSettings
from launcher.models import resolve as models
from launcher.report import console_for, write_json


def run(settings: EngineBenchSettings) -> int:
    """`crossdock bench dev engine`. Raises `SettingsError` and `BenchFailed`."""
    llama_bench.check(settings)
    console = console_for(settings)
    model = models.ready(settings.model, "", console)
    # OpenMP reads these once, when torch is first imported, which is below.
    os.environ |= {"OMP_NUM_THREADS": str(settings.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    from launcher.bench.dev.engine import rounds

    write_json(settings, rounds.run(settings, str(model.path), console))
    return 0
