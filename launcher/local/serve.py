"""`crossdock serve`: model ready, cluster up, first question answered, then serving until Ctrl-C."""

import asyncio
import json
import shlex
from collections.abc import Coroutine
from typing import Any

import aiohttp
from rich.console import Console
from rich.markup import escape

from launcher.http.client import RequestFailed, events
from launcher.local import cluster, detached, ports
from launcher.local.lifetime import Running, run_until_stopped, running
from launcher.local.registry import default_batch_db
from launcher.models import resolve
from launcher.models.resolve import ReadyModel
from proto.errors import CrossdockError
from runtime.process import clock, notify
from runtime.settings.serve import ServeSettings

QUESTION = "What is the capital of France?"
ANSWER_TOKENS = 128
ANSWER_TIMEOUT_S = 120.0
SOBER = {"temperature": 0, "max_tokens": 64}  # a small model at temperature 1 gives long and confused answers


class AnswerFailed(CrossdockError):
    """The first question was not answered."""


def run(settings: ServeSettings) -> int:
    """Raises `CrossdockError`, `SettingsError` among them, with what to tell the user."""
    console = Console()
    if settings.detach:
        return detached.serve(settings, console)
    started_at = clock.now()
    ports.check(settings)  # report a taken port before a model is fetched for minutes

    def begin() -> Coroutine[Any, Any, int]:
        model = resolve.ready(settings.model, settings.model_id, console)
        batch_db = settings.batch_db or ("" if getattr(settings, "database", "") else default_batch_db(model.model_id))
        return _serve(settings.model_copy(update={"batch_db": batch_db}), model, console, started_at)

    return run_until_stopped(begin, console)


async def _serve(settings: ServeSettings, model: ReadyModel, console: Console, started_at: float) -> int:
    counts = {"prefill": settings.prefill, "decode": settings.decode, "mixed": settings.mixed}
    workers = " and ".join(f"{count} {role}" for role, count in counts.items() if count)
    console.print(f"Starting {model.model_id}: {workers} worker(s)")
    async with running(settings, model, console) as up:
        console.print(
            f"Ready after {clock.now() - started_at:.1f} s. Logs: {up.log_dir}\n", highlight=False, soft_wrap=True
        )
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await _ask(up, model, QUESTION, console)
        except (AnswerFailed, RequestFailed, aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or f"no answer within {ANSWER_TIMEOUT_S:.0f} s; see the logs in {up.log_dir}"
            if settings.once:
                raise AnswerFailed(f"the first question failed: {why}") from None
            console.print(f"\n[red]The first question failed:[/red] {escape(why)}")
        if settings.once:
            return 0
        _invite(up, model, settings, console)
        notify.ready(f"serves {model.model_id}")
        try:
            await up.supervisor.wait_failed()
        except asyncio.CancelledError:
            return 0  # the proper end of serving
        finally:
            notify.stopping()
    return 1


async def _ask(up: Running, model: ReadyModel, question: str, console: Console) -> None:
    """Asks the question through the HTTP API, and prints the answer as it streams."""
    console.print(f"[bold]Q[/bold] {escape(question)}\n[bold]A[/bold] ", end="")
    body = {
        "model": model.model_id,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    text = ""
    async with up.client.post("/v1/chat/completions", json=body) as response:
        async for event, _ in events(response):
            piece = "".join(choice.delta.content or "" for choice in event.choices or () if choice.delta)
            text += piece
            console.print(escape(piece), end="", highlight=False, soft_wrap=True)
    console.print("\n")
    if not text.strip():
        raise AnswerFailed("the answer was empty")


def _invite(up: Running, model: ReadyModel, settings: ServeSettings, console: Console) -> None:
    base_url = f"{up.cluster.base_url}/v1"
    body = json.dumps(
        {"model": model.model_id, "messages": [{"role": "user", "content": "Name three colours."}], "stream": True}
        | SOBER
    )
    key = ' -H "Authorization: Bearer $KEY"' if up.cluster.key else ""
    console.print(f"Base URL   {base_url}", highlight=False)
    for other in up.cluster.base_urls[1:]:
        console.print(f"and        {other}/v1", highlight=False)
    keys = f" --keys {shlex.quote(cluster.keys_folder(settings))}" if settings.keys else ""
    status = f"crossdock status --coordinator {up.cluster.coordinator}{keys}"
    console.print(f"Status     {status}", highlight=False, soft_wrap=True)
    console.print("Try        ", end="")
    line = f"curl -N {base_url}/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
    console.print(line, highlight=False, soft_wrap=True, markup=False)
    console.print("\nServing until Ctrl-C.")
