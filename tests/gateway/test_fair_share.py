"""What is bounded for all is divided: a tenant that takes all it can get leaves room for every other."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.shares import FairShare, organisation_of


def fill(share: FairShare, tenant: str) -> int:
    count = 0
    while share.take(tenant):
        count += 1
    return count


def test_next_tenant_gets_half_the_rest() -> None:
    """A tenant alone may hold half, and the next one half of the rest."""
    share = FairShare(1024)
    assert [fill(share, name) for name in "abc"] == [512, 256, 128]


def test_greedy_tenants_reach_equal_shares() -> None:
    """Tenants that take all they can get come to equal shares over time."""
    share, names = FairShare(1000), "abcd"
    held = {name: fill(share, name) for name in names}
    for _ in range(1000):
        for name in names:
            share.give_back(name)
            held[name] -= 1
        for name in names:
            held[name] += fill(share, name)
    assert max(held.values()) - min(held.values()) <= 4 and min(held.values()) >= 1000 // 5 - 2


def test_organisation_users_count_as_one_tenant() -> None:
    """Many users of one organisation share one tenant's part and leave room for each other."""
    share = FairShare(1024)
    first = fill(share, "acme/ann")
    others = sum(fill(share, f"acme/{number}") for number in range(100))
    assert first <= 342 and others > 100 and first + others <= 512
    assert fill(share, "beta") >= 256


def test_fixed_tenant_bound_also_holds() -> None:
    """A fixed bound for each tenant holds beside the dynamic one."""
    share = FairShare(1024, tenant_max=10)
    assert fill(share, "a") == 10 and fill(share, "b/x") == fill(share, "b/y") + 10 == 10


@given(st.lists(st.tuples(st.sampled_from(["a", "b/x", "b/y", "c"]), st.booleans(), st.integers(1, 9)), max_size=200))
def test_newcomer_always_finds_room(steps: list[tuple[str, bool, int]]) -> None:
    """A new tenant finds room at any time, and the share keeps an exact count."""
    share, held = FairShare(64), list[tuple[str, int]]()
    for tenant, takes, amount in steps:
        if takes and share.take(tenant, amount):
            held.append((tenant, amount))
        elif not takes and held:
            share.give_back(*held.pop(0))
        assert share.held == sum(amount for _, amount in held) < 64
        assert share.take("new")
        share.give_back("new")
    for one in held:
        share.give_back(*one)
    assert share.held == 0 and not share._held_by


def test_organisation_of_a_tenant_name() -> None:
    """The organisation of a tenant is the part of its name before the slash."""
    assert organisation_of("acme/ann") == organisation_of("acme") == "acme"
