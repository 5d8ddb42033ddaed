"""Traces of real services: who arrives when, with how many tokens in and out.

Four formats: CSV with the columns `arrival_s,prompt_tokens,output_tokens` (others are ignored); the Azure LLM inference traces
as they are (`TIMESTAMP,ContextTokens,GeneratedTokens`), with times counted from the first one; and the JSON lines of Mooncake
(`timestamp` in ms, `input_length`, `output_length`, `hash_ids`: one id per 512 prompt tokens, equal where prefixes are), which
AIPerf reads as well; and the records that AIPerf writes (`profile_export.jsonl`). Sessions of several turns come as CSV with
the columns `session,turn,prompt_tokens,reused_tokens,output_tokens,think_s`, or as JSON lines of AIPerf or Mooncake with
`session_id`, `input_length` (that the turn adds), `output_length` and `delay` (ms). A bad line is named with its number.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Final, TextIO

import msgspec
import numpy as np

from launcher.load.lengths import TOKENS_MAX
from launcher.sessions import LoadSession, SessionTurn
from runtime.settings.options import SettingsError

ROWS_MAX = 2_000_000
LINE_CHARS_MAX = 1 << 20
MOONCAKE_BLOCK_TOKENS = 512
COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
TURNS_MAX: Final = 1_000_000
SESSION_COLUMNS: Final = ("session", "turn", "prompt_tokens", "reused_tokens", "output_tokens", "think_s")
RESTART_SHARE: Final = 0.5  # of the prompt before; a turn with less of it begins a new conversation


@dataclass(frozen=True, slots=True)
class TraceRow:
    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # ids of its prompt's blocks; equal ids are equal tokens, in any prompt of the trace


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


class _Value(msgspec.Struct, frozen=True):
    value: float


class _AiperfMetadata(msgspec.Struct):
    request_start_ns: int


class _AiperfMetrics(msgspec.Struct, frozen=True):
    input_sequence_length: _Value | None = None
    output_sequence_length: _Value | None = None


class _Aiperf(msgspec.Struct):
    """A record of `profile_export.jsonl`; a record without lengths belongs to a request that failed."""

    metadata: _AiperfMetadata
    metrics: _AiperfMetrics = _AiperfMetrics()


def read(path: str) -> list[TraceRow]:
    """All rows, in the order of their times. Raises `SettingsError` naming file and line."""
    file = Path(path).expanduser()
    rows: list[TraceRow] = []
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            source = _json_lines(stream) if file.suffix in (".jsonl", ".json") else _csv(stream)
            for row in source:
                if len(rows) >= ROWS_MAX:
                    raise SettingsError(f"--trace: {path} has more than {ROWS_MAX:,} rows")
                rows.append(row)
    except OSError as error:
        raise SettingsError(f"--trace: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"--trace: {path} is not UTF-8 text") from None
    except _BadLine as error:
        raise SettingsError(f"--trace: {path}, line {error.number}: {error}") from None
    if not rows:
        raise SettingsError(f"--trace: {path} has no requests")
    return sorted(rows, key=lambda row: row.at_s)


class _BadLine(Exception):
    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number


def _csv(stream: TextIO) -> Iterator[TraceRow]:
    reader = csv.DictReader(stream)
    try:
        names = reader.fieldnames or ()
        columns, seconds = (AZURE_COLUMNS, _date_s) if AZURE_COLUMNS[0] in names else (COLUMNS, float)
        missing = [name for name in columns if name not in names]
        if missing:
            raise _BadLine(1, f"no column {missing[0]}; needed are {','.join(columns)}")
        origin_s: float | None = 0.0 if columns is COLUMNS else None
        for fields in reader:
            try:
                at_s, prompt, output = seconds(fields[columns[0]]), int(fields[columns[1]]), int(fields[columns[2]])
            except (TypeError, ValueError):
                values = ",".join(str(fields[name]) for name in columns)[:100]
                raise _BadLine(reader.line_num, f"{values!r} is not a time and two numbers of tokens") from None
            origin_s = at_s if origin_s is None else origin_s
            yield _checked(reader.line_num, TraceRow(at_s - origin_s, prompt, output))
    except csv.Error as error:
        raise _BadLine(reader.line_num, str(error)) from None


def _date_s(text: str) -> float:
    """Seconds since 1970. Raises `ValueError`."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def _json_lines(stream: TextIO) -> Iterator[TraceRow]:
    decoders = msgspec.json.Decoder(_Mooncake), msgspec.json.Decoder(_Aiperf)
    number, origin_ns = 0, None
    while line := stream.readline(LINE_CHARS_MAX):
        number += 1
        if not line.strip():
            continue
        try:
            found = decoders['"request_start_ns"' in line].decode(line)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise _BadLine(number, str(error)) from None
        if isinstance(found, _Mooncake):
            row = TraceRow(found.timestamp / 1000, found.input_length, found.output_length, tuple(found.hash_ids))
        else:
            begin_ns, sent, got = found.metadata.request_start_ns, *_lengths(found.metrics)
            if not sent:
                continue
            origin_ns = begin_ns if origin_ns is None else origin_ns
            row = TraceRow((begin_ns - origin_ns) / 1e9, sent, got)
        yield _checked(number, row)


def _lengths(metrics: _AiperfMetrics) -> tuple[int, int]:
    """0 where there is none."""
    told = metrics.input_sequence_length, metrics.output_sequence_length
    sent, got = (0 if one is None or not 0 <= one.value <= TOKENS_MAX else int(one.value) for one in told)
    return sent, got


