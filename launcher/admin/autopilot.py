"""`crossdock autopilot`: asks the coordinator for its traffic, and changes roles where another ratio serves it better."""

from dataclasses import dataclass, field
from pathlib import Path

from launcher.admin.status import NoAnswer, ask, converse
from proto.drain import FlipAnswer, FlipRequest
from proto.messages import Role
from proto.status import StatusReport
from runtime.link.keys import Keys, keys_for
from runtime.metrics.registry import Labels, MetricsRegistry
from runtime.metrics.server import MetricsServer
from runtime.process import clock, log, notify
from runtime.process.driver import Stop, run_process
from runtime.process.exits import ConfigError
from runtime.process.log import Log
from runtime.settings.autopilot import AutopilotSettings
from tuning.advise import Slo, Workers
from tuning.autopilot import Autopilot, Decision, Rules, observation_of
from tuning.profile import Profile, ProfileError, decoded

ASK_MS = 3_000
SAY_EVERY_S = 60.0
"""The same advice is logged again after so long."""


@dataclass
class Seen:
    """For the metrics."""

    decision: Decision | None = None
    flips: int = 0
    refused: int = 0
    _said: tuple[Workers, float] = field(default=(Workers(0, 0), float("-inf")))

    def is_news(self, decision: Decision, now: float) -> bool:
        wanted, at = self._said
        if decision.wanted == wanted and now < at + SAY_EVERY_S:
            return False
        self._said = decision.wanted, now
        return True


def run(settings: AutopilotSettings) -> int:
    """Runs until SIGTERM or SIGINT. Raises `ConfigError`."""
    profile = _profile(settings.profile)
    keys = keys_for(settings, Role.OBSERVER)
    rules = Rules(
        Slo(settings.slo_ttft_ms, settings.slo_tpot_ms, settings.slo_percentile),
        settings.gain_min,
        settings.confirmations,
        settings.dwell_s,
        settings.calm_s,
        flip_s=max(settings.drain_timeout_s, 1.0),
    )

    async def main(stop: Stop) -> int:
        name = settings.name or "autopilot"
        logger = log.configure(level=settings.log_level, fmt=settings.log_format, process=name)
        metrics = MetricsServer(settings.metrics)
        await metrics.start()
        seen = Seen()
        registry = registry_of(seen)
        registry.introduce(name=name)
        metrics.show(registry, lambda: None if seen.decision is not None else "it has seen no traffic yet")
        notify.ready(f"{settings.mode}s")
        logger.info("autopilot", mode=settings.mode, profile=settings.profile)
        await _watch(settings, Autopilot(profile, rules), seen, keys, stop, logger)
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
    settings: AutopilotSettings, pilot: Autopilot, seen: Seen, keys: Keys | None, stop: Stop, logger: Log
) -> None:
    while not stop.is_set():
        try:
            report = await ask(settings.coordinator, ASK_MS, keys)
        except NoAnswer as error:
            logger.warning("no answer from the coordinator", error=str(error))
        else:
            await _look(settings, pilot, seen, report, keys, logger)
        await stop.unless_at_once(stop.wait(), settings.every_s)


async def _look(
    settings: AutopilotSettings, pilot: Autopilot, seen: Seen, report: StatusReport, keys: Keys | None, logger: Log
) -> None:
    models = sorted({worker.model for worker in report.workers})
    if not settings.model_id and len(models) != 1:
        logger.warning("no model to look after; --model-id names one", models=models)
        return
    decision = pilot.decide(observation_of(report, settings.model_id or models[0]), clock.now())
    seen.decision = decision
    if decision.worker and settings.mode == "on":
        await _flip(settings, decision, seen, keys, logger)
    elif decision.wanted != decision.present and seen.is_news(decision, clock.now()):
        logger.info("advice", wanted=str(decision.wanted), present=str(decision.present), why=decision.reason)


async def _flip(settings: AutopilotSettings, decision: Decision, seen: Seen, keys: Keys | None, logger: Log) -> None:
    # Prompts that are being computed move at once; streams may end where they are.
    hand_over_ms = 1000 * settings.drain_timeout_s if decision.role is Role.PREFILL else 0.0
    request = FlipRequest(decision.worker, decision.role, hand_over_ms, False, f"autopilot: {decision.reason}"[:500])
    try:
        answer = await converse(settings.coordinator, request, FlipAnswer, ASK_MS, keys)
    except NoAnswer as error:
        logger.warning("no answer from the coordinator", error=str(error))
        return
    if answer.refusal:
        seen.refused += 1
        logger.warning("refused", worker=decision.worker, role=decision.role, why=answer.refusal)
    else:
        seen.flips += 1
        logger.info("changes a role", worker=decision.worker, role=decision.role, why=decision.reason)


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
            "Fewest workers of each role with which the SLO would be kept; for HPA, KEDA or whoever adds machines.",
        ),
    ):
        registry.read("gauge", f"crossdock_autopilot_{of}_workers", about, ("role",), lambda of=of: workers(of))  # type: ignore[misc]
    registry.gauge(
        "crossdock_autopilot_gain_ratio",
        "Gain of goodput that the best ratio promises over the present one; 0.1 is a tenth more.",
        lambda: 0.0 if seen.decision is None else min(seen.decision.gain, 1e6),
    )
    registry.total("crossdock_autopilot_flips", "Changes of role that it has ordered.", lambda: seen.flips)
    registry.total("crossdock_autopilot_refused", "Changes of role that the coordinator refused.", lambda: seen.refused)
    return registry
