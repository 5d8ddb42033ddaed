"""The tenants file is read again when it changes or SIGHUP comes; a broken one changes nothing."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import structlog

from runtime.tenancy.file import TenantsFile, read
from runtime.tenancy.tenants import Tenants, TenantsError


def watched(path: Path, poll_s: float, scene: Callable[["asyncio.Queue[Tenants]"], Awaitable[None]]) -> None:
    async def body() -> None:
        changes: asyncio.Queue[Tenants] = asyncio.Queue()
        file = TenantsFile(path)
        task = asyncio.create_task(file.watch(changes.put_nowait, poll_s))
        await asyncio.sleep(0)
        await scene(changes)
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(body())


def replace(path: Path, text: str) -> None:
    """At once: between the two halves of a plain write, a reader finds an empty file, which says that nobody is a tenant."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


async def next_of(changes: "asyncio.Queue[Tenants]") -> Tenants:
    return await asyncio.wait_for(changes.get(), 60)


def test_a_change_is_seen_and_a_broken_file_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text("[tenants.a]")

    async def scene(changes: "asyncio.Queue[Tenants]") -> None:
        replace(path, "[tenants.a]\nweight = -1")
        await asyncio.sleep(0.1)
        path.unlink()
        await asyncio.sleep(0.1)
        assert changes.empty()
        replace(path, "[tenants.b]")
        assert "b" in (await next_of(changes)).policies

    watched(path, 0.01, scene)


def test_all_processes_log_the_same_line_of_one_file(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text("[tenants.a]")
    coordinator, gateway = TenantsFile(path), TenantsFile(path)
    for text, level in (("[tenants.a]\nweight = -1\n[tenants.b]\nweight = 0", "error"), ("[tenants.b]", "info")):
        replace(path, text)
        with structlog.testing.capture_logs() as said:
            assert coordinator._look(False) == gateway._look(False) == (level == "info")
        first, second = said
        assert first == second and first["log_level"] == level and first["modified"]
        assert "\n" not in first.get("error", "")


def test_sighup_reads_it_at_once(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text("[tenants.a]")

    async def scene(changes: "asyncio.Queue[Tenants]") -> None:
        replace(path, "[tenants.b]")
        os.kill(os.getpid(), signal.SIGHUP)
        assert "b" in (await next_of(changes)).policies

    watched(path, 600.0, scene)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file"),
        (b"\xff", "not UTF-8"),
        (b"[tenants.a]\nweight = 0", "tenants.a.weight: must be > 0"),
    ],
)
def test_what_cannot_be_read_is_said_with_the_path(tmp_path: Path, content: bytes | None, expected: str) -> None:
    path = tmp_path / "tenants.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TenantsError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ") and expected in str(caught.value)
