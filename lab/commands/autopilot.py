"""`crossdock autopilot`: asks the coordinator for its traffic, and changes roles where another ratio serves it better."""

from dataclasses import dataclass, field
from pathlib import Path

from lab.accuracy import Accuracy
from lab.advise import Slo, Workers
from lab.autopilot import Autopilot, AutopilotRules, Decision, Observation, observation_of, ratio_of
from lab.profile import Profile, ProfileError, decoded
from launcher.admin.status import ASK_MS, NoAnswer, converse, error_words
from proto.drain import FlipAnswer, FlipRequest
from proto.limits import MAX_TEXT_CHARS
from proto.messages import Message, Role, StatusRequest
from proto.status import AutopilotReport, AutopilotStatus, PredictionError, StatusReport
from runtime.link.keys import Keys, keys_for
from runtime.link.tls import tls_of
from runtime.metrics.registry import Labels, MetricsRegistry
from runtime.metrics.server import MetricsServer
from runtime.process import clock, log, notify
from runtime.process.driver import Stop, run_process
from runtime.process.exits import ConfigError, leave
from runtime.process.log import Log
from runtime.settings.autopilot import AutopilotSettings
from runtime.settings.command_line import run_role
from runtime.settings.types import SLO_PERCENTILE

EVERY_S = 2.0
HAND_OVER_S = 2.0  # that streams have to end on a decode worker that changes its role
SAY_EVERY_S = 60.0  # until the same advice is logged again
SAY_ERROR_EVERY_S = 600.0


@dataclass
class Seen:
    """The observations for the metrics, and for the coordinator."""

    decision: Decision | None = None
    model: str = ""
    error: PredictionError = field(default_factory=PredictionError)
    flips: int = 0
    refused: int = 0
    _said: tuple[Workers, float] = field(default=(Workers(0, 0), float("-inf")))
    _error_said_at: float = 0.0

    def is_news(self, decision: Decision, now: float) -> bool:
        wanted, at = self._said
        if decision.wanted == wanted and now < at + SAY_EVERY_S:
            return False
        self._said = decision.wanted, now
        return True

    def is_error_due(self, now: float) -> bool:
        if not self.error.comparisons or now < self._error_said_at + SAY_ERROR_EVERY_S:
            return False
        self._error_said_at = now
        return True

    def question(self, mode: str) -> Message:
        """The question for a `StatusReport`, with the last decision, once there is one."""
        one = self.decision
        if one is None:
            return StatusRequest()
        said = AutopilotStatus(
            self.model, mode, str(one.present), str(one.wanted), one.reason[:MAX_TEXT_CHARS], self.error
        )
        return AutopilotReport(said)


def run(settings: AutopilotSettings) -> int:
    """Runs until SIGTERM or SIGINT. Raises `ConfigError`."""
    profile = _profile(settings.profile)
    keys = keys_for(settings, Role.OBSERVER)
    rules = AutopilotRules(Slo(settings.slo_ttft_ms, settings.slo_tpot_ms, SLO_PERCENTILE))

    async def main(stop: Stop) -> int:
        name = settings.name or "autopilot"
        logger = log.configure(level=settings.log_level, fmt=settings.log_format, process=name)
        metrics = MetricsServer(settings.metrics, tls=tls_of(settings))
        await metrics.start()
        seen = Seen()
        registry = registry_of(seen)
        registry.introduce(name=name)
        metrics.show(registry, lambda: None if seen.decision is not None else "it has seen no traffic yet")
        notify.ready(f"{settings.mode}s")
        logger.info("autopilot", mode=settings.mode, profile=settings.profile)
        pilot, accuracy = Autopilot(profile, rules), Accuracy(profile, rules.slo)
        await _watch(settings, pilot, accuracy, seen, keys, stop, logger)
        await metrics.close()
        return 0

    return run_process(main)


def _profile(path: str) -> Profile:
    try:
        return decoded(Path(path).expanduser().read_bytes(), path)
    except (OSError, ProfileError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"--profile: {path}: {why}" if isinstance(error, OSError) else f"--profile: {why}") from None


async def _watch(
    settings: AutopilotSettings,
    pilot: Autopilot,
    accuracy: Accuracy,
    seen: Seen,
    keys: Keys | None,
    stop: Stop,
    logger: Log,
) -> None:
    while not stop.is_set():
        try:
            report = await converse(settings.coordinator, seen.question(settings.mode), StatusReport, ASK_MS, keys)
        except NoAnswer as error:
            logger.warning("no answer from the coordinator", error=str(error))
        else:
            models = sorted({worker.model for worker in report.workers})
            if settings.model_id or len(models) == 1:
                seen.model = settings.model_id or models[0]
                observed = observation_of(report, seen.model)
                _compare(accuracy, observed, report, seen, logger)
                await _decide(settings, pilot, observed, seen, keys, logger)
            else:
                logger.warning("no model to look after; --model-id names one", models=models)
        await stop.unless_at_once(stop.wait(), EVERY_S)


