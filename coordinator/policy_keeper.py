"""Reads and stores versions of the policy and rollouts, and answers `crossdock policy` and `crossdock rollout`. The core is
told what is in force by `Configured`.

A version is on disk before it is in force. Tables are checked on a thread, since ten thousand tenants take a while.
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from coordinator.policy_versions import PolicyError, PolicyInForce, Tables, Trial, Versions, check_tenants, tenants_of
from coordinator.rollouts import plan
from coordinator.rollouts.plan import RolloutError
from proto.errors import CrossdockError
from proto.policy import (
    ArmStatus,
    PolicyAction,
    PolicyAnswer,
    PolicyRequest,
    PolicyVersion,
    RevisionStatus,
    RolloutAction,
    RolloutAnswer,
    RolloutRequest,
)
from runtime.process import clock, log
from runtime.tenancy.file import TenantsFile
from runtime.tenancy.tenants import Tenants, TenantsError, from_tables

ASKED_MAX: Final = 8  # requests that wait while one is answered
Request = PolicyRequest | RolloutRequest
Answer = Callable[[PolicyAnswer | RolloutAnswer], object]
_log = log.get("crossdock.policy")


class PolicyStoreError(CrossdockError):
    """Stored versions cannot be read or written."""


class PolicyStore(Protocol):
    """Keeps the versions as text. Methods raise `PolicyStoreError`."""

    name: str  # in messages

    def read(self) -> bytes:
        """Returns what was written last; empty: nothing yet."""

    def write(self, content: bytes) -> None: ...


class PolicyFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = str(path)

    def read(self) -> bytes:
        try:
            return self._path.read_bytes() if self._path.exists() else b""
        except OSError as error:
            raise PolicyStoreError(f"{self._path}: {error}") from None

    def write(self, content: bytes) -> None:
        fresh = self._path.with_name(self._path.name + ".new")
        try:
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._path)
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise PolicyStoreError(f"{self._path}: {error.strerror}") from None


class PolicyKeeper:
    def __init__(
        self,
        store: PolicyStore | None,
        file: TenantsFile | None,
        options: Mapping[str, Any],
        put_in_force: Callable[[Tenants, PolicyInForce], None],
    ) -> None:
        """`store`: where versions are kept; None: in memory alone."""
        self._store, self._file, self._put_in_force = store, file, put_in_force
        # As they are read back from JSON.
        self._options: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(options))
        self._versions = Versions()
        self._asked: asyncio.Queue[tuple[Request, Answer] | None] = asyncio.Queue(ASKED_MAX)
        """None: the tenants file has changed."""
        self._file_changed = False

    async def start(self) -> tuple[Tenants, PolicyInForce]:
        """Returns the tenants and the policy that are in force. Raises `PolicyStoreError`, or `TenantsError` if a stored
        version cannot be used."""
        self._versions = await asyncio.to_thread(self._read)
        return await self._change(lambda versions: versions.load(self._tables, self._options, clock.unix_time()))

    def file_changed(self, _tenants: Tenants) -> None:
        self._file_changed = True
        if not self._asked.full():
            self._asked.put_nowait(None)

    def on_request(self, request: Request, answer: Answer) -> None:
        try:
            self._asked.put_nowait((request, answer))
        except asyncio.QueueFull:
            answer(_refusal(request, "others are asked for at the same time; try again"))

    async def serve(
        self, arms: Callable[[], tuple[ArmStatus, ...]], revisions: Callable[[], tuple[RevisionStatus, ...]] = tuple
    ) -> None:
        """Answer one request after another, until cancelled. `arms`, `revisions`: their present figures."""
        while True:
            asked = await self._asked.get()
            if self._file_changed:
                self._file_changed = False
                await self._load_file()
            if asked is None:
                continue
            request, answer = asked
            try:
                if isinstance(request, RolloutRequest):
                    await self._roll_out(request, revisions())
                    answer(RolloutAnswer("", revisions()))
                    continue
                if request.action is not PolicyAction.LIST:
                    self._put_in_force(*await self._change(partial(self._apply, request)))
                    _log.info("policy", action=request.action.value, version=self._versions.active)
                answer(self._report(request.number if request.action is PolicyAction.LIST else 0, arms()))
            except (PolicyError, PolicyStoreError, RolloutError, TenantsError) as error:
                answer(_refusal(request, str(error)[:500]))

    async def _roll_out(self, request: RolloutRequest, there: Sequence[RevisionStatus]) -> None:
        if request.action is RolloutAction.STATUS:
            return
        if self._store is None:
            raise RolloutError(
                "this coordinator would forget the rollout when it ends: start it with --usage-db or --database"
            )

        def change(versions: Versions) -> None:
            versions.rollouts = plan.apply(versions.rollouts, request, there)

        self._put_in_force(*await self._change(change))
        _log.info("rollout", action=request.action.value, revision=request.revision, model=request.model)

    async def _load_file(self) -> None:
        try:
            in_force = await self._change(
                lambda versions: versions.load(self._tables, self._options, clock.unix_time())
            )
        except (PolicyError, PolicyStoreError, TenantsError) as error:
            _log.error("tenants file not put in force", error=str(error))
        else:
            self._put_in_force(*in_force)

    @property
    def _tables(self) -> Tables:
        return self._file.tables if self._file is not None else {}

    def _apply(self, request: PolicyRequest, versions: Versions) -> None:
        now_s, options = clock.unix_time(), self._options
        tables: Any = None
        if request.content:
            try:
                tables = msgspec.json.decode(request.content, type=dict[str, Any])
            except (msgspec.MsgspecError, RecursionError) as error:
                raise PolicyError(f"not tables in JSON: {error}") from None
            from_tables(tables)
        before = versions.get(versions.active).tables
        match request.action:
            case PolicyAction.TRY:
                if not request.share and not request.organisations:
                    raise PolicyError("a trial needs a share or organisations")
                versions.try_(tables or {}, options, Trial(0, request.share, request.organisations), now_s)
            case PolicyAction.END:
                versions.end_trial()
            case PolicyAction.PROMOTE:
                versions.promote(tables, options, now_s)
            case PolicyAction.ROLLBACK:
                versions.roll_back(request.number, options, now_s)
        check_tenants(before, versions.get(versions.active).tables)

    async def _change(self, change: Callable[[Versions], None]) -> tuple[Tenants, PolicyInForce]:
        """Change, check and store a copy of the versions. Keep it only if all of this succeeds."""
        versions = msgspec.structs.replace(self._versions, kept=list(self._versions.kept))

        def changed() -> tuple[Tenants, PolicyInForce]:
            change(versions)
            tenants = replace(tenants_of(versions), open=self._file is None)
            if versions != self._versions:  # a start with the same options needs no room on the disk
                self._write(versions)
            return tenants, versions.in_force

        in_force = await asyncio.to_thread(changed)
        self._versions = versions
        return in_force

    def _report(self, number: int, arms: tuple[ArmStatus, ...]) -> PolicyAnswer:
        versions, now_s = self._versions, clock.unix_time()
        trial = versions.trial or Trial(0)
        content = msgspec.json.encode(versions.get(number).tables).decode() if number else ""
        return PolicyAnswer(
            "",
            versions.active,
            trial.number,
            trial.share,
            trial.organisations,
            tuple(
                PolicyVersion(
                    one.number,
                    one.digest,
                    one.source,
                    max(1000 * (now_s - one.unix_s), 0.0),
                    len(one.tables.get("tenants", ())),
                )
                for one in versions.kept
            ),
            arms,
            content,
            self._store is not None,
        )

    def _read(self) -> Versions:
        content = self._store.read() if self._store is not None else b""
        if self._store is None or not content:
            return Versions()
        try:
            return msgspec.json.decode(content, type=Versions)
        except msgspec.MsgspecError as error:
            raise PolicyStoreError(f"{self._store.name}: {error}") from None

    def _write(self, versions: Versions) -> None:
        if self._store is not None:
            self._store.write(msgspec.json.encode(versions))


def _refusal(request: Request, why: str) -> PolicyAnswer | RolloutAnswer:
    return RolloutAnswer(why) if isinstance(request, RolloutRequest) else PolicyAnswer(why)
