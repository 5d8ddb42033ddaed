"""What is bounded for all is divided: a tenant that takes all it can get leaves room for every other."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.fair_share import FairShare, organisation_of


def fill(share: FairShare, tenant: str) -> int:
    count = 0
    while share.take(tenant):
        count += 1
    return count


def test_a_tenant_alone_holds_half_and_the_next_half_of_the_rest() -> None:
    share = FairShare(1024)
    assert [fill(share, name) for name in "abc"] == [512, 256, 128]


def test_tenants_that_want_more_than_there_is_come_to_equal_shares() -> None:
    share, names = FairShare(1000), "abcd"
    held = {name: fill(share, name) for name in names}
    for _ in range(1000):
        for name in names:
            share.give_back(name)
            held[name] -= 1
        for name in names:
            held[name] += fill(share, name)
    assert max(held.values()) - min(held.values()) <= 4 and min(held.values()) >= 1000 // 5 - 2


def test_many_users_of_one_organisation_are_one_tenant_and_leave_room_for_each_other() -> None:
    share = FairShare(1024)
    first = fill(share, "acme/ann")
    others = sum(fill(share, f"acme/{number}") for number in range(100))
    assert first <= 342 and others > 100 and first + others <= 512
    assert fill(share, "beta") >= 256


def test_a_fixed_bound_holds_beside_the_dynamic_one() -> None:
    share = FairShare(1024, tenant_max=10)
    assert fill(share, "a") == 10 and fill(share, "b/x") == fill(share, "b/y") + 10 == 10


@given(st.lists(st.tuples(st.sampled_from(["a", "b/x", "b/y", "c"]), st.booleans(), st.integers(1, 9)), max_size=200))
def test_nothing_is_lost_and_a_newcomer_finds_room(steps: list[tuple[str, bool, int]]) -> None:
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


def test_organisations() -> None:
    assert organisation_of("acme/ann") == organisation_of("acme") == "acme"
