"""The attacks, each from a process of its own: `python -m tools.attacks.kinds NAME TARGET-AS-JSON`. Prints what came of it."""

import asyncio
import json
import os
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import httpx

from tests.e2e import hostile
from tools.attacks.bodies import SHAPES, body
from tools.attacks.cluster import Target, api_key
from tools.attacks.peers import FakePeer, many_frames, open_connections, renew_with_another_model, stay, worker

BODY_BYTES = 8_200_000  # just under the default of --body-bytes-max
CLIENT_S = 25.0  # the time that an attacker's client waits for an answer
Outcome = Counter[str]


@dataclass
class Attack:
    run: Callable[[Target], Outcome]
    line: str  # the row of the table of attacks, such as R13
    bound_s: float


ATTACKS: Final[dict[str, Attack]] = {}


def attack(name: str, line: str, bound_s: float = 15.0) -> Callable[[Callable[[Target], Outcome]], None]:
    def add(run: Callable[[Target], Outcome]) -> None:
        ATTACKS[name] = Attack(run, line, bound_s)

    return add


def post(target: Target, path: str, content: bytes | dict[str, Any], tenant: str = "evil0") -> tuple[str, str]:
    """Sends a request. Returns (status or kind of error, text)."""
    if isinstance(content, dict):
        content = json.dumps({"model": target.model, "max_tokens": 8, **content}).encode()
    headers = {"Authorization": f"Bearer {api_key(tenant)}", "Content-Type": "application/json"}
    try:
        url = target.base_url + path
        answer = httpx.post(url, content=content, headers=headers, timeout=CLIENT_S, trust_env=False)
    except httpx.HTTPError as error:
        return type(error).__name__, ""
    return str(answer.status_code), answer.text


def for_seconds(seconds: float, threads: int, work: Callable[[int], str]) -> Outcome:
    """Runs `work(number)` in `threads` threads until the time is over; counts what it returns."""
    end, counts = time.monotonic() + seconds, Outcome()
    numbers = iter(range(1 << 30))

    def one(_: int) -> None:
        while time.monotonic() < end:
            counts[work(next(numbers))] += 1

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, range(threads)))
    return counts


# --- bodies ---------------------------------------------------------------------------------------------------------------


def send_shapes(target: Target, names: Iterable[str]) -> Outcome:
    """Sends one body after the other, from two tenants in turn."""
    counts = Outcome()
    for number, name in enumerate(names):
        sys.stdout.write(f"\n{name}")
        sys.stdout.flush()
        path, content = body(name, target.model, BODY_BYTES)
        began = time.monotonic()
        status, _ = post(target, path, content, f"evil{number % 2}")
        counts[status] += 1
        if not status.isdecimal():
            counts[f"no answer to {name}"] += 1
            break
        if (took_s := time.monotonic() - began) > 3:
            counts[f"{name}: {took_s:.0f} s"] += 1
    return counts


ALONE: Final = ("bad parts", "bad logit_bias", "unknown keys of a message", "parsed")
for _name in ALONE:
    attack(f"body: {_name}", "R13" if _name == "parsed" else "R1")(partial(send_shapes, names=[_name]))
_rest = [name for name in SHAPES if name not in ALONE]
for _number in range(0, len(_rest), 9):
    _names = _rest[_number : _number + 9]
    attack(f"bodies {_number + 1}-{_number + len(_names)}", "R1", 30.0)(partial(send_shapes, names=_names))


@attack("bodies, 16 at once", "R13")
def _(target: Target) -> Outcome:
    _, content = body("parsed", target.model, BODY_BYTES)
    with ThreadPoolExecutor(16) as pool:
        tenants = [f"evil{number % 2}" for number in range(16)]
        return Outcome(
            status for status, _ in pool.map(lambda one: post(target, "/v1/chat/completions", content, one), tenants)
        )


@attack("forms with odd heads, 40 at once", "R13", 30.0)
def _(target: Target) -> Outcome:
    part = b'--b\r\nContent-Disposition: form-data; name="x";";' + b";" * 3_900 + b"\r\n\r\nx\r\n"
    false = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + b"\r\n--bX" * 10_000
    few = b'--b\r\nContent-Disposition: form-data; name="x"' + b";a" * 31 + b"\r\nA:" + b";" * 4_000 + b"\r\n\r\n\r\n"
    headers = {"Authorization": f"Bearer {api_key('evil0')}", "Content-Type": "multipart/form-data; boundary=b"}

    def one(number: int) -> str:
        form = (part * 14, false, few * 16)[number % 3] + b"--b--"
        try:
            url = f"{target.base_url}/v1/files"
            return str(httpx.post(url, content=form, headers=headers, timeout=CLIENT_S, trust_env=False).status_code)
        except httpx.HTTPError as error:
            return type(error).__name__

    return for_seconds(8, 40, one)


# --- grammars -------------------------------------------------------------------------------------------------------------

