"""The measurements behind `crossdock calibrate`, at a live cluster of one prefill and one decode worker."""

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import ceil
from statistics import fmean, median

import aiohttp

from lab.commands.event_log import Logged, LoggedStep
from lab.fit import HandOver, Outside, Samples, StepSample
from launcher.http.streams import BenchFailed
from launcher.load import client
from launcher.load.plan import PlannedRequest
from launcher.load.probe import Probed
from launcher.load.prompts import Prompts
from launcher.load.records import OK, RequestRecord
from launcher.load.tenants import LoadTenant
from proto.messages import Role
from runtime.process import clock

STREAM_STEPS = 40  # for which all streams of a batch are to run together
LAG_MAX = 32
PAUSE_S = 0.1  # between prompts, on average: back to back, they would find all data in the caches
CORE_MS, CORE_STEPS = 400.0, (40, 400)
"""How long streams run, and at least and at most how many steps, to measure the time that tokens take on the control
processes' cores."""
SHORTEST = (8, 32, 64, 128, 192, 256)


@dataclass(frozen=True)
class MeasuredBatch:
    sequences: int
    context_tokens: int
    output_tokens: int


@dataclass
class Measured:
    """Records of each part, with the round they are of."""

    prompts: list[tuple[int, RequestRecord]] = field(default_factory=list)
    batches: list[tuple[int, MeasuredBatch, list[RequestRecord]]] = field(default_factory=list)
    beside: list[tuple[int, MeasuredBatch, list[RequestRecord], list[RequestRecord]]] = field(default_factory=list)
    core: list[tuple[int, float]] = field(default_factory=list)


@dataclass
class MeasuredSession:
    """Sends what is measured."""

    http: aiohttp.ClientSession
    probed: Probed
    prompts: Prompts
    tenant: LoadTenant
    on_done: Callable[[int], None]  # called with the number of requests that have just ended
    sent: int = 0

    async def play(self, plan: Sequence[tuple[int, int]]) -> list[RequestRecord]:
        """Plays all requests at once; `plan` has pairs of prompt and output tokens. Raises `BenchFailed` if one fails."""
        origin = clock.now()
        tasks = []
        async with asyncio.TaskGroup() as group:
            for prompt, output in plan:
                self.sent += 1
                planned = PlannedRequest(self.sent, 0.0, self.tenant, "", prompt, output)
                record = RequestRecord(planned.index, self.tenant.name, 0.0, prompt, output)
                body = self.probed.target.body(planned, self.prompts.make(planned))
                tasks.append(record)
                group.create_task(
                    client.send(self.http, self.probed.target, planned, body, record, origin)
                ).add_done_callback(lambda _: self.on_done(1))
        for record in tasks:
            if record.outcome != OK:
                raise BenchFailed(f"a request failed while measuring: {record.outcome} {record.detail}")
            record.sent_s += origin
            record.first_s = (record.first_s or 0.0) + origin
        return tasks


def lengths(step_tokens: int, longest: int) -> list[int]:
    short = [count for count in SHORTEST if count < min(step_tokens, longest)]
    long, count = [], step_tokens
    while count <= longest:
        long.append(count)
        count *= 2
    return short + long


def batches(sequences_max: int, longest: int, lag: int) -> Iterator[MeasuredBatch]:
    """Yields the batches to measure. `lag`: steps that a stream has done before the next one begins."""
    count = 1
    while count <= sequences_max:
        for context in (min(longest, 32), min(longest, 512)):
            yield MeasuredBatch(count, context, STREAM_STEPS + max(lag, 6) * count)
        count *= 2


def sizes_of(number: int, step_tokens: int, longest: int, sequences_max: int) -> tuple[int, int]:
    """Returns the longest prompt and the most sequences of a round. The first round measures everything. The others show how
    much runs differ, and are shorter."""
    return (longest, sequences_max) if not number else (min(longest, 2 * step_tokens), min(sequences_max, 4))


