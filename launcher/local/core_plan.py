"""The CPU cores of each process. Pure: cores in, a plan out.

On CPU the phases are kept apart by cores: decode workers get cores of their own, so that nothing else runs between two tokens;
prefill workers and the control processes share the rest. Prefill workers are niced there, so that the coordinator and the
gateway, which need little time but need it at once, run before them. A mixed worker is seated like a decode worker; where all
are mixed, they and the control processes share all cores, and they are niced.
"""

from dataclasses import dataclass, replace

PREFILL_NICE = 10


@dataclass(frozen=True)
class CoreAssignment:
    """The cores and threads of one worker; `cores` empty: not pinned."""

    cores: tuple[int, ...]
    threads: int
    nice: int


@dataclass(frozen=True)
class CpuPlan:
    control: tuple[int, ...]  # cores of coordinator, gateway and launcher; empty: not pinned
    prefill: tuple[CoreAssignment, ...]
    decode: tuple[CoreAssignment, ...]
    mixed: tuple[CoreAssignment, ...] = ()
    note: str = ""


def plan_cpu(
    cores: tuple[int, ...], *, prefill: int, decode: int, on_gpu: bool, mixed: int = 0, threads: int = 0
) -> CpuPlan:
    """Plans the cores. `cores`: those this process may use. `threads` of each worker; 0: as many as its cores. A worker never
    gets more threads than cores."""
    assert cores and prefill + decode + mixed >= 1 and threads >= 0
    if on_gpu:
        seat = CoreAssignment((), threads or 1, 0)
        return CpuPlan((), (seat,) * prefill, (seat,) * decode, (seat,) * mixed)
    if mixed and not prefill and not decode:
        return _all_mixed(tuple(sorted(cores)), mixed, threads)
    plan = _phases_apart(cores, prefill, decode + mixed, threads)
    return replace(plan, decode=plan.decode[:decode], mixed=plan.decode[decode:])


def _all_mixed(cores: tuple[int, ...], mixed: int, threads: int) -> CpuPlan:
    sets = _share(cores, mixed)
    size = len(sets[0])
    notes = [_cut(threads, size)] if threads > size else []
    if mixed > len(cores):
        notes.append(f"{mixed} mixed workers share {len(cores)} core(s) and will slow each other")
    seats = tuple(CoreAssignment(chosen, min(threads or size, size), PREFILL_NICE) for chosen in sets)
    return CpuPlan(cores, (), (), seats, "; ".join(notes))


def _phases_apart(cores: tuple[int, ...], prefill: int, decode: int, threads: int) -> CpuPlan:
    if len(cores) == 1:
        notes = []
        if prefill and decode:
            notes.append("only one CPU core: prefill and decode share it, so long prompts will slow running streams")
        if threads > 1:
            notes.append(_cut(threads, 1))
        seats = (CoreAssignment(cores, 1, PREFILL_NICE),) * prefill, (CoreAssignment(cores, 1, 0),) * decode
        return CpuPlan(cores, *seats, note="; ".join(notes))
    cores = tuple(sorted(cores))
    # Decode gets half of the cores, or one for each decode worker if that is more and there are enough; the others keep at
    # least one. If this host has one role only, that role gets the cores of the other, too.
    wanted = 0 if decode == 0 else len(cores) if prefill == 0 else max(decode, len(cores) // 2)
    decode_cores = cores[len(cores) - min(wanted, len(cores) - 1) :]
    decode_sets = _share(decode_cores, decode)
    used = {core for chosen in decode_sets for core in chosen}
    shared = tuple(core for core in cores if core not in used)
    prefill_sets = _share(shared, prefill)
    smallest = min(len(chosen) for chosen in (*decode_sets, *prefill_sets))
    notes = []
    if threads > smallest:
        notes.append(_cut(threads, smallest))
    if decode > len(decode_cores):
        notes.append(f"{decode} decode workers share {len(decode_cores)} core(s) and will slow each other")
    return CpuPlan(
        control=shared,
        prefill=tuple(
            CoreAssignment(chosen, min(threads or len(chosen), len(chosen)), PREFILL_NICE) for chosen in prefill_sets
        ),
        decode=tuple(CoreAssignment(chosen, min(threads or len(chosen), len(chosen)), 0) for chosen in decode_sets),
        note="; ".join(notes),
    )


def _cut(threads: int, cores: int) -> str:
    return f"--threads {threads} is over the {cores} core(s) a worker has here, and cut to that"


def _share(cores: tuple[int, ...], workers: int) -> list[tuple[int, ...]]:
    """Returns equal runs of cores; the remainder is left over. If there are too few cores, the workers get one core each, in
    turn."""
    each = len(cores) // max(1, workers)
    if each == 0:
        return [(cores[index % len(cores)],) for index in range(workers)]
    return [cores[index * each : (index + 1) * each] for index in range(workers)]