def _checked(number: int, row: TraceRow) -> TraceRow:
    if not 0 <= row.at_s < 1e10:  # also not a number
        raise _BadLine(number, f"the time {row.at_s} is not in 0 to 1e10 seconds")
    # Some requests in traces have no answer; one token is asked for them.
    if not 1 <= row.prompt_tokens <= TOKENS_MAX or not 0 <= row.output_tokens <= TOKENS_MAX:
        raise _BadLine(number, f"{row.prompt_tokens} and {row.output_tokens} tokens are not in 1 to {TOKENS_MAX}")
    return row


def scaled(
    rows: Sequence[TraceRow],
    *,
    from_s: float,
    duration_s: float,
    speed: float,
    scale_tokens: float,
    source: np.random.Generator,
) -> list[TraceRow]:
    """Returns the part of the trace that begins at `from_s`, as it is played: times are seconds from its beginning, below
    `duration_s`.

    Rows of exactly equal time, as in traces with coarse stamps, are spread at random up to the next time.
    """
    until_s = from_s + duration_s * speed
    part = [row for row in rows if from_s <= row.at_s < until_s]
    if not part:
        return []
    groups = [(at_s, list(group)) for at_s, group in groupby(part, key=lambda row: row.at_s)]
    ends = [at_s for at_s, _ in groups[1:]] + [until_s]
    played = []
    for (at_s, group), end_s in zip(groups, ends, strict=True):
        times = [at_s] if len(group) == 1 else sorted(source.uniform(at_s, end_s, len(group)).tolist())
        for row, time_s in zip(group, times, strict=True):
            prompt, output = (max(1, round(count * scale_tokens)) for count in (row.prompt_tokens, row.output_tokens))
            played.append(replace(row, at_s=(time_s - from_s) / speed, prompt_tokens=prompt, output_tokens=output))
    return played


# --- sessions ---------------------------------------------------------------------------------------------------------


class _SessionLine(msgspec.Struct):
    session_id: str
    input_length: int
    output_length: int
    delay: float = 0.0


def has_sessions(path: str) -> bool:
    """Whether the file has sessions, by its first line. Raises `SettingsError`."""
    file = Path(path).expanduser()
    try:
        with file.open(encoding="utf-8-sig", errors="replace") as stream:
            line = stream.readline(LINE_CHARS_MAX)
    except OSError as error:
        raise SettingsError(f"--trace: cannot read {path}: {error.strerror}") from None
    return '"session_id"' in line if file.suffix in (".jsonl", ".json") else SESSION_COLUMNS[0] in line.split(",")


def read_sessions(path: str, scale_tokens: float = 1.0) -> list[LoadSession]:
    """The sessions, in the order in which they begin in the file. Raises `SettingsError` naming file and line."""
    file, found, count = Path(path).expanduser(), dict[str, list[SessionTurn]](), 0
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            rows = _json_turns(stream) if file.suffix in (".jsonl", ".json") else _csv_turns(stream)
            for number, name, turn in rows:
                if not 0 <= turn.think_s < 1e9 or not max(turn.new_tokens, turn.output_tokens) <= TOKENS_MAX:
                    raise _BadLine(number, "a length or a time is out of bounds")
                count += 1
                if count > TURNS_MAX:
                    raise SettingsError(f"--trace: {path} has more than {TURNS_MAX:,} turns")
                found.setdefault(name, []).append(_scaled_turn(turn, scale_tokens))
    except OSError as error:
        raise SettingsError(f"--trace: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"--trace: {path} is not UTF-8 text") from None
    except _BadLine as error:
        raise SettingsError(f"--trace: {path}, line {error.number}: {error}") from None
    if not found:
        raise SettingsError(f"--trace: {path} has no sessions")
    return [LoadSession(tuple(turns)) for turns in found.values()]


def _scaled_turn(turn: SessionTurn, scale_tokens: float) -> SessionTurn:
    new, output = (max(1, round(tokens * scale_tokens)) for tokens in (turn.new_tokens, turn.output_tokens))
    return SessionTurn(new, output, turn.think_s, turn.restarts)


def _csv_turns(stream: TextIO) -> Iterator[tuple[int, str, SessionTurn]]:
    reader = csv.DictReader(stream)
    before: dict[str, tuple[int, int]] = {}
    try:
        missing = [name for name in SESSION_COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise _BadLine(1, f"no column {missing[0]}; needed are {','.join(SESSION_COLUMNS)}")
        for fields in reader:
            try:
                prompt, reused, output = (int(fields[name]) for name in SESSION_COLUMNS[2:5])
                think_s = float(fields["think_s"])
            except (TypeError, ValueError):
                raise _BadLine(reader.line_num, "not three numbers of tokens and a time") from None
            name = fields["session"]
            last_prompt, last_output = before.get(name, (0, 0))
            restarts = bool(last_prompt) and reused < RESTART_SHARE * last_prompt
            new = prompt if restarts or not last_prompt else prompt - last_prompt - last_output
            before[name] = prompt, output
            yield reader.line_num, name, SessionTurn(max(new, 1), max(output, 1), think_s, restarts)
    except csv.Error as error:
        raise _BadLine(reader.line_num, str(error)) from None


def _json_turns(stream: TextIO) -> Iterator[tuple[int, str, SessionTurn]]:
    decoder, number = msgspec.json.Decoder(_SessionLine), 0
    while line := stream.readline(LINE_CHARS_MAX):
        number += 1
        if not line.strip():
            continue
        try:
            found = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise _BadLine(number, str(error)) from None
        turn = SessionTurn(max(found.input_length, 1), max(found.output_length, 1), found.delay / 1000)
        yield number, found.session_id, turn
