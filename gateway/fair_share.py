"""Divides a bounded resource between tenants: no tenant may hold more than is left free. Pure.

This is the dynamic threshold of Choudhury and Hahne (1998) for shared switch buffers, with factor 1. A single tenant may hold
half. A tenant that holds nothing still finds room. Tenants that want more than there is reach equal shares as they release
what they hold.
"""


class FairShare:
    def __init__(self, capacity: int, tenant_max: int | None = None) -> None:
        """`tenant_max`: a fixed bound for each tenant beside the dynamic one."""
        self.capacity = capacity
        self._tenant_max = capacity if tenant_max is None else tenant_max
        self.held = 0
        self._held_by: dict[str, int] = {}

    def has_room(self, amount: int = 1) -> bool:
        return self.held + amount <= self.capacity

    def take(self, tenant: str, amount: int = 1) -> bool:
        """Take `amount` for the tenant. Returns whether there was room. A user of an organisation, like `acme/ann`, is bounded
        twice: the organisation by the free amount, and the user by what the organisation could still take."""
        room = self.capacity - self.held
        owners = _owners(tenant)
        for owner in owners:
            held = self._held_by.get(owner, 0)
            if held + amount > min(room, self._tenant_max):
                return False
            room -= held
        for owner in owners:
            self._held_by[owner] = self._held_by.get(owner, 0) + amount
        self.held += amount
        return True

    def give_back(self, tenant: str, amount: int = 1) -> None:
        if not amount:
            return
        self.held -= amount
        for owner in _owners(tenant):
            left = self._held_by[owner] - amount
            assert left >= 0
            if left:
                self._held_by[owner] = left
            else:
                del self._held_by[owner]


def _owners(tenant: str) -> tuple[str, ...]:
    organisation = organisation_of(tenant)
    return (tenant,) if organisation == tenant else (organisation, tenant)


def organisation_of(tenant: str) -> str:
    """`acme/ann` is a user of `acme`."""
    return tenant.partition("/")[0]
