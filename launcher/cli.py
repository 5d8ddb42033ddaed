"""The `crossdock` command. Options come from the settings classes; this file only says which command runs what."""

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from launcher.admin.drain import DrainSettings
from launcher.admin.event_log_settings import ExplainSettings, ReplaySettings
from launcher.admin.keys import NewKeysSettings
from launcher.admin.simulate_settings import SimulateSettings
from launcher.admin.status import StatusSettings
from launcher.admin.tenants import CheckSettings, KeySettings
from launcher.admin.usage import UsageSettings
from launcher.bench.settings import (
    CoordinatorBenchSettings,
    EngineBenchSettings,
    FairnessSettings,
    HandoverSettings,
    HarmlessSettings,
    IsolationSettings,
    KvBenchSettings,
    RoomBenchSettings,
)
from launcher.cluster.settings import ClusterCheckSettings, DownSettings, UpSettings
from launcher.load.settings import CompareSettings, RatioSettings, ServeBenchSettings
from runtime.process.exits import leave
from runtime.settings import machine
from runtime.settings.options import add_command, invoke, new_app
from runtime.settings.roles import CoordinatorSettings, GatewaySettings
from runtime.settings.serve import ServeSettings
from runtime.settings.workers import WorkerSettings

HELP = """Serve language models with prefill and decode in separate processes.

To begin, [bold]crossdock serve[/bold] brings a whole cluster up on this machine. On several machines, describe them in one
file, look at the plan with [bold]crossdock cluster check FILE[/bold], and run [bold]crossdock up[/bold] on each.
"""
BENCH_HELP = (
    "Send a load to a server, compare runs, compare ratios of workers. Or measure this machine: isolation of running streams"
    " from long prompts and from KV that arrives, what a hand-over of KV costs, a small tenant beside a flood, the engine"
    " alone, the coordinator's decisions alone, KV transfers alone, or how full KV pools get."
)
KEYS_HELP = "Make the keys with which the processes of a cluster know each other."
CLUSTER_HELP = "A cluster on several machines, described in one file."
TENANTS_HELP = "Check a tenants file, or make a key for it."


# The modules behind the commands are imported when they run: --help and a wrong option answer at once.


def _serve(settings: ServeSettings) -> int:
    from launcher.local.serve import run

    return run(settings)


def _coordinator(settings: CoordinatorSettings) -> int:
    from coordinator.main import run

    return run(settings)


def _gateway(settings: GatewaySettings) -> int:
    from gateway.main import run

    return run(settings)


def _worker(settings: WorkerSettings) -> int:
    settings = machine.prepare(settings)
    if settings.role == "prefill":
        from prefill_worker.main import run as run_prefill

        return run_prefill(settings)
    from decode_worker.main import run as run_decode

    return run_decode(settings)


def _status(settings: StatusSettings) -> int:
    from launcher.admin.status import run

    return run(settings)


def _usage(settings: UsageSettings) -> int:
    from launcher.admin.usage import run

    return run(settings)


def _up(settings: UpSettings) -> int:
    from launcher.cluster.up import up

    return up(settings)


def _down(settings: DownSettings) -> int:
    from launcher.cluster.up import down

    return down(settings)


def _cluster_check(settings: ClusterCheckSettings) -> int:
    from launcher.cluster.check import run

    return run(settings)


def _tenants_check(settings: CheckSettings) -> int:
    from launcher.admin.tenants import check

    return check(settings)


def _tenants_key(settings: KeySettings) -> int:
    from launcher.admin.tenants import make_key

    return make_key(settings)


def _keys_new(settings: NewKeysSettings) -> int:
    from launcher.admin.keys import run

    return run(settings)


def _replay(settings: ReplaySettings) -> int:
    from launcher.admin.replay import replay

    return replay(settings)


def _drain(settings: DrainSettings) -> int:
    from launcher.admin.drain import run

    return run(settings)


def _explain(settings: ExplainSettings) -> int:
    from launcher.admin.replay import explain

    return explain(settings)


def _simulate(settings: SimulateSettings) -> int:
    from launcher.admin.simulate import run

    return run(settings)


def _bench_isolation(settings: IsolationSettings) -> int:
    from launcher.bench.dev.isolation import run

    return run(settings)