def _compare(accuracy: Accuracy, observed: Observation, report: StatusReport, seen: Seen, logger: Log) -> None:
    now = clock.now()
    traffic = next((one for one in report.traffic if one.model == seen.model), None)
    if traffic is not None:
        accuracy.look(None if observed.is_changing else ratio_of(observed), traffic, now)
    seen.error = accuracy.error(now)
    if seen.is_error_due(now):
        logger.info("error of its predictions in the last hour", figures=error_words(seen.error))


async def _decide(
    settings: AutopilotSettings, pilot: Autopilot, observed: Observation, seen: Seen, keys: Keys | None, logger: Log
) -> None:
    decision = pilot.decide(observed, clock.now())
    seen.decision = decision
    if decision.workers and settings.mode == "on":
        for worker in decision.workers:
            await _flip(settings, worker, decision, seen, keys, logger)
    elif decision.wanted != decision.present and seen.is_news(decision, clock.now()):
        logger.info("advice", wanted=str(decision.wanted), present=str(decision.present), why=decision.reason)


async def _flip(
    settings: AutopilotSettings, worker: str, decision: Decision, seen: Seen, keys: Keys | None, logger: Log
) -> None:
    # Prompts that are being computed move at once. Streams may end on the worker for a while.
    hand_over_ms = 1000 * HAND_OVER_S if decision.role is Role.PREFILL else 0.0
    request = FlipRequest(worker, decision.role, hand_over_ms, False, f"autopilot: {decision.reason}"[:500])
    try:
        answer = await converse(settings.coordinator, request, FlipAnswer, ASK_MS, keys)
    except NoAnswer as error:
        logger.warning("no answer from the coordinator", error=str(error))
        return
    if answer.refusal:
        seen.refused += 1
        logger.warning("refused", worker=worker, role=decision.role, why=answer.refusal)
    else:
        seen.flips += 1
        logger.info("changes a role", worker=worker, role=decision.role, why=decision.reason)


def registry_of(seen: Seen) -> MetricsRegistry:
    registry = MetricsRegistry("autopilot")

    def workers(of: str) -> list[tuple[Labels, float]]:
        found: Workers | None = getattr(seen.decision, of) if seen.decision is not None else None
        if found is None:
            return []
        return [((role,), float(getattr(found, role))) for role in ("prefill", "decode", "mixed")]

    for of, about in (
        ("present", "Workers of each role now."),
        ("wanted", "Workers of each role in the best ratio of those that there are."),
        (
            "needed",
            "Fewest workers of each role with which the SLO would be kept; for HPA, KEDA or others that add machines.",
        ),
    ):
        registry.read("gauge", f"crossdock_autopilot_{of}_workers", about, ("role",), lambda of=of: workers(of))  # type: ignore[misc]
    registry.gauge(
        "crossdock_autopilot_gain_ratio",
        "Gain of goodput that the best ratio promises over the present one; 0.1 is a tenth more.",
        lambda: 0.0 if seen.decision is None else min(seen.decision.gain, 1e6),
    )
    registry.read(
        "gauge",
        "crossdock_autopilot_prediction_error_ratio",
        "Median over the last hour of the relative error of what it predicted for the present ratio; 0.1 is a tenth.",
        ("figure",),
        lambda: _known(seen.error, "ttft_p50", "ttft_p90", "tpot_p90"),
    )
    registry.read(
        "gauge",
        "crossdock_autopilot_prediction_error_slo_share",
        "The same for the share of requests that keep the SLO: 0.05 is 5 points.",
        (),
        lambda: [((), error) for _, error in _known(seen.error, "slo_share")],
    )
    registry.gauge(
        "crossdock_autopilot_comparisons",
        "Half minutes of the last hour in which predictions were compared with what was measured.",
        lambda: seen.error.comparisons,
    )
    registry.total("crossdock_autopilot_flips", "Changes of role that it has ordered.", lambda: seen.flips)
    registry.total("crossdock_autopilot_refused", "Changes of role that the coordinator refused.", lambda: seen.refused)
    return registry


def _known(error: PredictionError, *figures: str) -> list[tuple[Labels, float]]:
    values = [(name, getattr(error, name)) for name in figures]
    return [((name,), value) for name, value in values if value is not None]


if __name__ == "__main__":
    leave(run_role("autopilot", AutopilotSettings, run))
