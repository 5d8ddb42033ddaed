"""Grammars are compiled in processes of their own: what takes too long is refused, and nobody else is kept waiting."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec
import pytest
from tokenizers import AddedToken

from gateway.http.errors import ApiError
from gateway.main import _say_warnings
from gateway.openai.context import ServedModel
from gateway.openai.prepare import ModelRules
from gateway.structured import checker as module
from gateway.structured.checker import GrammarChecker
from gateway.structured.compile_process import COMPILE_CPU_S, CompileJob
from gateway.text.tokenizer import ModelFacts, ModelTokenizer
from runtime.process import log
from tests import tiny_models
from tests.gateway import tokenizers
from tests.gateway.fakes import MODEL, Site, make_site
from tests.gateway.http_words import chat, on_site, post
from tests.helpers import printed

TOKENS = tiny_models.tokenizer().backend_tokenizer.get_vocab_size()
GOOD = 'start: "a"'
SPIN = """
import time
from gateway.structured import compile_process as process
from runtime.grammar import compiler
def make(grammar, tokenizer):
    while "spin" in grammar:
        pass
    if "crash" in grammar:
        raise TypeError
    if "fill" in grammar:
        bytes(process.MEMORY_BYTES_MAX)
    time.sleep(60 if "wait" in grammar else 0)
    return compiler.make_matcher(grammar, tokenizer)
process.make_matcher = make
process.COMPILE_CPU_S = 0.5
raise SystemExit(process.main())
"""
"""The compiler, which never ends, or fails, where the grammar says so."""


def with_checker(test: Callable[[GrammarChecker], Awaitable[None]]) -> None:
    async def body() -> None:
        checker = make_site().gateway.models[0].grammars
        try:
            await test(checker)
        finally:
            await checker.close()

    asyncio.run(body())


async def refusal(checker: GrammarChecker, owner: str, grammar: str) -> str:
    try:
        return await checker.verdict(owner, "group", grammar, "field")
    except ApiError as error:
        return f"{error.status} {error.param}"


def test_grammar_verdicts_are_remembered() -> None:
    """Good grammars pass, bad ones are refused, and a known verdict needs no process."""

    async def test(checker: GrammarChecker) -> None:
        assert await refusal(checker, "a", GOOD) == ""
        assert "unknown name" in await refusal(checker, "a", "start: nothing")
        await checker.close()  # what was said is said again without a process
        assert "unknown name" in await refusal(checker, "b", "start: nothing")

    with_checker(test)


def test_grammar_beyond_limits_is_refused() -> None:
    """A regular expression that exceeds the limits behind its first characters is refused before an answer begins; one that
    cannot go on behind some of them is not."""

    async def test(checker: GrammarChecker) -> None:
        assert "too many expressions" in await refusal(checker, "a", f"start: /{'(a|b|ab)*' * 200}/")
        assert await refusal(checker, "a", r"start: /a|b[^\s\S]/") == ""
        assert await refusal(checker, "a", r"start: /b|a[^\s\S]/") == ""

    with_checker(test)


def test_slow_grammar_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that takes too much CPU time is refused, and others are served meanwhile."""
    monkeypatch.setattr(module, "_COMMAND", (module.sys.executable, "-c", SPIN))  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "ANSWER_S", 60.0)  # the machine may be busy: the limit is of CPU time
    monkeypatch.setattr(module, "WAIT_S", 100.0)

    async def test(checker: GrammarChecker) -> None:
        await asyncio.gather(
            refusal(checker, "a", GOOD), refusal(checker, "b", 'start: "b"')
        )  # both processes are there
        stuck = [asyncio.create_task(refusal(checker, "a", f"spin {number}")) for number in range(3)]
        await asyncio.sleep(0)
        assert await refusal(checker, "b", 'start: "c"') == ""
        assert not any(task.done() for task in stuck)
        first, *others = await asyncio.gather(*stuck)
        assert "takes more than" in first and all("503" in message or "takes more" in message for message in others)

    with_checker(test)


def test_busy_machine_verdict_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that runs out of wall-clock time gets a 503, and no verdict is kept."""
    monkeypatch.setattr(module, "_COMMAND", (module.sys.executable, "-c", SPIN))  # type: ignore[attr-defined]

    async def test(checker: GrammarChecker) -> None:
        assert await refusal(checker, "a", GOOD) == ""
        monkeypatch.setattr(module, "ANSWER_S", 0.2)
        assert await refusal(checker, "a", "wait") == "503 None"
        assert not any("wait" in verdict for verdict in checker._verdicts.values()) and len(checker._verdicts) == 1

    with_checker(test)


def test_crash_is_not_the_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash of the process is a 500: nothing is kept, and nobody has to wait. Too much memory is the grammar's fault."""
    monkeypatch.setattr(module, "_COMMAND", (module.sys.executable, "-c", SPIN))  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "ANSWER_S", 60.0)

    async def test(checker: GrammarChecker) -> None:
        for _ in range(2):
            with pytest.raises(ApiError) as caught:
                await checker.verdict("a", "group", "crash", "field")
            assert (caught.value.status, caught.value.code) == (500, "internal_error")
        assert not checker._verdicts and not checker._slow
        assert await refusal(checker, "a", "fill") == module.TOO_LARGE and "a" in checker._slow

    with_checker(test)