def _bench_handover(settings: HandoverSettings) -> int:
    from launcher.bench.dev.handover import run

    return run(settings)


def _bench_harmless(settings: HarmlessSettings) -> int:
    from launcher.bench.dev.kv_interference import run

    return run(settings)


def _bench_engine(settings: EngineBenchSettings) -> int:
    from launcher.report import run_engine

    return run_engine(settings)


def _bench_fairness(settings: FairnessSettings) -> int:
    from launcher.bench.dev.fairness import run

    return run(settings)


def _bench_coordinator(settings: CoordinatorBenchSettings) -> int:
    from launcher.bench.dev.coordinator import run

    return run(settings)


def _bench_kv(settings: KvBenchSettings) -> int:
    from launcher.bench.dev.kv import run

    return run(settings)


def _bench_room(settings: RoomBenchSettings) -> int:
    from launcher.bench.dev.kv_utilization import run

    return run(settings)


def _bench_serve(settings: ServeBenchSettings) -> int:
    from launcher.bench.serve import run

    return run(settings)


def _bench_compare(settings: CompareSettings) -> int:
    from launcher.bench.compare import run

    return run(settings)


def _bench_ratio(settings: RatioSettings) -> int:
    from launcher.bench.ratio import run

    return run(settings)


def build_app() -> typer.Typer:
    app = new_app(HELP)

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
        ] = False,
    ) -> None:
        pass

    add_command(app, "serve", ServeSettings, _serve)
    add_command(app, "up", UpSettings, _up)
    add_command(app, "down", DownSettings, _down)
    cluster = new_app(CLUSTER_HELP)
    add_command(cluster, "check", ClusterCheckSettings, _cluster_check)
    app.add_typer(cluster, name="cluster")
    add_command(app, "coordinator", CoordinatorSettings, _coordinator)
    add_command(app, "gateway", GatewaySettings, _gateway)
    add_command(app, "worker", WorkerSettings, _worker)
    add_command(app, "status", StatusSettings, _status)
    add_command(app, "drain", DrainSettings, _drain)
    add_command(app, "usage", UsageSettings, _usage)
    tenants = new_app(TENANTS_HELP)
    add_command(tenants, "check", CheckSettings, _tenants_check)
    add_command(tenants, "key", KeySettings, _tenants_key)
    app.add_typer(tenants, name="tenants")
    keys = new_app(KEYS_HELP)
    keys.callback()(lambda: None)
    add_command(keys, "new", NewKeysSettings, _keys_new)
    app.add_typer(keys, name="keys")
    add_command(app, "explain", ExplainSettings, _explain)
    add_command(app, "replay", ReplaySettings, _replay)
    add_command(app, "simulate", SimulateSettings, _simulate)
    bench = new_app(BENCH_HELP)
    add_command(bench, "serve", ServeBenchSettings, _bench_serve)
    add_command(bench, "compare", CompareSettings, _bench_compare)
    add_command(bench, "ratio", RatioSettings, _bench_ratio)
    add_command(bench, "isolation", IsolationSettings, _bench_isolation)
    add_command(bench, "handover", HandoverSettings, _bench_handover)
    add_command(bench, "harmless", HarmlessSettings, _bench_harmless)
    add_command(bench, "engine", EngineBenchSettings, _bench_engine)
    add_command(bench, "fairness", FairnessSettings, _bench_fairness)
    add_command(bench, "coordinator", CoordinatorBenchSettings, _bench_coordinator)
    add_command(bench, "kv", KvBenchSettings, _bench_kv)
    add_command(bench, "room", RoomBenchSettings, _bench_room)
    app.add_typer(bench, name="bench")
    return app


def main() -> None:
    arguments = sys.argv[1:]
    if arguments in ([], ["bench"], ["cluster"], ["keys"], ["tenants"]):
        arguments.append("--help")
    leave(invoke(build_app(), arguments, "crossdock"))


def _print_version(asked: bool) -> None:
    if not asked:
        return
    try:
        typer.echo(f"crossdock {version('crossdock')}")
    except PackageNotFoundError:
        typer.echo("crossdock, run from its source folder")
    raise typer.Exit


if __name__ == "__main__":
    main()