def requests_of(number: int, step_tokens: int, longest: int, sequences_max: int) -> int:
    """How many `measure` sends."""
    longest, sequences_max = sizes_of(number, step_tokens, longest, sequences_max)
    each = 2 * len(lengths(step_tokens, longest)) + sum(one.sequences for one in batches(sequences_max, longest, 0))
    return each + len(_WARM_UP) + 4 + 6 + 2 * sum(_CORE_SEQUENCES)


_WARM_UP = (64, 256, *(16,) * 10)  # prompt tokens: the first requests to a process take longer
_CORE_SEQUENCES = (1, 4)


async def measure(
    session: MeasuredSession,
    number: int,
    step_tokens: int,
    longest: int,
    sequences_max: int,
    core_ms: Callable[[], float | None],
) -> Measured:
    """Measures one round. `core_ms`: core time of the control processes so far, if that is known."""
    longest, sequences_max = sizes_of(number, step_tokens, longest, sequences_max)
    found, pauses = Measured(), random.Random(f"{number} pauses")
    lag = 0
    for prompt in _WARM_UP:
        [record] = await session.play([(min(prompt, longest), 8)])
        lag = min(ceil((record.ttft_ms or 0.0) / max(record.tpot_ms or 1.0, 0.1)), LAG_MAX)
    beside = MeasuredBatch(4, min(64, longest), min(160, longest))
    for count in lengths(step_tokens, longest) * 2:
        await asyncio.sleep(min(pauses.expovariate(1 / PAUSE_S), 4 * PAUSE_S))
        found.prompts.append((number, (await session.play([(count, 1)]))[0]))
    for batch in batches(sequences_max, longest, lag):
        if context := session.probed.target.context_tokens:
            batch = replace(batch, output_tokens=min(batch.output_tokens, context - batch.context_tokens))
        plan = [(batch.context_tokens, batch.output_tokens)] * batch.sequences
        found.batches.append((number, batch, await session.play(plan)))
    streams = asyncio.create_task(session.play([(beside.context_tokens, beside.output_tokens)] * beside.sequences))
    try:
        computed = [(await session.play([(min(2 * step_tokens, longest), 1)]))[0] for _ in range(6)]
        found.beside.append((number, beside, await streams, computed))
    finally:
        streams.cancel()
        await asyncio.gather(streams, return_exceptions=True)
    for sequences in _CORE_SEQUENCES:
        found.core += await _core(session, sequences, longest, core_ms)
    return found


