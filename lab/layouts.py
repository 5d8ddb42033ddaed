"""Layouts of cards: how many workers of each phase, and over how many cards a worker of each phase is split. Pure.

A degree of tensor parallelism is a kind of worker: each has a profile of its own, and a layout of two degrees is played with
both, like prefill and decode workers of different hardware.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import ceil
from typing import Any, Final

from lab.advise import Workers
from lab.profile import Profile, merged
from lab.search import Candidate, Space, spread
from proto.errors import CrossdockError

HOST_CARDS: Final = 8  # that a worker can be split over, and in a host of the answer
EACH_MAX: Final = 6  # layouts of one pair of degrees that use all cards, at even distances
SMALLER: Final = (0.75, 0.5, 0.25)  # parts of the cards that might be enough
_LAYOUT: Final = re.compile(
    r"^(?:(\d{1,2})P(?:@TP(\d))?\+?(\d{1,2})D(?:@TP(\d))?|(?P<mixed>\d{1,2})M(?:@TP(\d))?)\Z", re.IGNORECASE
)


class LayoutError(CrossdockError):
    """A layout that cannot be read, or for which there are not the cards or the memory."""


def parsed(text: str) -> Candidate:
    """Reads `2P@TP2+1D@TP4` or `4M@TP2`; without @TP, a worker has one card. Raises `LayoutError`."""
    found = _LAYOUT.match(text)
    numbers = [int(one) for one in found.groups("1")] if found else []
    if found is None or not 1 <= min(numbers) <= max(numbers[1::2]) <= HOST_CARDS:
        raise LayoutError(f"has {text!r}, which is not a layout like 2P@TP2+1D@TP4 or 4M@TP2")
    prefill, of_prefill, decode, of_decode, mixed, of_mixed = numbers
    if found["mixed"]:
        return Candidate(Workers(0, 0, mixed), step_tokens=0, cards=(of_mixed, of_mixed))
    return Candidate(Workers(prefill, decode), step_tokens=0, cards=(of_prefill, of_decode))


@dataclass(frozen=True)
class LayoutSpace(Space):
    """`budget` counts cards; `cost_per_hour` of the profiles is that of a worker."""

    profiles: Mapping[int, Profile] = field(default_factory=dict)  # by degree
    named: tuple[Candidate, ...] = ()  # in place of all layouts
    twice: frozenset[int] | None = None  # degrees whose workers can be mixed: they hold two contexts; None: all

    @cached_property
    def _merged(self) -> dict[tuple[int, int], Profile]:
        pairs = product(self.profiles, repeat=2)
        return {(p, d): self.profiles[p] if p == d else merged(self.profiles[p], self.profiles[d]) for p, d in pairs}

    def profile_of(self, profile: Profile, one: Candidate) -> Profile:
        return self._merged[one.cards]

    def candidates(self) -> list[Candidate]:
        totals = {self.budget: EACH_MAX} | {round(part * self.budget): 2 for part in SMALLER}
        found = list(self.named)
        if not found:
            for total, most in totals.items():
                for layouts in self._by_pair(total).values():
                    found += spread(layouts, most)
        settings = product(found, self.step_tokens, self.seqs_max)
        return [Candidate(one.workers, step, seqs, one.cards) for one, step, seqs in settings]

    def around(self, one: Candidate) -> list[Candidate]:
        """Returns the layouts of the same degrees and as many cards, between the neighbours that `candidates` has."""
        layouts = self._by_pair(one.all_cards)[one.cards] if not self.named else []
        far = -(-len(layouts) // EACH_MAX)
        at = [place for place, other in enumerate(layouts) if other.workers == one.workers]
        near = layouts[max(at[0] - far, 0) : at[0] + far + 1] if at and far > 1 else []
        return [
            Candidate(other.workers, one.step_tokens, one.seqs_max, one.cards)
            for other in near
            if not other.workers.mixed
        ]

    def _by_pair(self, total: int) -> dict[tuple[int, int], list[Candidate]]:
        """Returns the layouts that use exactly so many cards, by the degrees of both phases."""
        found = {}
        for prefill, decode in product(self.profiles, repeat=2):
            counts = [(n, total - n * prefill) for n in range(1, -(-total // prefill))]
            pairs = [Workers(n, left // decode) for n, left in counts if left >= decode and left % decode == 0]
            can_mix = self.mixed and prefill == decode and (self.twice is None or decode in self.twice)
            if can_mix and total and total % decode == 0:
                pairs.append(Workers(0, 0, total // decode))
            found[prefill, decode] = [Candidate(one, 0, cards=(prefill, decode)) for one in pairs]
        return found


def cards_enough(one: Candidate, load_kept: float) -> int:
    """Returns about how many cards would keep the SLO, where this layout keeps it up to `load_kept` times the load; 0: no
    number would, because it keeps it at no load."""
    if load_kept <= 0:
        return 0
    step = max(one.cards)
    return step * ceil(one.all_cards / load_kept / step)


def context_kept(profile: Profile, longest: int) -> int:
    """Returns the context that workers should be bounded to, in tokens, because their memory does not hold the model's own; 0:
    it does. `longest`: of the requests, which the workers have memory for."""
    capacities = profile.prefill_capacity, profile.decode_capacity
    small = [one.context_tokens for one in capacities if one.context_tokens >= one.kv_tokens // 2]
    return max(min(small), longest) if small else 0


def cluster_toml(one: Candidate, model: str, profile: Profile, longest: int = 0) -> list[str]:
    """Returns a whole cluster.toml that starts this layout on hosts of `HOST_CARDS` cards. `longest`: tokens of a request."""
    workers, (prefill, decode) = one.workers, one.cards
    roles = ("prefill", workers.prefill, prefill), ("decode", workers.decode, decode), ("mixed", workers.mixed, decode)
    lines = [f'model = "{model}"', 'keys = "keys"']
    hosts = _hosts([(role, degree) for role, count, degree in roles for _ in range(count)])
    for number, there in enumerate(hosts):
        counts = Workers(*(sum(role == name for name, _ in there) for role in ("prefill", "decode", "mixed")))
        lines += ["", f"[hosts.gpu{number}]", f'address = "10.0.0.{number + 1}"']
        lines += ["coordinator = true", "gateways = 1"] if not number else []
        first, gpus = 0, list[Any]()
        for _, degree in there:
            gpus.append(list(range(first, first + degree)) if degree > 1 else first)
            first += degree
        lines += [f'workers = "{counts}"', f"gpus = {gpus}"]
    lines += ["", "[worker]", 'engine = "vllm"']
    lines += [f"max_model_len = {context}"] if (context := context_kept(profile, longest)) else []
    for role, count, degree in roles:
        options = [f'vllm_args = "--tensor-parallel-size {degree}"'] if degree > 1 else []
        options += [f"max_seqs = {one.seqs_max}"] if one.seqs_max and role != "prefill" else []
        lines += ["", f"[{role}]", *options] if count and options else []
    if one.step_tokens != profile.step_tokens:
        lines += ["", "[coordinator]", f"step_tokens = {one.step_tokens}"]
    return lines


def _hosts(workers: Sequence[tuple[str, int]]) -> list[list[tuple[str, int]]]:
    """Puts workers, the largest first, on as few hosts as their cards allow."""
    hosts: list[list[tuple[str, int]]] = []
    for worker in sorted(workers, key=lambda one: -one[1]):
        host = next((one for one in hosts if sum(n for _, n in one) + worker[1] <= HOST_CARDS), None)
        if host is None:
            hosts.append(host := [])
        host.append(worker)
    order = "prefill", "decode", "mixed"
    return [sorted(host, key=lambda one: order.index(one[0])) for host in hosts]