@pytest.mark.parametrize("more", [1, 40])
def test_larger_tokenizer_serves_forms(more: int) -> None:
    """A tokenizer with more tokens than its model serves forms and tools; a prompt with such a token is a 400."""

    async def test(site: Site) -> None:
        raw = tokenizers.sentencepiece_like()
        raw.add_special_tokens([AddedToken(f"<extra{number}>", special=True) for number in range(more)])
        tokenizer = tokenizers.wrapped(raw)
        tokenizer.facts = replace(tokenizer.facts, vocab_size=raw.get_vocab_size() - more - 1, eos_ids=frozenset({0}))
        served = ServedModel(tokenizer, ModelRules(MODEL, 16))
        site.gateway.models = [served]  # type: ignore[misc]
        ids = [*tokenizer.encode("a", add_special_tokens=False), 0]
        site.cluster.answer = lambda _submit, _choice: ids
        try:
            assert not served.grammars.fault
            await chat(site, response_format={"type": "json_object"})
            await chat(site, tools=[{"type": "function", "function": {"name": "f"}}])
            assert site.cluster.submits[0][0].sampling.grammar
            refused = await post(site, "/v1/completions", prompt="a<extra0>")
            assert refused.status_code == 400
            assert "special token that the tokenizer knows and the model does not" in refused.json()["error"]["message"]
        finally:
            await served.grammars.close()

    on_site(test)


def test_loop_does_not_serialize_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop does not serialize the tokenizer when a grammar is checked."""

    async def test(checker: GrammarChecker) -> None:
        monkeypatch.setattr(ModelTokenizer, "serialized", lambda self: pytest.fail("on the event loop"))
        assert await refusal(checker, "a", GOOD) == ""

    with_checker(test)


def test_dead_process_is_replaced() -> None:
    """A grammar is checked by a new process if the old one has died."""

    async def test(checker: GrammarChecker) -> None:
        assert await refusal(checker, "a", GOOD) == ""
        for process in checker._processes:
            if process._running is not None:
                process._running.kill()
                await process._running.wait()
        assert await refusal(checker, "a", 'start: "b"') == ""

    with_checker(test)


def test_missing_process_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is a 503 if no process can be started."""
    monkeypatch.setattr(module, "_COMMAND", ("/does/not/exist",))

    async def test(checker: GrammarChecker) -> None:
        with pytest.raises(ApiError) as caught:
            await checker.verdict("a", "group", GOOD, "field")
        assert (caught.value.status, caught.value.code) == (503, "grammars_unavailable")

    with_checker(test)


@pytest.mark.parametrize("vocab_size", [tiny_models.VOCAB, TOKENS - 1, 100])
def test_any_vocabulary_has_verdicts(vocab_size: int) -> None:
    """A tokenizer may have more tokens than its model. What needs one of those is refused."""

    async def test() -> None:
        raw = tiny_models.tokenizer()
        facts = ModelFacts(512, vocab_size, frozenset({tiny_models.EOS}))
        checker = ServedModel(ModelTokenizer(raw, facts), ModelRules("m", 1)).grammars
        last = TOKENS - 1 if vocab_size >= TOKENS else vocab_size
        try:
            assert await refusal(checker, "a", f"start: <[{tiny_models.EOS + 1}]>") == ""
            fits = await refusal(checker, "a", f"start: <[{last}]>") == ""
            assert fits is (vocab_size >= TOKENS)
        finally:
            await checker.close()

    asyncio.run(test())


def test_unsuited_tokenizers_are_said(capfd: pytest.CaptureFixture[str]) -> None:
    """If no grammar can be compiled for a tokenizer, the start and /ready say so, and requests are refused for good."""

    async def test() -> None:
        site = make_site()
        served = ServedModel(tokenizers.wrapped(tokenizers.word_piece()), ModelRules(MODEL, 1))
        site.gateway.models = [served]
        await _say_warnings([served], log.configure(level="warning", fmt="json", process="g"))
        assert "does not suit" in printed(capfd)
        async with site.client() as client:
            ready = await client.get("/ready")
            assert ready.status_code == 200 and "does not suit" in "".join(ready.json()["warnings"])
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": "a"}],
                "response_format": {"type": "json_object"},
            }
            answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and "retry-after" not in answer.headers
        assert answer.json()["error"]["param"] == "response_format" and "WordPiece" in answer.json()["error"]["message"]
        await served.grammars.close()

    asyncio.run(test())


