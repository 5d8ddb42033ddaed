"""The fast simulator by itself: closed forms, failures, stragglers, caches, mixed workers."""

import numpy as np
import pytest

from coordinator.kv_admission.admission import KvAdmission
from coordinator.kv_admission.demand import KvDemand
from tests.tuning.profiles import GPU
from tuning.advise import Slo, Workers
from tuning.bounds import attainable
from tuning.goals import Goals
from tuning.profile import Curve, DecodeCost
from tuning.search import Space, search
from tuning.simulator.batch import Batch
from tuning.simulator.cluster import Simulator
from tuning.simulator.gaps import Gaps
from tuning.simulator.job import Job, Sent
from tuning.simulator.options import Failure, Options
from tuning.simulator.room import Room
from tuning.traffic import excerpt

SLO = Slo(500.0, 25.0)


def traffic(per_s: float, count: int, prompt: float = 6.5, output: float = 4.5, seed: int = 3) -> list[Sent]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / per_s, count)).tolist()
    prompts = np.clip(rng.lognormal(prompt, 0.8, count), 4, 6000).astype(int).tolist()
    outputs = np.clip(rng.lognormal(output, 0.6, count), 1, 900).astype(int).tolist()
    return [Sent(*one) for one in zip(times, prompts, outputs, strict=True)]


def test_a_batch_in_closed_form_is_its_steps_one_by_one() -> None:
    cost, rng = DecodeCost(Curve((1.0, 4.0, 16.0), (10.0, 11.0, 20.0)), 3e-3), np.random.default_rng(7)
    for _ in range(20):
        jobs = [Job(n, Sent(0.0, int(rng.integers(5, 900)), int(rng.integers(2, 60))), 256) for n in range(8)]
        comes = np.sort(rng.uniform(0, 0.4, 8)).tolist()
        batch, ends = Batch(0, cost, Room(10**6, 16), 100, Gaps()), {}
        for job, at_s in zip(jobs, comes, strict=True):
            while batch.next_end_s() <= at_s:
                now = batch.next_end_s()
                ends.update((one.number, now) for one in batch.ended())
            batch.room.place(job.number, job.prompt, job.output, 0)
            job.first_s = job.last_s = at_s
            batch.join(job, at_s)
        while batch.sequences:
            now = batch.next_end_s()
            ends.update((one.number, now) for one in batch.ended())
        assert ends == pytest.approx(_stepwise(cost, jobs, comes), rel=1e-9)


def _stepwise(cost: DecodeCost, jobs: list[Job], comes: list[float]) -> dict[int, float]:
    now, running, waiting, ends = 0.0, {}, list(zip(comes, jobs, strict=True)), {}
    while waiting or running:
        now = now if running else max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            job = waiting.pop(0)[1]
            running[job.number] = [job.prompt + 1, job.output - 1]
        now += cost.step_ms(len(running), sum(kv for kv, _ in running.values())) / 1000
        for number, state in list(running.items()):
            state[0] += 1
            state[1] -= 1
            if not state[1]:
                ends[number] = now
                del running[number]
    return ends


def test_room_is_that_of_the_production_admission() -> None:
    rng = np.random.default_rng(2)
    room, whole, there, steps = Room(300, 16), KvAdmission(300, 16), [], 0
    for number in range(400):
        prompt, output = int(rng.integers(1, 900)), int(rng.integers(1, 400))
        steps += int(rng.integers(0, 20))
        whole.reached(steps)
        fits = room.fits(prompt, output, steps)
        assert fits == whole.fits(KvDemand(prompt, output - 1))
        if fits:
            room.place(number, prompt, output, steps)
            whole.place((str(number), 1), KvDemand(prompt, output - 1))
            if number % 3:
                room.joined(number, steps)
                whole.joined((str(number), 1), steps)
            there.append(number)
        while len(there) > 6 or (there and rng.random() < 0.4):
            gone = there.pop(0)
            room.release(gone)
            whole.release((str(gone), 1))


def test_every_request_ends_though_workers_are_lost_and_slow() -> None:
    sent = traffic(8.0, 600)
    failures = tuple(Failure(5.0 + 9 * n, n % 5, 4.0) for n in range(7))
    for workers in (Workers(2, 3), Workers(0, 0, 5)):
        calm = Simulator(GPU, workers, sent).run()
        bad = Simulator(GPU, workers, sent, Options(failures=failures, slow=((1, 2.5),))).run()
        for outcome in (calm, bad):
            assert not np.isnan(outcome.ttft_ms).any()
            assert (outcome.tpot_ms[outcome.output_tokens > 1] > 0).all()
        assert bad.attainment(SLO) < calm.attainment(SLO)


