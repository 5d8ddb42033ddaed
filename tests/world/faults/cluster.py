"""The simulated cluster: its processes, a supervisor that starts them again, and the faults that a plan names."""

from collections.abc import Sequence

from coordinator.policy_versions import Trial, Versions
from proto.drain import DrainRequest, FlipRequest
from proto.messages import Role
from runtime.tenancy.tenants import tables_of, without_secrets
from tests.world.faults.coordinator_process import CoordinatorProcess
from tests.world.faults.gateway_process import SimulatedGateway
from tests.world.faults.ledger import CheckedLedger
from tests.world.faults.oracles import Oracles
from tests.world.faults.plan import OTHER_POLICY, TENANTS, Asked, Fault, FaultPlan
from tests.world.faults.surroundings import FaultSurroundings
from tests.world.faults.worker_process import role_of
from tests.world.faults.worker_processes import DecodeProcess, PrefillProcess, line_up
from tests.world.network import Network
from tests.world.world import SimulatedProcess

ANEW_S = 0.1
"""A coordinator that was away begins anew after this time."""
FLIP_S_MAX = 0.05
"""Longest time between the end of one role and the beginning of the other."""
SLOW_STEPS, SLOW_FRAMES_S, SLOW_DISK_S = 15.0, 0.2, 0.4


