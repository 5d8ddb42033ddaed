"""`crossdock profile from-vllm`: a profile from the times of requests to a running server."""

import csv
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, TextIO

import aiohttp
import msgspec
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lab.commands.profiles.estimate import shape_of
from lab.commands.profiles.settings import FromVllmSettings
from lab.commands.profiles.show import show
from lab.estimates import from_timings
from lab.estimates.from_timings import MeasuredServer, Misfit, RequestTiming, TimingsError
from lab.estimates.roofline import BLOCK_TOKENS, KV_BYTES
from lab.profile import Profile, ProfileCapacity, encoded
from launcher import reports
from launcher.http.client import headers, new_session, read_whole
from launcher.load.records import OK, RunFile
from launcher.local.lifetime import until_interrupted
from proto.errors import CrossdockError
from runtime.process.version import version_of
from runtime.settings.options import SettingsError

COLUMNS: Final = ("arrival_s", "prompt_tokens", "output_tokens", "ttft_ms", "end_s")
FILE_BYTES_MAX: Final = 1 << 30
ROWS_MAX: Final = 1_000_000
ANSWER_BYTES_MAX: Final = 8 << 20
MISFIT_MAX: Final = 0.25


class ServerFailed(CrossdockError):
    """The server cannot be reached, or gives too few figures."""


def run(settings: FromVllmSettings) -> int:
    reports.check_writable(settings.out, "--out")
    console = reports.console_for(settings)
    timings = read_timings(settings.timings)
    return uvloop.run(until_interrupted(_run(settings, timings, console), console))


async def _run(settings: FromVllmSettings, timings: list[RequestTiming], console: Console) -> int:
    async with new_session() as session:
        server, model = await _server(settings, session)
        about = {
            "model": model,
            "versions": {"crossdock": version_of("crossdock")},
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
        }
    try:
        profile, misfit = _fit(timings, server, about, console)
    except TimingsError as error:
        raise SettingsError(f"--timings: {error}") from None
    reports.write(settings.out, encoded(profile))
    show(profile, console)
    show_misfit(misfit, console)
    console.print(f"Written: {settings.out}", highlight=False, soft_wrap=True)
    reports.write_json(settings, msgspec.to_builtins(profile))
    return 0


def _fit(
    timings: list[RequestTiming], server: MeasuredServer, about: dict[str, Any], console: Console
) -> tuple[Profile, Misfit]:
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("fitting", total=None)
        return from_timings.fitted(timings, server, about, lambda done, of: bar.update(task, completed=done, total=of))


def show_misfit(misfit: Misfit, console: Console) -> None:
    parts = [f"{name.replace('_', ' ').upper()} {100 * value:+.0f} %" for name, value in misfit._asdict().items()]
    console.print(
        f"Predicted for the last three tenths of the requests, which were not fitted to: {', '.join(parts)}",
        highlight=False,
    )
    if max(map(abs, misfit)) > MISFIT_MAX:
        console.print(
            "[yellow]That is far off: the traffic may have changed, --step-tokens or --instances may differ from the"
            " server's, or prompts were cached[/yellow]"
        )


# --- timings ----------------------------------------------------------------------------------------------------------


