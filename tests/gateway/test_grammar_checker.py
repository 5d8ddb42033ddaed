"""Grammars are compiled in processes of their own: what takes too long is refused, and nobody else is kept waiting."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gateway.http.errors import ApiError
from gateway.structured import checker as module
from gateway.structured.checker import GrammarChecker
from gateway.text.tokenizer import ModelTokenizer
from tests.gateway.fakes import make_site

GOOD = 'start: "a"'
SPIN = """
import time
from gateway.structured import compile_process as process
from runtime.grammar import compiler
def make(grammar, tokenizer):
    while "spin" in grammar:
        pass
    time.sleep(60 if "wait" in grammar else 0)
    return compiler.make_matcher(grammar, tokenizer)
process.make_matcher = make
process.main()
"""
"""The compiler, which never ends where the grammar says so."""


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
        await checker.check(owner, grammar, "field")
    except ApiError as error:
        return error.message if (error.status, error.param) == (400, "field") else f"{error.status} {error.param}"
    return ""


def test_good_and_bad_ones_and_what_is_remembered() -> None:
    async def test(checker: GrammarChecker) -> None:
        assert await refusal(checker, "a", GOOD) == ""
        assert "unknown name" in await refusal(checker, "a", "start: nothing")
        await checker.close()  # what was said is said again without a process
        assert "unknown name" in await refusal(checker, "b", "start: nothing")

    with_checker(test)


def test_one_that_takes_too_long_is_refused_and_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COMMAND", (module.sys.executable, "-c", SPIN))
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
        assert all("takes more than" in message for message in await asyncio.gather(*stuck))
        assert await refusal(checker, "a", 'start: "d"') == ""

    with_checker(test)


def test_a_busy_machine_refuses_no_grammar_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COMMAND", (module.sys.executable, "-c", SPIN))

    async def test(checker: GrammarChecker) -> None:
        assert await refusal(checker, "a", GOOD) == ""
        monkeypatch.setattr(module, "ANSWER_S", 0.2)
        assert await refusal(checker, "a", "wait") == "503 None"
        assert not any("wait" in verdict for verdict in checker._verdicts.values()) and len(checker._verdicts) == 1

    with_checker(test)


def test_no_tokenizer_is_written_out_while_streams_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(checker: GrammarChecker) -> None:
        monkeypatch.setattr(ModelTokenizer, "serialized", lambda self: pytest.fail("on the event loop"))
        assert await refusal(checker, "a", GOOD) == ""

    with_checker(test)


def test_a_process_that_dies_is_replaced() -> None:
    async def test(checker: GrammarChecker) -> None:
        assert await refusal(checker, "a", GOOD) == ""
        for process in checker._processes:
            if process._running is not None:
                process._running.kill()
                await process._running.wait()
        assert await refusal(checker, "a", 'start: "b"') == ""

    with_checker(test)


def test_without_a_process_the_answer_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COMMAND", ("/does/not/exist",))

    async def test(checker: GrammarChecker) -> None:
        with pytest.raises(ApiError) as caught:
            await checker.check("a", GOOD, "field")
        assert (caught.value.status, caught.value.code) == (503, "grammars_unavailable")

    with_checker(test)