def test_cached_prompts_are_neither_computed_nor_waited_for() -> None:
    sent = traffic(20.0, 800)
    cold, warm = (Simulator(GPU, Workers(2, 2), sent, Options(hit_rate=rate)).run() for rate in (0.0, 0.6))
    assert warm.prefill_busy < 0.6 * cold.prefill_busy
    assert np.quantile(warm.ttft_ms, 0.9) < np.quantile(cold.ttft_ms, 0.9)
    again = [one._replace(prompt_tokens=1030, blocks=(n % 3, n % 3 + 100)) for n, one in enumerate(sent)]
    hits = Simulator(GPU, Workers(2, 2), again).run()
    assert hits.cached_tokens[100:].mean() > 900


def test_mixed_workers_slow_streams_and_separate_ones_do_not() -> None:
    sent = traffic(8.0, 800, prompt=7.2)
    apart, mixed = (Simulator(GPU, workers, sent).run() for workers in (Workers(2, 2), Workers(0, 0, 4)))
    assert np.nanquantile(mixed.tpot_ms, 0.9) > 1.2 * np.nanquantile(apart.tpot_ms, 0.9)


def test_a_mixed_workers_steps_take_turns() -> None:
    """A prompt of four chunks beside a stream waits for the decode step under way, and for one between its chunks each."""
    sent = [Sent(0.0, 16, 400), Sent(1.0, 1024, 2)]
    apart, mixed = (Simulator(GPU, workers, sent).run() for workers in (Workers(1, 1), Workers(0, 0, 1)))
    step_ms = GPU.decode.curve(1)
    longer = float(mixed.ttft_ms[1] - apart.ttft_ms[1])
    assert 3 * step_ms < longer < 4 * step_ms + 0.2, longer
    # The stream stands still for the four chunks, and no longer.
    chunks_ms = float(apart.ttft_ms[1]) - GPU.host.request_ms
    assert 399 * float(mixed.tpot_ms[0] - apart.tpot_ms[0]) == pytest.approx(chunks_ms, rel=0.1)


def test_a_mixed_worker_has_one_pool_for_both() -> None:
    simulator = Simulator(GPU, Workers(1, 1, 1), traffic(1.0, 10))
    separate, own = simulator.batches
    assert separate.room.kv_blocks == simulator.prefill[0].free_blocks == 8192
    assert own.room.kv_blocks + simulator.prefill[1].free_blocks == 8192


def test_the_crossover_is_found() -> None:
    """Short prompts and long answers on two workers: two mixed ones decode with both. Long prompts and a strict limit on
    gaps: separate ones."""
    goals = Goals(Slo(2000.0, 22.0))
    short = search(GPU, traffic(9.0, 1500, prompt=3.5, output=6.0), goals, Space(2))
    assert short.best.candidate.workers.mixed == 2, short.best
    long = search(GPU, traffic(3.0, 1500, prompt=7.5, output=4.0), Goals(Slo(1500.0, 16.0)), Space(2))
    assert long.best.candidate.workers == Workers(1, 1), long.best


def test_no_run_beats_its_bound() -> None:
    sent, goals = traffic(30.0, 1000), Goals(SLO)
    for workers in (Workers(1, 1), Workers(1, 3), Workers(4, 1), Workers(0, 0, 2)):
        bound = attainable(GPU, workers, sent, goals, Options())
        assert Simulator(GPU, workers, sent).run().attainment(SLO) <= bound


def test_limits_of_a_class_are_its_own() -> None:
    sent = [one._replace(priority="batch" if n % 2 else "interactive") for n, one in enumerate(traffic(10.0, 400))]
    outcome = Simulator(GPU, Workers(1, 2), sent).run()
    goals = Goals(SLO, {"batch": Slo(1e6, 1e6)})
    assert outcome.good(goals)[1::2].all()
    assert not outcome.good(goals)[::2].all()
    first = [np.mean(outcome.ttft_ms[place::2]) for place in (0, 1)]
    assert first[0] < first[1], "interactive requests go first"


def test_an_excerpt_has_windows_of_the_whole_trace() -> None:
    sent = traffic(10.0, 6000)
    part = excerpt(sent, 1200)
    assert 1100 <= len(part) <= 1200
    assert [one.at_s for one in part] == sorted(one.at_s for one in part)
    assert excerpt(sent, 10_000) == sent
