"""The tenants file: what it means, and what it says about a mistake in it."""

import hashlib

import pytest

from runtime.tenancy.priority_classes import DEFAULT_PRIORITY_CLASSES
from runtime.tenancy.tenants import QuotaLimits, TenantsError, open_tenants, parse

ANN, BOB = (hashlib.sha256(key).hexdigest() for key in (b"ann's", b"bob's"))
FILE = f"""
[tenants.acme]
weight = 2.0
priority_classes = ["interactive", "standard"]
borrow = true
cache_group = "acme"
keys = ["{ANN}"]
[tenants.acme.limits]
tokens_per_min = 200_000
[tenants.acme.users.bob]
weight = 0.5
priority_class = "batch"
borrow = false
keys = ["{BOB}"]
limits = {{ concurrency = 4 }}
[tenants.acme.users.cy]
[tenants.solo]
"""


def test_users_inherit_except_weight_and_limits() -> None:
    """Users inherit their organisation's settings, except weight and limits."""
    tenants = parse(FILE)
    acme, bob, cy = (tenants.policies[name] for name in ("acme", "acme/bob", "acme/cy"))
    assert (acme.priority_class, acme.priority_classes, acme.organisation_weight) == (
        "standard",
        {"interactive", "standard"},
        2.0,
    )
    assert [(level.name, level.borrow) for level in bob.levels] == [("acme/bob", False), ("acme", True)]
    assert bob.levels[0].limits == QuotaLimits(concurrency=4)
    assert bob.levels[1].limits == QuotaLimits(tokens_per_min=200_000)
    assert (bob.priority_class, bob.priority_classes) == ("batch", {"batch"})
    assert (cy.priority_class, cy.priority_classes, cy.weight, cy.levels[0].borrow) == (
        "standard",
        acme.priority_classes,
        1.0,
        True,
    )
    assert acme.cache_group == bob.cache_group == cy.cache_group
    assert tenants.policies["solo"].priority_classes == {"standard", "batch"}  # its own and what weighs no more


def test_keys_identify_tenant_and_stay_hidden() -> None:
    """Keys identify their tenant by hash and are not shown."""
    tenants = parse(FILE)
    assert tenants.keys.get(hashlib.sha256(b"bob's").digest()) == "acme/bob"
    assert tenants.keys.get(hashlib.sha256(b"eve's").digest()) is None
    assert BOB not in repr(tenants)


def test_weights_match_the_fair_queue() -> None:
    """Weights are given for the organisations and users of each class in the fair queue."""
    tenants = parse(FILE)
    weights = tenants.weights()
    assert (weights["batch/acme"], weights["batch/acme/bob"], weights["standard/acme/"]) == (2.0, 0.5, 1.0)
    assert not set(weights) & set(tenants.priority_classes)  # theirs depend on floors as well


def test_cache_group_differs_from_tenant() -> None:
    """A cache group is never shared with a tenant that has the same name."""
    tenants = parse('[tenants.a]\n[tenants.b]\ncache_group = "a"\n[tenants.a.users.x]\n[tenants.a.users.y]')
    groups = [tenants.policies[name].cache_group for name in ("a", "b", "a/x", "a/y")]
    assert len(set(groups)) == 4


def test_missing_file_means_one_open_tenant() -> None:
    """One tenant without keys and limits serves everyone if there is no file."""
    tenants = open_tenants()
    (policy,) = tenants.policies.values()
    assert policy.tenant == "default" and policy.priority_classes == set(DEFAULT_PRIORITY_CLASSES)
    assert policy.levels[0].limits == QuotaLimits()
    assert not tenants.keys
    assert tenants.policy("anyone") is policy and parse("").policy("anyone") is None
    assert parse("").policies == tenants.policies


def test_file_defines_all_priority_classes() -> None:
    """Priority classes in the file replace the default ones."""
    tenants = parse(
        "[priority_classes.gold]\nweight = 3\nfloor_share = 0.5\n[priority_classes.iron]\nweight = 1\n"
        "[tenants.a]\npriority_class = 'iron'"
    )
    assert list(tenants.priority_classes) == ["gold", "iron"]
    assert tenants.policies["default"].priority_class == "gold"
    assert tenants.policies["a"].priority_classes == {"iron"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[tenants.acme.users.ann]\nweight = 0", "tenants.acme.users.ann.weight: must be > 0, not 0"),
        ("[tenants.a]\nweigth = 1", "tenants.a.weigth: there is no such setting"),
        ("[tenants.a]\nlimits = { concurrency = 1.5 }", "tenants.a.limits.concurrency: must be a whole number"),
        ("[tenants.a]\nlimits = { concurrency = 0 }", "tenants.a.limits.concurrency: must be > 0"),
        ("[tenants.a]\nborrow = 1", "tenants.a.borrow: must be true or false, not 1"),
        (
            "[tenants.a]\npriority_class = 'gold'",
            "tenants.a.priority_class: is not a priority class; there are interactive, standard, batch",
        ),
        (
            "[tenants.a]\npriority_classes = ['batch']",
            "tenants.a.priority_classes: must have the tenant's own priority class 'standard'",
        ),
        ("[tenants.a]\npriority_classes = []", "tenants.a.priority_classes: must not be empty"),
        ("[tenants.'a/b']", "tenants.a/b: a name is 1 to 64 of"),
        ("tenants = 3", "tenants: must be a table, not 3"),
        ("[priority_classes.x]\nfloor_share = 0.1", "priority_classes.x.weight: is needed"),
        ("[priority_classes.x]\nweight = inf", "priority_classes.x.weight: "),
        (
            "[priority_classes.x]\nweight = 1\nfloor_share = 0.6\n[priority_classes.y]\nweight = 1\nfloor_share = 0.4",
            "priority classes: their floor_share add up",
        ),
        ("[[", "not TOML"),
        (f"[tenants.a]\nkeys = ['{ANN}']\n[tenants.b]\nkeys = ['{ANN}']", "tenants.b.keys: "),
        (f"[tenants.a]\nkeys = ['{ANN}', '{ANN}']", "tenants.a.keys: "),
    ],
)
def test_mistake_is_named_by_its_key(text: str, expected: str) -> None:
    """A mistake in the file is reported with the key that it concerns."""
    with pytest.raises(TenantsError) as caught:
        parse(text)
    assert str(caught.value).startswith(expected), str(caught.value)


def test_plain_key_is_refused_unrepeated() -> None:
    """A key in plain text is refused, and the error does not repeat it."""
    with pytest.raises(TenantsError) as caught:
        parse("[tenants.a]\nkeys = ['sk-very-secret']")
    assert "crossdock tenants key" in str(caught.value) and "secret" not in str(caught.value)
