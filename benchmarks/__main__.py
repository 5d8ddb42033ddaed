"""`python -m benchmarks`: what one part costs on this machine."""

import sys
from typing import Final

from runtime.process.exits import leave
from runtime.settings.command_line import Command, Table, invoke, new_app

HELP: Final = "Measure one part of crossdock on this machine, for those who work on it."
TABLE: Final[Table] = {
    "kv-interference": Command(
        "Do running streams slow down when KV arrives?",
        "benchmarks.settings:HarmlessSettings",
        "benchmarks.kv_interference:run",
    ),
    "handover": Command(
        "How much does moving a prompt's KV to decode delay its stream?",
        "benchmarks.settings:HandoverSettings",
        "benchmarks.handover:run",
    ),
    "engine": Command(
        "How near does the engine come to what this machine allows?",
        "benchmarks.settings:EngineBenchSettings",
        "benchmarks.engine.command:run",
    ),
    "fairness": Command(
        "Does a small tenant wait when another floods the service?",
        "benchmarks.settings:FairnessSettings",
        "benchmarks.fairness:run",
    ),
    "coordinator": Command(
        "What a decision of the coordinator costs",
        "benchmarks.settings:CoordinatorBenchSettings",
        "benchmarks.coordinator:run",
    ),
    "kv": Command(
        "How fast KV moves from one process to another", "benchmarks.settings:KvBenchSettings", "benchmarks.kv:run"
    ),
    "kv-utilization": Command(
        "How full the KV pool of a decode worker gets under overload",
        "benchmarks.settings:RoomBenchSettings",
        "benchmarks.kv_utilization:run",
    ),
}


def main() -> None:
    leave(invoke(new_app(HELP, TABLE), sys.argv[1:] or ["--help"], "python -m benchmarks"))


if __name__ == "__main__":
    main()