def read_timings(path: str) -> list[RequestTiming]:
    """Raises `SettingsError` naming file and line."""
    file = Path(path).expanduser()
    try:
        if file.stat().st_size > FILE_BYTES_MAX:
            raise SettingsError(f"--timings: {path} is larger than {FILE_BYTES_MAX} bytes")
        if file.suffix == ".json":
            return _of_run(msgspec.json.decode(file.read_bytes(), type=RunFile))
        with file.open(encoding="utf-8", newline="") as stream:
            return list(_of_csv(path, stream))
    except OSError as error:
        raise SettingsError(f"--timings: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"--timings: {path} is not UTF-8 text") from None
    except msgspec.DecodeError as error:
        raise SettingsError(f"--timings: {path} is not what crossdock bench serve --json prints: {error}") from None


def _of_run(run: RunFile) -> list[RequestTiming]:
    return [
        RequestTiming(one.sent_s, one.prompt_tokens or one.prompt_asked, one.tokens, one.ttft_ms, one.ended_s)
        for one in run.requests
        if one.outcome == OK and one.ttft_ms is not None and one.tokens > 0
    ]


def _of_csv(path: str, stream: TextIO) -> Iterator[RequestTiming]:
    reader = csv.DictReader(stream)
    names = reader.fieldnames or ()
    if missing := [name for name in COLUMNS if name not in names]:
        raise SettingsError(f"--timings: {path} has no column {missing[0]}; needed are {','.join(COLUMNS)}")
    for count, fields in enumerate(reader):
        if count >= ROWS_MAX:
            raise SettingsError(f"--timings: {path} has more than {ROWS_MAX:,} rows")
        try:
            at_s, prompt, output, ttft_ms, end_s = (float(fields[name]) for name in COLUMNS)
            fine = 1 <= prompt < 1e9 and 1 <= output < 1e9 and 0 < ttft_ms <= 1000 * (end_s - at_s) * 1.001 < 1e12
        except (TypeError, ValueError):
            fine = False
        if not fine:
            raise SettingsError(
                f"--timings: {path}, line {reader.line_num}: tokens must be 1 or more, and the first one come after"
                " arrival_s and not after end_s"
            )
        yield RequestTiming(at_s, int(prompt), int(output), ttft_ms, end_s)


# --- the server -------------------------------------------------------------------------------------------------------


async def _server(settings: FromVllmSettings, session: aiohttp.ClientSession) -> tuple[MeasuredServer, str]:
    """Learns the server's settings from the options, and from the server itself where the options leave them open. Raises
    `SettingsError` or `ServerFailed`."""
    kv_tokens, context, model = settings.kv_tokens, 0, settings.model
    if settings.url and not (kv_tokens and context and model):
        known = _first_model(await _get(settings, session, "/v1/models"))
        model = model or known.id
        context = context or known.max_model_len or 0
        kv_tokens = kv_tokens or kv_tokens_of(samples_of(await _get(settings, session, "/metrics")))
    if not kv_tokens:
        raise SettingsError("--kv-tokens: needed without --url; vLLM logs it at start as the size of its KV cache")
    context = context or kv_tokens
    blocks = max(kv_tokens // BLOCK_TOKENS, 2)
    capacity = ProfileCapacity(blocks, BLOCK_TOKENS, settings.seqs_max, min(context, kv_tokens), settings.cost_per_hour)
    kv_bytes = KV_BYTES * shape_of(settings.model).kv_values if settings.model else 0
    network = settings.network_gbit_per_s
    return MeasuredServer(capacity, settings.instances, settings.step_tokens, kv_bytes, network), model


class _Model(msgspec.Struct):
    id: str = ""
    max_model_len: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)] | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


def _first_model(answer: bytes) -> _Model:
    """Raises `ServerFailed`."""
    try:
        found = msgspec.json.decode(answer, type=_Models).data
    except msgspec.DecodeError as error:
        raise ServerFailed(f"--url: its list of models cannot be read: {error}") from None
    return found[0] if found else _Model()


async def _get(settings: FromVllmSettings, session: aiohttp.ClientSession, path: str) -> bytes:
    """Raises `ServerFailed`."""
    url = settings.url.rstrip("/").removesuffix("/v1") + path
    try:
        async with session.get(url, headers=headers(settings.api_key)) as response:
            if response.status != 200:
                raise ServerFailed(f"GET {url}: HTTP {response.status}; see --url and --api-key")
            return await read_whole(response, ANSWER_BYTES_MAX)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ServerFailed(f"--url: {url} cannot be reached: {error or type(error).__name__}") from None


Samples = Mapping[str, list[tuple[Mapping[str, str], float]]]


def samples_of(text: bytes) -> Samples:
    """Labels and value of each sample, by name. Raises `ServerFailed`."""
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
    except ValueError as error:  # also what is not UTF-8
        raise ServerFailed(f"--url: its metrics cannot be read: {error}") from None
    return found


def kv_tokens_of(samples: Samples) -> int:
    """Returns the tokens of all KV blocks, as the server's configuration metric says; 0 if it does not say it."""
    for labels, _ in samples.get("vllm:cache_config_info", []):
        blocks, size = (labels.get(name, "") for name in ("num_gpu_blocks", "block_size"))
        if blocks.isdecimal() and size.isdecimal():
            return int(blocks) * int(size)
    return 0