# --- who is next ------------------------------------------------------------------------------------------------------


class Stub:
    """A process whose jobs take a moment; those named a bomb are killed."""

    is_ready = True
    running = 0
    order: list[str] = []  # noqa: RUF012

    def __init__(self, hello: bytes) -> None:
        pass

    async def verdict(self, job: bytes) -> str:
        Stub.running += 1
        grammar = msgspec.json.decode(job, type=CompileJob).grammar
        Stub.order.append(grammar)
        for _ in range(40 if "bomb" in grammar else 2):
            await asyncio.sleep(0)
        Stub.running -= 1
        return module.TOO_LARGE if "bomb" in grammar else ""

    async def end(self) -> None:
        pass


class Clock:
    now_s = 100.0

    def now(self) -> float:
        return self.now_s


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "_Process", Stub)
    monkeypatch.setattr(module, "clock", clock)
    Stub.order = []
    return clock


async def turns(count: int = 400) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_killed_grammar_delays_its_organisation(time: Clock) -> None:
    """An organisation waits ten times the CPU time after one of its grammars was killed."""

    async def body() -> None:
        checker = GrammarChecker(b"")
        assert await refusal(checker, "evil/ann", "bomb") == module.TOO_LARGE
        later = asyncio.create_task(refusal(checker, "evil/bob", "harmless"))  # of the same organisation
        await turns()
        assert "harmless" not in Stub.order and await refusal(checker, "good", "one") == ""
        time.now_s += 10 * COMPILE_CPU_S + 0.01
        checker._grant()
        assert await later == ""
        await checker.close()

    asyncio.run(body())


def test_organisation_uses_one_process(time: Clock) -> None:
    """An organisation never has two processes, so a small one is served soon."""

    async def body() -> None:
        checker = GrammarChecker(b"")
        many = [asyncio.create_task(refusal(checker, f"big/{n % 7}", f"big {n}")) for n in range(50)]
        few = [asyncio.create_task(refusal(checker, "small", f"small {n}")) for n in range(3)]
        await asyncio.gather(*few)
        assert Stub.order.index("small 2") <= 8
        await asyncio.gather(*many)
        await checker.close()

    asyncio.run(body())


def test_offenders_share_one_process(time: Clock) -> None:
    """However many they are: an honest organisation finds the other process free."""

    async def body() -> None:
        checker = GrammarChecker(b"")
        evil = [f"evil{n}" for n in range(20)]
        for owner in evil:
            await refusal(checker, owner, f"bomb of {owner}")
        time.now_s += 10 * COMPILE_CPU_S + 0.01
        again = [asyncio.create_task(refusal(checker, owner, f"bomb 2 of {owner}")) for owner in evil]
        await asyncio.sleep(0)
        started = len(Stub.order)
        assert await refusal(checker, "honest", "good") == ""
        assert len(Stub.order) - started <= 2 and not any(task.done() for task in again)
        for task in again:
            task.cancel()
        await asyncio.gather(*again, return_exceptions=True)
        assert len(checker._free) == module.PROCESSES and not checker._busy
        await checker.close()

    asyncio.run(body())


def test_cancelled_waiter_holds_nothing(time: Clock) -> None:
    """Requests cancelled while they wait hold no process."""

    async def body() -> None:
        checker = GrammarChecker(b"")
        tasks = [asyncio.create_task(refusal(checker, f"t{n % 3}", f"bomb {n}")) for n in range(12)]
        for number, task in enumerate(tasks):
            await turns(number)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(checker._free) == module.PROCESSES and not checker._busy
        await checker.close()

    asyncio.run(body())


def test_verdicts_are_kept_per_cache_group(time: Clock) -> None:
    """Else, who asks first waits, and that tells whether another tenant has used the grammar."""

    async def body() -> None:
        checker = GrammarChecker(b"")
        for group in ("tenant:a", "tenant:a", "tenant:b"):
            await checker.verdict("x", group, "the same", "field")
        assert Stub.order == ["the same", "the same"]
        await checker.close()

    asyncio.run(body())


def test_unchecked_answer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is checked against its schema, and kept if no process is free to tell."""

    async def test(checker: GrammarChecker) -> None:
        assert "uniqueItems" in await checker.mismatch("a", "[1, 1]", {"uniqueItems": True})
        assert await checker.mismatch("a", "[1, 2]", {"uniqueItems": True}) == ""
        monkeypatch.setattr(module, "WAIT_S", 0.01)
        checker._free.clear()
        assert await checker.mismatch("a", "[1, 1]", {"uniqueItems": True}) == ""

    with_checker(test)
