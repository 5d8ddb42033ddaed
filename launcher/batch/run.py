"""`crossdock batch run FILE`: upload, wait with a progress bar, write the results, and name the lines that failed."""

import asyncio
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from launcher import reports, tables
from launcher.batch.client import BatchClient, BatchFailed, Unreachable
from launcher.batch.settings import BatchRunSettings
from launcher.local import registry
from launcher.local.lifetime import until_interrupted
from runtime.process import clock
from runtime.settings.options import SettingsError

POLL_S: Final = 1.0
SILENCE_S: Final = 300.0  # of a server that restarts
SHOWN_MAX: Final = 20  # lines with an error that are printed
ENDPOINT: Final = "/v1/chat/completions"  # where the first line names none
_WINDOW: Final = "24h"
_ENDED: Final = ("completed", "failed", "expired", "cancelled")


def run(settings: BatchRunSettings) -> int:
    """0 if every request has an answer. Raises `SettingsError`, `BatchFailed`."""
    console = tables.console()
    path = Path(settings.file).expanduser()
    output = Path(settings.output).expanduser() if settings.output else path.with_suffix(".results.jsonl")
    reports.check_writable(str(output), "--output")
    url = settings.url or _here()
    if not url.startswith(("http://", "https://")):
        raise SettingsError(f"--url: {url} does not begin with http:// or https://")
    try:
        endpoint = _endpoint(path)
    except OSError as error:
        raise SettingsError(f"FILE: {path}: {error.strerror}") from None
    work = _Run(settings, url, path, output, endpoint, console)
    return uvloop.run(until_interrupted(work.run(), console))


def _here() -> str:
    """Raises `SettingsError`."""
    found = registry.clusters()
    if len(found) != 1:
        raise SettingsError(f"--url: needed: {'several clusters run' if found else 'no cluster runs'} on this machine")
    return found[0].base_url


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            if data.strip():
                yield number, data


def _endpoint(path: Path) -> str:
    """Returns the endpoint of the batch, which its first line names. The server checks the lines. Raises `OSError`."""
    for _, data in _lines(path):
        try:
            return str(msgspec.json.decode(data, type=dict[str, Any])["url"])
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError):
            break
    return ENDPOINT


class _Run:
    def __init__(
        self, settings: BatchRunSettings, url: str, path: Path, output: Path, endpoint: str, console: Console
    ) -> None:
        self._settings = settings
        self._url = url
        self._path = path
        self._output = output
        self._endpoint = endpoint
        self._console = console
        self._batch_id = settings.resume

    async def run(self) -> int:
        """Raises `BatchFailed`."""
        client = BatchClient(self._url, self._settings.api_key)
        try:
            if not self._batch_id:
                file_id = await client.upload(self._path)
                self._batch_id = (await client.create(file_id, self._endpoint, _WINDOW))["id"]
            self._console.print(f"Batch {self._batch_id}", highlight=False)
            batch = await self._until_ended(client)
            return await self._finish(client, batch)
        except Unreachable as error:
            raise BatchFailed(f"{self._url}: {error}{self._how_to_resume()}") from None
        except asyncio.CancelledError:
            await self._interrupted(client)
            raise
        finally:
            await client.close()

    async def _until_ended(self, client: BatchClient) -> dict[str, Any]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]} failed"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        heard_at = clock.now()
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task("validating", total=None, failed=0)
            while True:
                try:
                    batch = await client.batch(self._batch_id)
                except Unreachable:
                    if clock.now() - heard_at > SILENCE_S:
                        raise
                    progress.update(task, description="waiting for the server")
                else:
                    heard_at, counts = clock.now(), batch["request_counts"]
                    done = counts["completed"] + counts["failed"]
                    status = batch["status"].replace("_", " ")
                    total = counts["total"] or None
                    progress.update(task, description=status, total=total, completed=done, failed=counts["failed"])
                    if batch["status"] in _ENDED:
                        return batch
                await asyncio.sleep(POLL_S)  # as any client does: the server sends no notice

    async def _finish(self, client: BatchClient, batch: dict[str, Any]) -> int:
        console = self._console
        errors = [(error["line"] or 0, error["message"]) for error in (batch["errors"] or {"data": []})["data"]]
        if batch["output_file_id"]:
            await client.download(batch["output_file_id"], self._output)
            console.print(f"Results: {self._output}", highlight=False, soft_wrap=True)
        if batch["error_file_id"]:
            path = self._output.with_name(
                f"{self._output.name.removesuffix('.jsonl').removesuffix('.results')}.errors.jsonl"
            )
            await client.download(batch["error_file_id"], path)
            errors += await asyncio.to_thread(self._errors_of, path)
            console.print(f"Errors: {path}", highlight=False, soft_wrap=True)
        _show_errors(console, self._path, errors)
        counts = batch["request_counts"]
        console.print(
            f"{batch['status'].capitalize()}: {counts['completed']} of {counts['total']} answered, {counts['failed']} failed.",
            highlight=False,
        )
        return 0 if batch["status"] == "completed" and not counts["failed"] else 1

    def _errors_of(self, path: Path) -> list[tuple[int, str]]:
        """Returns (line, error) of each request that failed."""
        numbers = {msgspec.json.decode(data)["custom_id"]: number for number, data in _lines(self._path)}
        found = []
        for _, data in _lines(path):
            line = msgspec.json.decode(data)
            error = line["error"] or line["response"]["body"]["error"]
            found.append((numbers.get(line["custom_id"], 0), f"{line['custom_id']}: {error['message']}"))
        return found

    async def _interrupted(self, client: BatchClient) -> None:
        """Ends the wait after Ctrl-C: the batch goes on, or is cancelled."""
        if not self._batch_id:
            return
        if not self._settings.cancel:
            self._console.print(f"The batch goes on.{self._how_to_resume()}", highlight=False, soft_wrap=True)
            return
        try:
            await client.cancel(self._batch_id)
            await self._finish(client, await self._until_ended(client))
        except (BatchFailed, Unreachable) as error:
            self._console.print(f"The batch could not be cancelled: {escape(str(error))}", highlight=False)

    def _how_to_resume(self) -> str:
        if not self._batch_id:
            return ""
        url = f" --url {self._settings.url}" if self._settings.url else ""
        output = f" --output {shlex.quote(self._settings.output)}" if self._settings.output else ""
        file = shlex.quote(self._settings.file)
        return f" To wait for its results:\n  crossdock batch run {file} --resume {self._batch_id}{url}{output}"


def _show_errors(console: Console, path: Path, errors: list[tuple[int, str]]) -> None:
    for line, message in errors[:SHOWN_MAX]:
        console.print(f"[red]{escape(str(path))}:{line}:[/red] {escape(message)}", highlight=False, soft_wrap=True)
    if len(errors) > SHOWN_MAX:
        console.print(f"and {len(errors) - SHOWN_MAX} more", highlight=False)
