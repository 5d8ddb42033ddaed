"""`crossdock engine check`: whether a Python can run workers of `--engine vllm`."""

from pydantic import Field
from rich.console import Console

from runtime.settings.types import Options
from worker import engine_python


class EngineCheckSettings(Options):
    """Say whether a Python has what --engine vllm needs, and the command that installs what it lacks."""

    engine_python: str = Field(
        "", max_length=4096, description="Python to check; empty: that of the vllm command on the PATH."
    )


def check(settings: EngineCheckSettings) -> int:
    """Raises `ConfigError`."""
    python = settings.engine_python or engine_python.python_of_vllm()
    found = engine_python.check(python)
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{python} has vLLM {found}. Workers can use it:", markup=False)
    console.print(f"    crossdock serve MODEL --engine vllm --engine-python {python}", markup=False)
    return 0