class FaultCluster(FaultSurroundings):
    def __init__(self, plan: FaultPlan) -> None:
        super().__init__(plan.seed)
        self.plan = plan
        self.network = Network(self)
        self.network.hostility = plan.hostility
        self.network.corrupt = plan.corrupt
        self.slow_disk_s = 0.0
        self.ledger = CheckedLedger()
        self.versions = Versions()
        self.versions.load(tables_of(TENANTS), {}, 0.0)
        self.oracles = Oracles(plan, self, self.ledger)
        self.processes: dict[str, SimulatedProcess] = {}
        self.healing = False
        self._partitions: list[tuple[str, str]] = []
        self._leaving: dict[str, float] = {}
        """Workers that are about to end, and the time until they are started again."""
        for name in plan.processes:
            self.start(name)
        for asked in plan.asked:
            self.at(asked.at_s, self.ask, asked)
        for fault in plan.faults:
            self.at(fault.at_s, self.inject, fault)

    @property
    def coordinator(self) -> CoordinatorProcess:
        process = self.processes["coordinator"]
        assert isinstance(process, CoordinatorProcess)
        return process

    @property
    def workers(self) -> list[PrefillProcess | DecodeProcess]:
        """All workers under which the worker processes have registered."""
        return [one for process in self.processes.values() for one in self._all_of(process)]

    @property
    def gateways(self) -> list[SimulatedGateway]:
        return [p for p in self.processes.values() if isinstance(p, SimulatedGateway)]

    def start(self, name: str) -> None:
        self._leaving.pop(name, None)
        role, started = name.partition("-")[0], list[SimulatedProcess]()
        if role in ("coordinator", "gateway"):
            started = [CoordinatorProcess(self) if role == "coordinator" else SimulatedGateway(self, name)]
        else:
            started += line_up(self, name, Role(role))
        self._begin(started, "starts")

    def _begin(self, started: Sequence[SimulatedProcess], what: str) -> None:
        self.processes[started[0].name] = started[0]
        for process in started:
            process.log(what)
            process.start()

    def _all_of(self, process: SimulatedProcess) -> list[PrefillProcess | DecodeProcess]:
        """Returns the workers under which this process has registered; empty if it is no worker process."""
        if not isinstance(process, PrefillProcess | DecodeProcess):
            return []
        return [one for one in process.lineup.halves if isinstance(one, PrefillProcess | DecodeProcess)]

    def _parts_of(self, process: SimulatedProcess) -> Sequence[SimulatedProcess]:
        return self._all_of(process) or [process]

    def ask(self, asked: Asked) -> None:
        """Sends a client's request; if its gateway is dead or stuck, the client goes away."""
        gateway = self.processes[f"gateway-{asked.gateway}"]
        assert isinstance(gateway, SimulatedGateway)
        if gateway.alive:
            gateway.call(gateway.ask, asked)

    # --- faults ---------------------------------------------------------------------------------------------------------

    def inject(self, fault: Fault) -> None:
        process = self.processes[fault.who]
        if self.healing or not process.alive:
            return
        self.injected[f"{fault.kind} {fault.how}".strip()] += 1
        self.log("world", "fault", str(fault))
        match fault.kind:
            case "crash":
                self.end(process, fault.for_s)
            case "pause":
                for part in self._parts_of(process):
                    part.pause()
                self.network.suspect_all()
                self.after(fault.for_s, self._resume, process)
            case "partition":
                self._partition(fault)
            case "cut":
                self._cut(process, fault.how)
            case "slow":
                self._slow(process, fault.how, True)
                self.after(fault.for_s, self._slow, process, fault.how, False)
            case "drain":
                self._drain(process, fault)
            case "flip":
                assert isinstance(process, PrefillProcess | DecodeProcess)
                process.lineup.flip_ends = fault.how
                self._order_flip(process, Role(fault.other), fault.grace_s, fault.how == "by force")
            case "policy":
                self._change_policy(fault.how)
                process.call(self.coordinator.put_in_force)
            case "step":
                for worker in self._all_of(process):
                    worker.fail_step = fault.how
            case "hang":
                self.random.choice(self._all_of(process)).hang_s = fault.for_s
            case "transfer":
                for worker in self._all_of(process):
                    worker.call(worker.break_pair)

    def _change_policy(self, how: str) -> None:
        versions = self.versions
        base, other = (without_secrets(tables_of(text)) for text in (TENANTS, OTHER_POLICY))
        if versions.get(versions.active).tables == other:
            other = base
        match how:
            case "tried":
                versions.try_(other, {}, Trial(0, 0.5), self.now)
            case "promoted":
                versions.promote(other, {}, self.now)
            case "rolled back" if versions.before:
                versions.roll_back(0, {}, self.now)

    def end(self, process: SimulatedProcess, for_s: float) -> None:
        """Ends a process without warning, and starts it again after `for_s`."""
        for part in self._parts_of(process):
            if part.alive:
                part.stop()
                self.network.process_died(part)
        if isinstance(process, SimulatedGateway):
            self.oracles.gateway_died(process.name)
        self.network.suspect_all()
        self.after(for_s, self._restart, process)

    def _drain(self, process: SimulatedProcess, fault: Fault) -> None:
        if isinstance(process, CoordinatorProcess):
            process.commit()
            self._end(process, fault.for_s)
        elif fault.how == "by order":
            self.coordinator.ask(DrainRequest(process.name, False, 1000 * fault.grace_s))
            self.after(fault.for_s, self._undo_drain, process.name)
        elif process.name not in self._leaving:
            self._leaving[process.name] = fault.for_s
            for worker in self._all_of(process):
                worker.call(worker.drain, fault.grace_s)

    def _undo_drain(self, name: str) -> None:
        """Puts a drained worker back, as a person would, and tries again until that is done."""
        put_back = True
        for worker in self._all_of(self.processes[name]):
            known = self.coordinator.core.cluster.workers.get(worker.incarnation)
            drained = worker.registration.service.hand_over_ms(0.0)
            put_back &= known is not None and not known.draining and drained is None
        if name in self._leaving or (put_back and not self.coordinator.paused):
            return
        self.coordinator.ask(DrainRequest(name, True, 0.0))
        self.after(0.5, self._undo_drain, name)

    def worker_goes(self, worker: SimulatedProcess, why: str) -> None:
        assert isinstance(worker, PrefillProcess | DecodeProcess)
        self.oracles.goes(worker, worker.registration.held(), why)
        worker.stop()
        self.network.process_died(worker, in_order=True)
        self.network.suspect_all()
        if not any(other.alive for other in self._all_of(worker)):
            self.after(self._leaving.pop(worker.name), self._restart, worker)

    # --- changes of role ------------------------------------------------------------------------------------------------

    def _order_flip(self, worker: SimulatedProcess, role: Role, hand_over_s: float, force: bool = False) -> None:
        self.coordinator.ask(FlipRequest(worker.name, role, 1000 * hand_over_s, force))

    def worker_flips(self, worker: SimulatedProcess) -> None:
        assert isinstance(worker, PrefillProcess | DecodeProcess)
        for half in self._all_of(worker):
            self.oracles.flips(half, half.registration.held(), half.allocator, half.moves_nothing)
            half.allocator.close()
            half.stop()
            self.network.process_died(half, in_order=True)
        self.network.suspect_all()
        self.after(self.random.uniform(0.0, FLIP_S_MAX), self._start_flipped, worker)

    def _start_flipped(self, worker: PrefillProcess | DecodeProcess) -> None:
        if self.processes[worker.name] is not worker:
            return  # it was killed and started again meanwhile
        role = worker.lineup.next_role
        assert role is not None
        self._begin(line_up(self, worker.name, role, worker.lineup), f"starts as a {role} worker")

    def _flip_back(self) -> None:
        """Gives every worker its own role again, as a person would. Repeats this, since a worker may just be changing its
        role."""
        for name in self.plan.workers:
            worker = self.processes[name]
            assert isinstance(worker, PrefillProcess | DecodeProcess)
            if worker.lineup.role is not role_of(name):
                worker.lineup.flip_ends = ""
                self._order_flip(worker, role_of(name), 0.0, force=True)
        self.after(0.5, self._flip_back)

    def begins_anew(self, coordinator: SimulatedProcess) -> None:
        """Starts the coordinator again after a stall: in the same process, with a new incarnation."""
        assert isinstance(coordinator, CoordinatorProcess)
        self.injected["absence"] += 1
        coordinator.log("was away")
        coordinator.commit()
        self._end(coordinator, ANEW_S)

    def _end(self, process: SimulatedProcess, for_s: float) -> None:
        """End the process in order, and start it again after a while."""
        process.stop()
        self.network.process_died(process, in_order=True)
        self.network.suspect_all()
        self.after(for_s, self._restart, process)

    def _restart(self, process: SimulatedProcess) -> None:
        if self.processes[process.name] is self._parts_of(process)[0]:
            self.start(process.name)

    def _resume(self, process: SimulatedProcess) -> None:
        if process.paused:
            self.log(process.name, "resumes")
            for part in self._parts_of(process):
                part.resume()

    def _partition(self, fault: Fault) -> None:
        ways = [(fault.who, fault.other)]
        if fault.how != "one way":
            ways.append((fault.other, fault.who))
        self.network.partition(*ways)
        self._partitions += ways
        self.after(fault.for_s, self._mend, *ways)

    def _mend(self, *ways: tuple[str, str]) -> None:
        ways = tuple(way for way in ways if way in self._partitions)
        for way in ways:
            self._partitions.remove(way)
        self.network.mend(*ways)

    def _cut(self, process: SimulatedProcess, how: str) -> None:
        parts = self._parts_of(process)
        for wire in list(self.network.wires):
            if any(part in wire.processes for part in parts) and self.random.random() < 0.7:
                if how == "hole":
                    wire.hole[self.random.randrange(2)] = True
                else:
                    wire.cut(0.5)
        self.network.suspect_all()

    def _slow(self, process: SimulatedProcess, how: str, on: bool) -> None:
        if how == "disk":
            self.slow_disk_s = SLOW_DISK_S if on else 0.0
        elif how == "frames":
            self.network.slow.pop(process.name, None)
            if on:
                self.network.slow[process.name] = SLOW_FRAMES_S
        for worker in self._all_of(process) if how == "steps" else ():
            worker.slow = SLOW_STEPS if on else 1.0

    # --- healing --------------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Ends all faults and repairs their effects: all processes are up, reach each other, and run."""
        self.healing = True
        self.log("world", "healing")
        self.network.hostility = None
        self.network.corrupt = self.slow_disk_s = 0.0
        self.network.slow.clear()
        self._mend(*self._partitions)
        for process in list(self.processes.values()):
            if not any(part.alive for part in self._parts_of(process)):
                self._restart(process)
            self._resume(process)
        for worker in self.workers:
            worker.slow, worker.fail_step, worker.hang_s, worker.lineup.flip_ends = 1.0, "", 0.0, ""
        self.network.break_robbed()
        self._flip_back()
