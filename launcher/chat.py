"""`crossdock chat`: a conversation with a model in the terminal."""

import asyncio
import contextlib
import importlib
import sys
from typing import Any

import aiohttp
from pydantic import Field
from rich.console import Console
from rich.markup import escape

from launcher.http.client import RequestFailed, events, new_session, read_whole, reason
from launcher.local import registry
from proto.errors import CrossdockError
from runtime.settings.types import Options

URL = "http://127.0.0.1:8000"
HELP = "/reset begins anew, /quit or Ctrl-D ends, Ctrl-C stops an answer."
_MODELS_BYTES_MAX = 1 << 20


class NoServer(CrossdockError):
    """No server answers, or it has no such model."""


class ChatSettings(Options):
    """Talk to a model in the terminal; answers stream. Each line is a message: also those of a file or pipe on stdin.

    /reset begins a new conversation, /quit or Ctrl-D ends, and Ctrl-C stops an answer.
    """

    url: str = Field("", description=f"The server; empty: the cluster on this machine, or else {URL}.")
    model: str = Field("", description="Model name; empty: the first that the server has.")
    api_key: str = Field(
        "", description="API key; better in the environment, CROSSDOCK_API_KEY, which ps does not show."
    )
    system: str = Field("", description="System message.")
    max_tokens: int = Field(1024, ge=1, description="Most tokens of an answer.")
    temperature: float | None = Field(None, ge=0.0, le=2.0, description="Temperature; empty: the model's own.")


def run(settings: ChatSettings) -> int:
    """Raises `NoServer`."""
    console = Console(highlight=False, soft_wrap=True)
    running = [one.base_url for one in registry.clusters() if one.base_url]
    url = (settings.url or (running[-1] if running else URL)).rstrip("/").removesuffix("/v1")
    model = settings.model or asyncio.run(_first_model(url, settings.api_key))
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # input() then has a history
        console.print(f"[dim]{escape(model)} at {escape(url)}. {HELP}[/dim]")
    begin = [{"role": "system", "content": settings.system}] if settings.system else []
    messages, status = list(begin), 0
    while (line := _next_line()) not in (None, "/quit"):
        if line == "/reset":
            messages = list(begin)
        elif line:
            messages.append({"role": "user", "content": line})
            body = {"model": model, "messages": messages, "max_tokens": settings.max_tokens, "stream": True}
            if settings.temperature is not None:
                body["temperature"] = settings.temperature
            answer: list[str] = []
            try:
                asyncio.run(_answer(url, settings.api_key, body, answer, console))
            except KeyboardInterrupt:
                console.print("[dim] (stopped)[/dim]", end="")
            except (RequestFailed, aiohttp.ClientError, TimeoutError) as error:
                status = 1
                console.print(f"[red]{escape(str(error) or 'no answer')}[/red]", end="")
            console.print()
            if answer:
                messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                messages.pop()
    return status


def _next_line() -> str | None:
    """Returns what the user says; None: nothing more."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


async def _first_model(url: str, key: str) -> str:
    """Raises `NoServer`."""
    try:
        async with new_session(key=key) as session, session.get(f"{url}/v1/models") as response:
            found = await response.json() if response.status == 200 else {}
            if response.status != 200:
                raise NoServer(
                    f"{url}: HTTP {response.status}: {reason(await read_whole(response, _MODELS_BYTES_MAX))}"
                )
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise NoServer(f"no server answers at {url} ({error or 'no answer'}); --url names another") from None
    names = [one["id"] for one in found.get("data", ())]
    if not names:
        raise NoServer(f"{url} serves no model")
    return str(names[0])


async def _answer(url: str, key: str, body: dict[str, Any], answer: list[str], console: Console) -> None:
    """Prints the answer as it streams, and adds its parts to `answer`. Raises `RequestFailed` or `aiohttp.ClientError`."""
    async with new_session(key=key) as session, session.post(f"{url}/v1/chat/completions", json=body) as response:
        async for event, _ in events(response):
            for choice in event.choices or ():
                if choice.delta is not None and (piece := choice.delta.content):
                    answer.append(piece)
                    console.print(piece, end="", markup=False)