SPACES: Final[dict[str, Callable[[int], str]]] = {
    "lines of spaces": lambda size: ("\n" + " " * (size // 2000 - 1)) * 2000 + "x",
    "one line of spaces": lambda size: " " * size + "x",
    "blank lines before ::=": lambda size: ("\n" + " " * (size // 1900 - 1)) * 1900 + "::=",
    "tabs and form feeds": lambda size: ("\n" + "\t\f" * (size // 4000)) * 2000 + "start",
}
REGEXES: Final = (
    "((((a{1,9}){1,9}){1,9}){1,9}){1,9}", "(a|b|ab)*" * 200, "[^\\s\\S]", "(?:x{1,1000}){1,1000}", "\\w{1,5000}.*\\w{1,5000}",
    "(" * 5000, "((a*)*)*" * 50 + "b", ".*a.{30}", "(a?){500}a{500}", "/" * 100_000, "\\" * 100_001,
    "[" + "a-z" * 20_000 + "]",
)  # fmt: skip


def by_both(target: Target, seconds: float, threads: int, make: Callable[[int], dict[str, Any]]) -> Outcome:
    """Sends chats that contain `make(number)`, from two tenants with `threads` threads each."""

    def one(number: int) -> str:
        chat = {"messages": [{"role": "user", "content": "x"}], **make(number)}
        return post(target, "/v1/chat/completions", chat, f"evil{number % 2}")[0]

    return for_seconds(seconds, 2 * threads, one)


def bomb(number: int) -> dict[str, Any]:
    parts = [{"type": "integer", "multipleOf": 9001 + 2 * number}, {"type": "integer", "multipleOf": 9973 + 2 * number}]
    return {"guided_json": {"allOf": parts}}


def wide_schema(number: int) -> dict[str, Any]:
    pattern = {"type": "string", "pattern": f"^[a-z]{{1,{200 + number % 300}}}(x|y){{2,90}}$"}
    return {"guided_json": {"type": "object", "properties": {f"k{number}_{index}": pattern for index in range(60)}}}


@attack("grammar of white space", "R4", 30.0)
def _(target: Target) -> Outcome:
    counts = Outcome()
    for name, make in SPACES.items():
        for field in ("guided_grammar", "guided_regex"):
            began = time.monotonic()
            counts[post(target, "/v1/completions", {"prompt": "x", field: make(BODY_BYTES)})[0]] += 1
            if (took_s := time.monotonic() - began) > 3:
                counts[f"{field}, {name}: {took_s:.0f} s"] += 1
    return counts


@attack("regular expressions", "R4", 20.0)
def _(target: Target) -> Outcome:
    texts = [(field, text) for text in REGEXES for field in ("guided_regex", "guided_grammar")]

    def one(pair: tuple[str, str]) -> str:
        field, text = pair
        return post(
            target, "/v1/completions", {"prompt": "x", field: text if field == "guided_regex" else f"start: /{text}/"}
        )[0]

    with ThreadPoolExecutor(2) as pool:
        return Outcome(pool.map(one, texts))


attack("multipleOf bombs, 3 at once by each", "R5", 20.0)(lambda target: by_both(target, 8, 3, bomb))
attack("multipleOf bombs, 25 at once by each", "R5", 25.0)(lambda target: by_both(target, 12, 25, bomb))
attack("queue of large schemas", "R5", 20.0)(lambda target: by_both(target, 8, 25, wide_schema))


@attack("grammars without an answer", "api 4", 20.0)
def _(target: Target) -> Outcome:
    again = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    neither = {"allOf": [{"type": "integer"}, {"type": "string"}]}
    schemas: tuple[Any, ...] = ({"$ref": "#"}, again, neither, False, {"enum": []})
    endless: list[dict[str, Any]] = [{"guided_json": schema} for schema in schemas]
    endless += [{"guided_regex": "[^\\s\\S]"}, {"guided_regex": "a[^\\s\\S]|[^\\s\\S]b"}]
    endless += [{"guided_grammar": "start: start"}, {"guided_grammar": "start: a\na: b\nb: a"}]
    return Outcome(post(target, "/v1/completions", {"prompt": "x", **asked})[0] for asked in endless)


@attack("special tokens inside grammars", "api 2", 20.0)
def _(target: Target) -> Outcome:
    counts = Outcome()
    for name in ("<eos>", "<|user|>", "<|assistant|>", "<pad>", "<bos>"):
        schema = {
            "type": "object",
            "properties": {"a": {"const": name}},
            "required": ["a"],
            "additionalProperties": False,
        }
        status, text = post(
            target, "/v1/completions", {"prompt": "x", "max_tokens": 60, "guided_json": schema, "temperature": 0}
        )
        counts[status] += 1
        if status == "200":
            choice = json.loads(text)["choices"][0]
            whole = '"a"' in choice["text"] and choice["text"].rstrip().endswith("}")
            if choice["finish_reason"] == "stop" and not whole:
                counts["WRONG: broken JSON told as complete"] += 1
    return counts


# --- frames and peers -----------------------------------------------------------------------------------------------------

for _name in ("coordinator", "gateway", "decode_worker"):
    attack(f"1,000,000 frames to the {_name}", "R3", 20.0)(partial(many_frames, port=_name, count=1_000_000, size=1))
    attack(f"400 MiB in one message to the {_name}", "R3", 20.0)(
        partial(many_frames, port=_name, count=50, size=8 << 20)
    )


def raw_frames(target: Target, name: str, frame: bytes, count: int) -> Outcome:
    """Sends frames to a port as a client without a key, in a message that never ends."""
    host, _, port = target.addresses[name].removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        try:
            connection.sendall(hostile.greeting(b"NULL") + hostile.READY)
            for _ in range(count):
                connection.sendall(frame)
            time.sleep(3)
        except OSError as error:
            return Outcome([f"cut off: {type(error).__name__}"])
    return Outcome(["held"])


@attack("without a key: 1,000,000 frames, 400 MiB never ending", "R3", 20.0)
def _(target: Target) -> Outcome:
    counts = Outcome()
    for name in target.addresses:
        counts += raw_frames(target, name, b"\x01\x01x" * 100_000, 10)
        counts += raw_frames(target, name, b"\x03" + struct.pack(">Q", 8 << 20) + bytes(8 << 20), 50)
    return counts


@attack("connections without Hello", "R14", 25.0)
def _(target: Target) -> Outcome:
    peers = [FakePeer(target, name, None) for name in target.addresses for _ in range(100)]
    time.sleep(8)
    left = {name: open_connections(target, name) for name in target.addresses}
    counts = Outcome({f"WRONG: open after 8 s at the {name}": number for name, number in left.items() if number})
    for peer in peers:
        peer.close()
    return counts


@attack("Submit renewed with another model", "R2", 15.0)
def _(target: Target) -> Outcome:
    return renew_with_another_model(target)


@attack("65 models", "R11", 25.0)
def _(target: Target) -> Outcome:
    peers = [worker(target, role, f"m{number}") for number in range(66) for role in ("prefill", "decode")]
    stay(peers, 6)
    refused = sum(peer.heard["Refused"] > 0 for peer in peers)
    ready = httpx.get(f"{target.base_url}/ready", timeout=5, trust_env=False).status_code
    for peer in peers:
        peer.bye()
    return Outcome({"workers refused": refused, "ready" if ready == 200 else "WRONG: the gateway is not ready": 1})


# --- HTTP connections -----------------------------------------------------------------------------------------------------


@attack("hostile connections at every port", "R14", 25.0)
def _(target: Target) -> Outcome:
    ports = [(target.base_url.removeprefix("http://"), "http")]
    words = "curve" if target.keys else "zmq"
    ports += [(address.removeprefix("tcp://"), words) for address in target.addresses.values()]

    async def all_ports() -> Outcome:
        counts = Outcome()
        for address, kind in ports:
            host, _, port = address.rpartition(":")
            counts += await hostile.attack(host, int(port), kind, 300, 3.0)
        return counts

    return asyncio.run(all_ports())


def begin_request(target: Target, tokens: int, more: int = 0) -> socket.socket:
    """A streamed completion, sent but for `more` bytes of its body."""
    host, _, port = target.base_url.removeprefix("http://").rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    asked = {"model": target.model, "prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    content, key = json.dumps(asked), api_key("evil0")
    head = hostile.REQUEST.decode() + f"Authorization: Bearer {key}\r\nContent-Length: {len(content) + more}\r\n\r\n"
    connection.sendall((head + content).encode())
    return connection


@attack("half-closed clients", "api 10")
def _(target: Target) -> Outcome:
    counts = Outcome()
    for _ in range(30):
        with begin_request(target, 4) as connection:
            connection.shutdown(socket.SHUT_WR)
            got = b""
            try:
                while piece := connection.recv(65_536):
                    got += piece
            except TimeoutError:
                counts["WRONG: left open"] += 1
                continue
            except OSError as error:
                counts[type(error).__name__] += 1
        counts["answered" if b"[DONE]" in got else "cancelled"] += 1
    return counts


@attack("clients that do not read, and slow bodies", "slow", 25.0)
def _(target: Target) -> Outcome:
    rng, counts = random.Random(target.seed), Outcome()
    silent = [begin_request(target, 300) for _ in range(4)]
    dripping = [begin_request(target, 1, 8_000_000) for _ in range(60)]
    end = time.monotonic() + 8
    while time.monotonic() < end:
        for connection in rng.sample(dripping, 20):
            try:
                connection.sendall(b" ")
            except OSError:
                counts["cut off"] += 1
        time.sleep(0.1)
    for connection in silent + dripping:
        connection.close()
    return counts


def main() -> None:
    name, target = sys.argv[1], Target(**json.loads(sys.argv[2]))
    sys.stdout.write("\n" + json.dumps(ATTACKS[name].run(target)))
    sys.stdout.flush()
    os._exit(0)  # without waiting for messages that nobody takes any more


if __name__ == "__main__":
    main()
