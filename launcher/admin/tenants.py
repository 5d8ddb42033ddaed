"""`crossdock tenants check` and `crossdock tenants key`: what an operator does with a tenants file."""

import hashlib
import re
import secrets
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from rich.console import Console
from rich.markup import escape

from launcher import tables
from runtime.settings.options import SettingsError
from runtime.settings.types import Options
from runtime.tenancy.file import read
from runtime.tenancy.priority_classes import PriorityClass
from runtime.tenancy.tenants import Tenants, TenantsError

KEY_PREFIX = "sk-"
_TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}(/[A-Za-z0-9_.-]{1,64})?")


class CheckSettings(Options):
    """Check a tenants file: show its content or its mistakes."""

    file: str = Field(min_length=1, description="The file.", json_schema_extra={"argument": "FILE"})


def _check_tenant(value: str) -> str:
    if not _TENANT.fullmatch(value):
        raise ValueError("is not ORG or ORG/USER, each of 1 to 64 of A-Z, a-z, 0-9, '_', '.' and '-'")
    return value


class KeySettings(Options):
    """Make an API key for an organisation or a user, and print it once, with the line for the tenants file.

    The key is nowhere stored: the file has its SHA-256 only.
    """

    tenant: Annotated[str, AfterValidator(_check_tenant)] = Field(
        description="The owner of the key.", json_schema_extra={"argument": "ORG[/USER]"}
    )


def check(settings: CheckSettings) -> int:
    try:
        tenants = read(Path(settings.file).expanduser())
    except TenantsError as error:
        raise SettingsError(str(error)) from None
    show(tenants, tables.console())
    return 0


def show(tenants: Tenants, console: Console) -> None:
    keys = list(tenants.keys.values())
    priority_classes = ", ".join(
        f"{name} (weight {priority_class.weight:g}, floor {priority_class.floor_share:g}{_targets(priority_class)})"
        for name, priority_class in tenants.priority_classes.items()
    )
    console.print(f"Priority classes: {priority_classes}", highlight=False)
    texts = (tables.words(heading) for heading in ("priority_class", "may use", "limits", "borrows"))
    table = tables.Table("Tenants", "tenant", "weight", "keys", *texts)
    for name, policy in tenants.policies.items():
        own = policy.levels[0]
        limits = [f"{limit}={value:,}" for limit, value in vars(own.limits).items() if value is not None]
        table.row(
            name,
            f"{policy.weight if policy.user else policy.organisation_weight:g}",
            str(keys.count(name)),
            policy.priority_class,
            ", ".join(
                priority_class
                for priority_class in tenants.priority_classes
                if priority_class in policy.priority_classes
            ),
            ", ".join(limits) or "none",
            "yes" if own.borrow else "no",
        )
    table.show(console)
    if not keys:
        console.print("No key is configured: everyone is let in, as the tenant 'default'.")


def _targets(priority_class: PriorityClass) -> str:
    found = [("TTFT", priority_class.ttft_ms), ("TPOT", priority_class.tpot_ms)]
    words = [f"{name} {value:g} ms" for name, value in found if value is not None]
    return f", {' and '.join(words)} for {priority_class.percentile:.4g} of its requests" if words else ""


def new_key() -> tuple[str, str]:
    """Makes a key of 256 random bits; returns (key, its SHA-256 in hex)."""
    key = KEY_PREFIX + secrets.token_hex(32)
    return key, hashlib.sha256(key.encode()).hexdigest()


def make_key(settings: KeySettings) -> int:
    key, digest = new_key()
    organisation, _, user = settings.tenant.partition("/")
    parts = ["tenants", organisation, *(["users", user] if user else [])]
    table = ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else f'"{part}"' for part in parts)
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"The key, which is shown only now:\n\n    {key}\n\nFor the tenants file:\n")
    console.print(escape(f'    [{table}]\n    keys = ["{digest}"]'))
    return 0