async def _core(
    session: MeasuredSession, sequences: int, longest: int, core_ms: Callable[[], float | None]
) -> list[tuple[int, float]]:
    """Measures the core time of each step from two plays that differ only in their number of steps."""
    prompt, few = min(32, longest // 2), 8
    before = core_ms()
    records = await session.play([(prompt, few)] * sequences)
    between = core_ms()
    least, most = CORE_STEPS
    steps = round(min(max(CORE_MS / max(records[0].tpot_ms or 1.0, 1e-3), least), most, longest - prompt - few))
    await session.play([(prompt, few + steps)] * sequences)
    after = core_ms()
    if before is None or between is None or after is None or steps < 1:
        return []
    return [(sequences, max((after - between) - (between - before), 0.0) / steps)]


def samples_of(measured: Measured, logged: Logged) -> Samples:
    samples, steps = Samples(core=list(measured.core)), logged.steps_of()
    for number, record in measured.prompts:
        own = steps.get(record.request_id, [])
        samples.prefill += [StepSample(step.tokens, step.pairs, step.ms, number) for step in own]
        gaps = [1000 * (later.at_s - earlier.at_s) - later.ms for earlier, later in pairwise(own)]
        samples.step_gaps_ms += gaps
        if own and record.ttft_ms is not None:
            outside = record.ttft_ms - sum(step.ms for step in own) - sum(max(gap, 0.0) for gap in gaps)
            samples.outside.append(Outside(record.prompt_asked, outside, number))
    for number, batch, records in measured.batches:
        gaps = _steady(records, batch)
        if gaps:
            samples.decode.append(_mean_step(records, batch, gaps, number))
        alone = steps.get(records[0].request_id)
        if batch.sequences == 1 and alone and len(records[0].gaps_ms) > 2:
            first, *later = records[0].gaps_ms
            samples.second_token_ms.append((alone[-1].tokens, first - median(later)))
        if batch.sequences <= 2:  # more of them would wait for each other's transfers
            samples.hand_overs += [one for record in records if (one := _hand_over(record, logged, steps)) is not None]
    for number, batch, records, prompts in measured.beside:
        _beside(samples, number, batch, records, [step for one in prompts for step in steps.get(one.request_id, [])])
    return samples


def _times(record: RequestRecord) -> list[float]:
    """When each token came."""
    assert record.first_s is not None
    return list(accumulate((gap / 1000 for gap in record.gaps_ms), initial=record.first_s))


def _together(records: Sequence[RequestRecord]) -> tuple[float, float]:
    """Returns when all streams have begun to run together, and when the first of them ends."""
    times = [_times(record) for record in records]
    return max(one[1] for one in times if len(one) > 1), min(one[-1] for one in times)


def _steady(records: Sequence[RequestRecord], batch: MeasuredBatch) -> list[float]:
    """Returns the gaps in seconds while all streams run; none if they did not run together for long enough."""
    begin, end = _together(records)
    times = [_times(record) for record in records]
    gaps = [later - earlier for one in times for earlier, later in pairwise(one) if earlier >= begin and later <= end]
    return gaps if len(gaps) >= 8 * batch.sequences else []


def _mean_step(
    records: Sequence[RequestRecord], batch: MeasuredBatch, gaps: Sequence[float], number: int
) -> StepSample:
    begin, end = _together(records)
    done = sum(sum(1 for at in _times(one) if at <= (begin + end) / 2) for one in records)
    kv_tokens = batch.sequences * batch.context_tokens + done
    return StepSample(batch.sequences, kv_tokens, 1000 * fmean(gaps), number)


def _hand_over(record: RequestRecord, logged: Logged, steps: Mapping[str, Sequence[LoggedStep]]) -> HandOver | None:
    done, own = logged.hand_overs.get(record.request_id), steps.get(record.request_id)
    if done is None or not own:
        return None
    return HandOver(own[-1].tokens, done.kv_bytes / record.prompt_asked, done.transfer_ms)


def _beside(
    samples: Samples,
    number: int,
    batch: MeasuredBatch,
    records: Sequence[RequestRecord],
    computed: Sequence[LoggedStep],
) -> None:
    """Adds steps and gaps from the time when both roles were busy. Coordinator and client use the same monotonic clock of this
    machine."""
    times = [_times(record) for record in records]
    begin, end = max(one[1] for one in times), min(one[-1] for one in times)
    inside = [step for step in computed if begin + step.ms / 1000 <= step.at_s <= end]
    samples.prefill_beside += [StepSample(step.tokens, step.pairs, step.ms, number) for step in inside]
    if not inside:
        return
    first_s, last_s = inside[0].at_s - inside[0].ms / 1000, inside[-1].at_s
    gaps = [
        later - earlier
        for one in times
        for earlier, later in pairwise(one)
        if first_s <= later and earlier <= last_s and later <= end
    ]
    busy = sum(step.ms for step in inside) / 1000 / max(last_s - first_s, 1e-9)
    if gaps and busy > 0:
        kv_tokens = batch.sequences * (batch.context_tokens + batch.output_tokens / 2)
        samples.decode_beside.append(
            (StepSample(batch.sequences, kv_tokens, 1000 * fmean(gaps), number), min(busy, 1.0))
        )


def transport_of(logged: Logged) -> str:
    roles = {Role.PREFILL, Role.DECODE} & logged.capacities.keys()
    return "one host" if len(roles) == 2 and len(logged.hosts) == 1 else "several hosts"
