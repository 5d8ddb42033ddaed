"""One small tenant beside another's attack, through the whole core, in virtual time: its TTFT against what it has alone."""

import random
from collections.abc import Callable

import pytest

from coordinator.events import Limits
from lab.cluster.surroundings import Timing
from runtime.tenancy.priority_classes import PriorityClass
from tests.helpers import first, p99
from tests.uniform_cluster import UniformCluster

SECONDS = 40.0
PREFILL_BLOCKS = 1 << 16
"""A million tokens: far fewer than the attackers' prompts have together."""
Attack = Callable[[UniformCluster, random.Random], None]


def poisson(world: UniformCluster, rnd: random.Random, per_s: float, what: Callable[[int], None]) -> None:
    """`what(number)` at random times."""
    now, number = 0.0, 0
    while (now := now + rnd.expovariate(per_s)) < SECONDS:
        world.at(now, what, number)
        number += 1


def flood_of_long_prompts(world: UniformCluster, rnd: random.Random) -> None:
    """A hundred times the victim's tokens."""
    poisson(world, rnd, 0.5 * 512 * 100 / 8192, lambda n: world.submit(f"a{n}", "abuser", 8192))


def cancel_spam(world: UniformCluster, rnd: random.Random) -> None:
    """Long prompts, each cancelled soon after it came."""

    def come_and_go(n: int) -> None:
        world.submit(f"a{n}", "abuser", 8192, max_tokens=4096)
        world.at(world.now + rnd.uniform(0, 1.0), world.cancel, f"a{n}")

    poisson(world, rnd, 40, come_and_go)


def flood_of_one_token_requests(world: UniformCluster, rnd: random.Random) -> None:
    poisson(world, rnd, 400, lambda n: world.submit(f"a{n}", "abuser", 1, max_tokens=1))


def a_thousand_keys_of_one_organisation(world: UniformCluster, rnd: random.Random) -> None:
    poisson(world, rnd, 30, lambda n: world.submit(f"a{n}", f"abuser/user{n % 1000}", 2048))


NO_TARGETS = Limits(priority_classes={"standard": PriorityClass()})
"""Nothing is refused, or finished before its turn because it was promised to come in time."""


def victims_ttft_s(seed: int, attack: Attack | None, limits: Limits = NO_TARGETS) -> list[float]:
    world = UniformCluster(limits, Timing(prefill_step_s=0.002), prefill_blocks=PREFILL_BLOCKS)
    rnd = random.Random(seed)
    poisson(world, rnd, 0.5, lambda n: world.submit(f"v{n}", "victim", 512))
    if attack is not None:
        attack(world, random.Random(seed + 1000))
    world.run(SECONDS + 5.0)
    assert not [r for r in world.rejected if r.request_id.startswith("v")], seed
    return [ttft_s for name, ttft_s in world.ttft_s.items() if name.startswith("v")]


ATTACKS = pytest.mark.parametrize(
    ("attack", "at_most"),
    [
        (flood_of_long_prompts, 2.0),
        (cancel_spam, 2.5),
        (flood_of_one_token_requests, 2.5),
        (a_thousand_keys_of_one_organisation, 2.5),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)


def compare(seeds: range, attack: Attack, at_most: float) -> None:
    alone = [ttft_s for seed in seeds for ttft_s in victims_ttft_s(seed, None)]
    beside = [ttft_s for seed in seeds for ttft_s in victims_ttft_s(seed, attack)]
    assert len(beside) == len(alone) > 15 * len(seeds)
    assert p99(beside) <= at_most * p99(alone), (seeds, p99(alone), p99(beside))


@ATTACKS
def test_attack_hardly_moves_victim_ttft(attack: Attack, at_most: float) -> None:
    """An attack by another tenant hardly changes the victim's TTFT."""
    compare(range(1), attack, at_most)


@pytest.mark.parametrize("seed", first(1, range(4)))
def test_promised_prompts_delay_victim_briefly(seed: int) -> None:
    """Default targets: prompts promised in time may delay one request for less than a second, and no other."""
    beside = sorted(victims_ttft_s(seed, a_thousand_keys_of_one_organisation, Limits()))
    assert beside[-1] < 1.0 and beside[-2] < 0.2, beside


@pytest.mark.long
@pytest.mark.timeout(600)
@ATTACKS
def test_attack_hardly_moves_ttft_twenty_seeds(attack: Attack, at_most: float) -> None:
    """An attack by another tenant hardly changes the victim's TTFT over twenty seeds."""
    compare(range(20), attack, at_most)


@pytest.mark.parametrize("users", first(1, [1000, 1, 10, 100]))
def test_many_users_gain_no_advantage(users: int) -> None:
    """An organisation's load disturbs others no more when it is spread over many users."""

    def attack(world: UniformCluster, rnd: random.Random) -> None:
        poisson(world, rnd, 30, lambda n: world.submit(f"a{n}", f"abuser/user{n % users}", 2048))

    compare(range(2), attack, 1.5)
