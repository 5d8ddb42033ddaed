"""The tenants file is read again when it changes or SIGHUP comes; a broken one changes nothing."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import structlog

from runtime.settings.options import SettingsError, load
from runtime.settings.roles import GatewaySettings
from runtime.tenancy import file as tenants_file
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


def test_change_is_seen_unless_broken(tmp_path: Path) -> None:
    """A changed file is taken; a broken or absent one leaves the earlier one in force."""
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


def test_processes_log_equal_lines(tmp_path: Path) -> None:
    """All processes log the same line about one file."""
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


def test_sighup_reloads_at_once(tmp_path: Path) -> None:
    """A SIGHUP makes the process read the file at once."""
    path = tmp_path / "tenants.toml"
    path.write_text("[tenants.a]")

    async def scene(changes: "asyncio.Queue[Tenants]") -> None:
        replace(path, "[tenants.b]")
        os.kill(os.getpid(), signal.SIGHUP)
        assert "b" in (await next_of(changes)).policies

    watched(path, 600.0, scene)


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "No such file"), (b"\xff", "not UTF-8"), (b"[tenants.a]\nweight = 0", "tenants.a.weight: must be > 0")],
)
def test_unreadable_file_is_named_by_path(tmp_path: Path, content: bytes | None, expected: str) -> None:
    """A file that cannot be read is reported with its path and the reason."""
    path = tmp_path / "tenants.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TenantsError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ") and expected in str(caught.value)


SECRET = "sk-5EC2E7" + "a" * 40
OTHER_SECRET = "cd-SECRET-key"
MISPLACED = [
    f'[tenants.acme]\nkeys = "{SECRET}"',
    f'[tenants.acme]\nkeys = ["{SECRET}"]',
    f'[tenants.acme]\nkeys = [["{SECRET}"]]',
    f'[tenants.acme]\nkeys = {{ a = "{SECRET}" }}',
    f'[tenants.acme]\nkey = "{SECRET}"',
    f"[tenants.acme]\n{SECRET} = 1",
    f'[tenants.acme]\n"{SECRET}" = 1',
    f'[tenants."{SECRET}"]\nweight = 0',
    f'[tenants."{SECRET} "]',
    f'[tenants.acme.users."{SECRET}"]\nweight = 0',
    f'[tenants.acme.users]\nann = "{SECRET}"',
    f'[tenants]\nacme = "{SECRET}"',
    f'[tenants.acme]\nweight = "{SECRET}"',
    f'[tenants.acme]\nborrow = "{SECRET}"',
    f'[tenants.acme]\nlimits = ["{SECRET}"]',
    f'[tenants.acme]\npriority_class = "{SECRET}"',
    f'[tenants.acme]\npriority_classes = ["{SECRET}"]',
    f'[tenants.acme]\ncache_group = "{SECRET}!"',
    f'[priority_classes."{SECRET}"]\nweight = 0',
    f'[priority_classes]\nx = "{SECRET}"',
    f'tenants = "{SECRET}"',
    f"{SECRET} = 1",
    f"[tenants.acme]\nkeys = [{SECRET}]",
    f'[tenants.acme]\nkeys = "{SECRET}',
    f"[tenants.acme]\n[tenants.acme.{SECRET}]\n[tenants.acme.{SECRET}]",
    f"{SECRET} = 1\n{SECRET} = 2",
    f"x = {{ {SECRET} = 1, {SECRET} = 2 }}",
    f"[{SECRET}",
    f"[tenants.acme]\nkeys = {SECRET}",
    f'[priority_classes."{SECRET}"]\nweight = 1.0\n[tenants.acme]\npriority_class = "x"',
    f'[priority_classes."{SECRET}"]\nweight = 1.0\n[tenants.acme]\npriority_classes = ["x"]',
]


@pytest.mark.parametrize("text", [*MISPLACED, *(text.replace(SECRET, OTHER_SECRET) for text in MISPLACED)])
def test_misplaced_key_is_not_logged(tmp_path: Path, text: str) -> None:
    """A key in a wrong place of the file is not repeated in the log."""
    path = tmp_path / "tenants.toml"
    path.write_text("[tenants.a]")
    file = TenantsFile(path)
    replace(path, text)
    with structlog.testing.capture_logs() as said:
        assert not file._look(True)
    assert said[0]["error"].startswith(str(path)) and "a" in file.tenants.policies
    assert not any(secret[3:12] in str(said) for secret in (SECRET, OTHER_SECRET))


UNREADABLE: dict[str, bytes] = {
    "nested lists": b"[tenants]\nx = " + b"[" * 3000 + b"]" * 3000,
    "nested tables": b"[tenants]\nx = " + b"{a=" * 3000 + b"1" + b"}" * 3000,
    "dotted": b"[tenants]\n" + b"a." * 2_000 + b"b = 1",
    "a deep header": b"[" + b"a." * 2_000 + b"b]",
    "a number without end": b"x = " + b"9" * 10_000,
    "a number of no size": b"[tenants.a]\nweight = 1e999",
    "a date": b"[tenants.a]\nweight = 9999-99-99",
    "a NUL": b"[tenants.a]\nkeys = [\0]",
    "NULs": b"\0" * 1000,
    "not UTF-8": b"[tenants.a]\nkeys = ['\xff']",
    "UTF-16": "[tenants.a]".encode("utf-16"),
    "lone surrogates": b"\xed\xa0\x80",
    "a huge number": b"[tenants.a.limits]\nconcurrency = " + b"9" * 400,
}


@pytest.mark.parametrize("case", sorted(UNREADABLE))
def test_broken_file_ends_no_process(tmp_path: Path, case: str) -> None:
    """At a reload the earlier one stays in force; at the start it is refused with a clear error."""
    path = tmp_path / "tenants.toml"
    path.write_text("[tenants.a]")
    file = TenantsFile(path)
    path.write_bytes(UNREADABLE[case])
    with structlog.testing.capture_logs() as said:
        assert not file._look(True) and "a" in file.tenants.policies
    assert said[0]["event"] == "tenants file not taken, the earlier one stays" and len(said[0]["error"]) < 400
    with pytest.raises(TenantsError):
        TenantsFile(path)


def test_non_regular_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that is absent, not a regular file or too large is refused; the earlier file stays in force."""
    path = tmp_path / "tenants.toml"
    path.write_text("[tenants.a]")
    file = TenantsFile(path)

    def refused() -> str:
        with structlog.testing.capture_logs() as said:
            assert not file._look(True) and "a" in file.tenants.policies
        with pytest.raises(TenantsError):
            TenantsFile(path)
        return str(said[0]["error"])

    path.unlink()
    assert "No such file" in refused()
    path.mkdir()
    assert "directory" in refused() or "not a file" in refused()
    path.rmdir()
    os.mkfifo(path)
    assert "not a file" in refused()
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "not a file" in refused()
    path.unlink()
    path.symlink_to(path)
    assert "symbolic links" in refused()
    path.unlink()
    with path.open("wb") as large:
        large.truncate(tenants_file.FILE_BYTES_MAX + 1)  # type: ignore[attr-defined]
    assert "larger than" in refused()
    path.write_text("[tenants.a]")
    os.utime(path, (1e14, 1e14))
    assert file._look(True)
    for wrong in ("a\0b", "~nobody-of-this-name/x", "x" * 5000):
        with pytest.raises(TenantsError):
            TenantsFile(wrong)
    monkeypatch.setattr(tenants_file, "tables_of", lambda text: [0] * (1 << 60))
    assert "memory" in refused()


def test_misplaced_config_key_is_not_shown(tmp_path: Path) -> None:
    """A misplaced key in a config file is not repeated in the error."""
    path = tmp_path / "crossdock.toml"
    for value in (f'{{ a = "{SECRET}" }}', f'[["{SECRET}"]]', "5", f'["{SECRET}", 5]'):
        path.write_text(f"[gateway]\nmodel = 'm'\napi_keys = {value}")
        with pytest.raises(SettingsError, match="--api-keys: must be keys") as caught:
            load(GatewaySettings, {}, str(path))
        assert SECRET not in str(caught.value)
