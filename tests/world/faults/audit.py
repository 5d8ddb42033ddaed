"""The checks after all has healed and ended: nothing is held or owed, and every row is closed and charges the work that was
done."""

from collections import Counter

from coordinator.accounting.billing import LOST
from coordinator.core import Core
from scheduler.lifecycle import RequestState
from tests.world.faults.cluster import FaultCluster
from tests.world.faults.ledger import DAY
from tests.world.faults.oracles import stream_of
from tests.world.faults.worker_process import role_of
from tests.world.faults.worker_processes import DecodeProcess, PrefillProcess
from tests.world.invariants import check
from tests.world.world import SimulationViolation


def unsettled(cluster: FaultCluster) -> str:
    """Returns the work that still goes on; empty if there is none."""
    for stream_id, stream in cluster.oracles.streams.items():
        if not stream.outcome:
            return f"stream {stream_id} has {stream.got} of {[len(a.tokens) for a in stream.answers]} tokens"
    core = cluster.coordinator.core
    if core.cluster.requests:
        return f"requests {[(r.id, r.attempt, r.state.value) for r in core.cluster.requests.values()]}"
    if core.accounts.billing.bills:
        return f"open bills {list(core.accounts.billing.bills)}"
    missing = [worker.name for worker in cluster.workers if worker.incarnation not in core.cluster.workers]
    if missing:
        return f"not registered: {missing}"
    if core.cluster.draining:
        return f"drained still: {[worker.hello.name for worker in core.cluster.draining.values()]}"
    if core.members.flipping:
        return f"changing their roles still: {[flip.name for flip in core.members.flipping.values()]}"
    changed = [worker.name for worker in cluster.workers if worker.lineup.role is not role_of(worker.name)]
    if changed:
        return f"not in their own roles: {changed}"
    for worker in cluster.workers:
        if left := left_on(worker):
            return f"{worker.name} has {left}"
    still_open = [request_id for request_id, row in cluster.ledger.rows.items() if not row.outcome]
    return f"open rows {still_open}" if still_open else ""


def left_on(worker: PrefillProcess | DecodeProcess) -> str:
    core = worker.core
    if isinstance(worker, PrefillProcess):
        held = list(worker.core.table.prompts)
    else:
        held = [*worker.core.table.attempts, *worker.core.undecided]
    if held:
        return f"attempts {held}"
    if not worker.moves_nothing:
        return "transfers"
    return f"{worker.allocator.held_count} blocks held" if core.table.allocator.held_count else ""


def check_blocks(cluster: FaultCluster) -> None:
    """Conservation on every worker."""
    for worker in cluster.workers:
        worker.allocator.check_invariants()


def audit(cluster: FaultCluster) -> None:
    """Checks the cluster when nothing is `unsettled`. Raises `SimulationViolation`, or an assertion of the production code."""
    core = cluster.coordinator.core
    check(core)
    check_blocks(cluster)
    for worker in cluster.workers:
        counted = core.cluster.workers[worker.incarnation]
        if counted.allocations or counted.steps or counted.free_blocks != worker.kv_blocks:
            raise SimulationViolation(
                "block conservation", f"the coordinator counts {counted.allocations} on {worker.name}, idle"
            )
    _check_quotas(cluster, core)
    for request_id in cluster.oracles.accepted:
        if request_id not in cluster.ledger.rows:
            raise SimulationViolation("one row", "it was accepted and has no row", stream_of(request_id))
    _check_rows(cluster)


def _check_quotas(cluster: FaultCluster, core: Core) -> None:
    charged: Counter[str] = Counter()
    again: Counter[str] = Counter()
    for row in cluster.ledger.rows.values():
        organisation, _, user = row.opened.tenant.partition("/")
        for name in {organisation, row.opened.tenant} if user else {organisation}:
            charged[name] += row.charged_tokens
            again[name] += sum(row.before)
    for name, account in core.accounts.billing.quotas.accounts.items():
        if not account.idle:
            raise SimulationViolation("quotas", f"{name} holds something and nothing runs")
        # A coordinator that was started since then can only guess the earlier amount of a row that was opened again.
        if account.day == DAY and abs(account.day_tokens - charged[name]) > again[name]:
            why = f"{name} is counted {account.day_tokens} tokens today, its rows say {charged[name]}"
            raise SimulationViolation("quotas", why)


def _check_rows(cluster: FaultCluster) -> None:
    """Checks that no row charges more than was computed, and that the rows of a whole answer charge at least what was
    delivered."""
    output: Counter[str] = Counter()
    prompt: Counter[str] = Counter()
    outcomes: dict[str, set[str]] = {}
    hostility = cluster.plan.hostility
    # A lossy link (no real one) may lose the word that an attempt was let go. Its worker's steps then still count for its row,
    # up to all that it may have emitted.
    lossy = hostility is not None and hostility.drop > 0
    most: Counter[str] = Counter()
    for request_id, row in cluster.ledger.rows.items():
        stream_id = stream_of(request_id)
        outcomes.setdefault(stream_id, set()).add(row.outcome)
        asked = cluster.oracles.streams[stream_id].asked
        choices = asked.choices if request_id == stream_id else 1
        most[stream_id] += choices * (asked.sampling.max_tokens - row.opened.from_token)
        output[stream_id] += row.output_tokens
        prompt[stream_id] += row.prompt_tokens
    for stream_id, stream in cluster.oracles.streams.items():
        done, ends = cluster.oracles.drawn_tokens[stream_id], outcomes.get(stream_id, set())
        if LOST in ends:
            continue  # charged at its estimate
        if output[stream_id] > (max(done, most[stream_id]) if lossy else done):
            raise SimulationViolation("bills", f"{output[stream_id]} output tokens charged, {done} computed", stream_id)
        if prompt[stream_id] > len(stream.asked.prompt):
            why = f"{prompt[stream_id]} prompt tokens charged of a prompt of {len(stream.asked.prompt)}"
            raise SimulationViolation("bills", why, stream_id)
        if ends == {RequestState.REJECTED} and output[stream_id] + prompt[stream_id]:
            raise SimulationViolation("bills", "it was turned away and charged", stream_id)
        # A gateway that lives says how far an answer got, even if other processes are lost.
        lives = not any(fault.kind == "crash" and fault.who == stream.gateway for fault in cluster.plan.faults)
        if stream.outcome == "well" and lives and hostility is None and output[stream_id] < sum(stream.got):
            why = f"{output[stream_id]} output tokens charged of {sum(stream.got)} delivered"
            raise SimulationViolation("bills", why, stream_id)
