"""The metrics of `crossdock serve` and `up`: whether each child process runs, and how often it was started again."""

from collections.abc import Callable, Iterable

from launcher.local.process_states import ProcessState
from proto.errors import CrossdockError
from runtime.metrics.registry import Labels, MetricsRegistry
from runtime.metrics.server import MetricsServer
from runtime.process import clock, log


def registry_of(states: Callable[[], Iterable[ProcessState]]) -> MetricsRegistry:
    registry = MetricsRegistry("supervisor")

    def each(of: Callable[[ProcessState], float | None]) -> Callable[[], list[tuple[Labels, float]]]:
        return lambda: [((one.name,), float(value)) for one in states() if (value := of(one)) is not None]

    registry.read(
        "gauge",
        "crossdock_supervisor_process_up",
        "1 while the process runs.",
        ("process",),
        each(lambda one: one.pid > 0),
    )
    registry.read(
        "gauge", "crossdock_supervisor_process_ready", "1 once the process has reported that it is ready.", ("process",),
        each(lambda one: one.ready),
    )  # fmt: skip
    registry.read(
        "counter", "crossdock_supervisor_restarts", "Times that the process was restarted.", ("process",),
        each(lambda one: one.restarts),
    )  # fmt: skip
    registry.read(
        "gauge",
        "crossdock_supervisor_next_start_seconds",
        "Seconds until the process is restarted; only while it does not run.",
        ("process",),
        each(lambda one: None if one.starts_at is None else max(one.starts_at - clock.unix_time(), 0.0)),
    )
    registry.read(
        "gauge",
        "crossdock_supervisor_last_exit_status",
        "Last exit status of the process, or minus the signal's number; only after it has ended.",
        ("process",),
        each(lambda one: one.exit_status),
    )
    return registry


async def serve(address: str, registry: MetricsRegistry, say: Callable[[str, str, str], None]) -> MetricsServer | None:
    """Serves the metrics. Returns None, and logs it, if that address cannot be listened on: the cluster then serves without
    these metrics."""
    log.configure(level="warning", fmt="auto", process="supervisor")
    server = MetricsServer(address)
    try:
        await server.start()
    except CrossdockError as error:
        say("warning", "supervisor", str(error))
        return None
    registry.introduce(name="supervisor")
    server.show(registry, lambda: None)
    return server
