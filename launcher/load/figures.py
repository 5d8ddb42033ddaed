"""The figures of a run from its records: tails, goodput, throughput, errors, fairness. Pure.

Goodput is that of DistServe (Zhong et al. 2024): requests per second that met every limit on their latencies. Jain's index of
fairness (Jain, Chiu, Hawe 1984) is (Σx)² / (n·Σx²): 1 where all have the same, 1/n where one has all."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from launcher.http.streams import percentile
from launcher.load.records import CANCELLED, INTERRUPTED, OK, RequestRecord

RANKS: Final = (50, 90, 95, 99)
OUTPUT_COST: Final = 2.0  # of an answer's token, where a prompt's costs 1: what the coordinator charges
METRICS: Final = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "request", "queue_ms": "queue"}


class LoadSlo:
    """Limits on one request; 0 is none."""

    def __init__(self, ttft_ms: float, tpot_ms: float, itl_ms: float) -> None:
        self.limits = {"ttft": ttft_ms, "tpot": tpot_ms, "itl": itl_ms}

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "LoadSlo":
        return cls(settings["slo_ttft_ms"], settings["slo_tpot_ms"], settings["slo_itl_ms"])

    def missed(self, record: RequestRecord) -> list[str]:
        """Returns the limits that the request missed; a request that failed missed `answer`."""
        if record.outcome != OK:
            return ["answer"]
        found = {
            "ttft": record.ttft_ms,
            "tpot": record.tpot_ms,
            "itl": percentile(record.gaps_ms, 0.99) if record.gaps_ms else None,
        }
        return [
            name
            for name, value in found.items()
            if value is not None and self.limits[name] and value > self.limits[name]
        ]


def values(records: Iterable[RequestRecord], metric: str) -> list[float]:
    """Returns all measured values of one metric. Failed requests are left out, and so is the total time of cancelled ones;
    their gaps and first tokens count."""
    found: list[float] = []
    for record in records:
        if record.outcome not in (OK, CANCELLED):
            continue
        if metric == "itl_ms":
            found += record.gaps_ms
        elif metric == "e2e_ms":
            found += [record.e2e_ms] if record.outcome == OK else []
        else:
            value = getattr(record, metric)
            found += [] if value is None else [value]
    return found


def tails(found: Sequence[float]) -> dict[str, float] | None:
    """Count, mean and percentiles; None where nothing was measured."""
    if not found:
        return None
    return {
        "count": len(found),
        "mean": sum(found) / len(found),
        **{f"p{rank}": percentile(found, rank / 100) for rank in RANKS},
        "max": max(found),
    }


def jain(shares: Sequence[float]) -> float | None:
    total = sum(shares)
    return total**2 / (len(shares) * sum(share**2 for share in shares)) if total > 0 else None


def service(record: RequestRecord) -> float:
    """Returns the service that the request got, in the coordinator's unit, even if it failed; cached prompt tokens cost
    nothing."""
    if record.first_s is None:
        return 0.0
    prompt = (record.prompt_tokens or record.prompt_asked) - record.cached_tokens
    return prompt + OUTPUT_COST * record.tokens


def asked(record: RequestRecord) -> float:
    return record.prompt_asked + OUTPUT_COST * record.output_asked


def goodput(records: Sequence[RequestRecord], slo: LoadSlo, seconds: float) -> dict[str, Any]:
    """Returns the goodput. Requests whose client left, or that the end of the run cut off, count neither as good nor as
    missed."""
    judged = [record for record in records if record.outcome not in (CANCELLED, INTERRUPTED)]
    misses = [slo.missed(record) for record in judged]
    good = sum(1 for missed in misses if not missed)
    return {
        "judged": len(judged),
        "good": good,
        "attainment": good / len(judged) if judged else None,
        "requests_per_s": good / seconds if seconds > 0 else None,
        "missed": dict(Counter(name for missed in misses for name in missed)),
        "limits_ms": slo.limits,
    }


def fairness(
    records: Sequence[RequestRecord], weights: Mapping[str, float], slo: LoadSlo, seconds: float
) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {}
    for name, weight in weights.items():
        own = [record for record in records if record.tenant == name]
        row = _served(own, slo, seconds)
        rows[name] = {"weight": weight, "service_per_weight": row["service"] / weight, **row}
    active = [row for row in rows.values() if row["requests"]]
    return {
        "tenants": rows,
        "jain_service_per_weight": jain([row["service_per_weight"] for row in active]),
        "jain_served_share": jain([row["served_share"] or 0.0 for row in active]),
    }


def _served(own: Sequence[RequestRecord], slo: LoadSlo, seconds: float) -> dict[str, Any]:
    served, wanted = sum(map(service, own)), sum(map(asked, own))
    return {
        "requests": len(own),
        "outcomes": dict(Counter(record.outcome for record in own)),
        "service": served,
        "served_share": served / wanted if wanted else None,
        "ttft_ms": tails(values(own, "ttft_ms")),
        "itl_ms": tails(values(own, "itl_ms")),
        "goodput": goodput(own, slo, seconds),
    }


def by_priority(records: Sequence[RequestRecord], slo: LoadSlo, seconds: float) -> dict[str, dict[str, Any]]:
    """Returns figures for each priority; empty if no request asked for one."""
    names = sorted({record.priority for record in records})
    found = {name or "(none)": [record for record in records if record.priority == name] for name in names}
    return {name: _served(own, slo, seconds) for name, own in found.items()} if names != [""] else {}


def figures(records: Sequence[RequestRecord], weights: Mapping[str, float], slo: LoadSlo) -> dict[str, Any]:
    """Returns the figures of the counted requests. Their time span begins when the first of them is due and ends with the last
    end."""
    counted = [record for record in records if record.counted]
    start = min((record.due_s for record in counted), default=0.0)
    seconds = max((record.ended_s for record in counted), default=0.0) - start
    outcomes = Counter(record.outcome for record in counted)
    late_ms = [1000 * max(0.0, record.sent_s - record.due_s) for record in counted]
    retry = [record.retry_after_s for record in counted if record.retry_after_s is not None]
    ended = [record for record in counted if record.outcome == OK]
    chunks = sum(len(record.gaps_ms) + 1 for record in ended)
    return {
        "seconds": seconds,
        "requests": len(counted),
        "warmup_requests": len(records) - len(counted),
        "outcomes": dict(outcomes),
        "errors": {kind: count for kind, count in outcomes.items() if kind not in (OK, CANCELLED, INTERRUPTED)},
        "error_details": _details(counted),
        "retry_after_s": tails(retry),
        "late_ms": tails(late_ms),
        "latency": {metric: tails(values(counted, metric)) for metric in METRICS},
        "goodput": goodput(counted, slo, seconds),
        "throughput": _throughput(counted, seconds),
        "tokens_per_chunk": sum(record.tokens for record in ended) / chunks if chunks else None,
        "lengths": _lengths(ended),
        "fairness": fairness(counted, weights, slo, seconds),
        "priorities": by_priority(counted, slo, seconds),
    }


def _details(records: Iterable[RequestRecord]) -> dict[str, str]:
    """Returns the first message of each kind of error."""
    found: dict[str, str] = {}
    for record in records:
        if record.detail:
            found.setdefault(record.outcome, record.detail)
    return found


def _throughput(records: Sequence[RequestRecord], seconds: float) -> dict[str, float] | None:
    if seconds <= 0:
        return None
    begun = [record for record in records if record.first_s is not None]
    return {
        "offered_requests_per_s": _offered(records, seconds),
        "requests_per_s": sum(1 for record in records if record.outcome == OK) / seconds,
        "output_tokens_per_s": sum(record.tokens for record in begun) / seconds,
        "prompt_tokens_per_s": sum(record.prompt_tokens or record.prompt_asked for record in begun) / seconds,
        "cached_tokens_per_s": sum(record.cached_tokens for record in begun) / seconds,
    }


def _offered(records: Sequence[RequestRecord], seconds: float) -> float:
    """Returns the arrivals per second between the first and the last; the time that the last answers take is not included."""
    due_s = [record.due_s for record in records]
    span_s = max(due_s) - min(due_s)
    return (len(due_s) - 1) / span_s if span_s > 0 else len(due_s) / seconds


def _lengths(ended: Sequence[RequestRecord]) -> dict[str, Any]:
    """Returns the lengths of requests as the server counts them, beside the planned ones."""
    told = [record for record in ended if record.prompt_tokens]
    off = [abs(record.prompt_tokens - record.prompt_asked) for record in told]
    return {
        "prompt_mean": sum(record.prompt_tokens for record in told) / len(told) if told else None,
        "prompt_off_mean": sum(off) / len(told) if told else None,
        "prompt_off_max": max(off, default=None),
        "output_mean": sum(record.tokens for record in ended) / len(ended) if ended else None,
        "output_exact_share": sum(record.tokens == record.output_asked for record in ended) / len(ended)
        if ended
        else None,
    }
