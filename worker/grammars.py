"""A thread on which a worker compiles grammars and replays answers through them, so that neither its event loop nor its compute
thread waits. It costs nothing before the first grammar comes."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from runtime.grammar.compiler import Compiler, GrammarError, Matcher, make_tokenizer

Done = Callable[[list[Matcher] | GrammarError], None]


class GrammarThread:
    """Its queue is bounded by the requests that the worker holds: each has two jobs at the most."""

    def __init__(self, model_path: str, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._model = (model_path, vocab_size, tuple(eos_ids))
        self._thread: ThreadPoolExecutor | None = None
        self._compiler: Compiler | None = None

    def warm(self, grammar: str) -> None:
        """Compile a grammar ahead of time, since it will be needed soon."""
        self._submit(partial(self._make, grammar, (), 0), lambda _: None)

    def prepare(self, grammar: str, output_tokens: Sequence[int], choices: int, done: Done) -> None:
        """Make a matcher for each of `choices` choices that has accepted these tokens, and pass the list to `done` on the
        event loop."""
        self._submit(partial(self._make, grammar, output_tokens, choices), done)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _submit(self, work: Callable[[], list[Matcher]], done: Done) -> None:
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="grammar")

        def ended(future: asyncio.Future[list[Matcher]]) -> None:
            if future.cancelled():
                return
            error = future.exception()
            if error is None:
                done(future.result())
            elif isinstance(error, GrammarError):
                done(error)
            else:
                done(GrammarError(f"{type(error).__name__}: {str(error)[:200]}"))

        asyncio.get_running_loop().run_in_executor(self._thread, work).add_done_callback(ended)

    def _make(self, grammar: str, output_tokens: Sequence[int], choices: int) -> list[Matcher]:
        if self._compiler is None:
            self._compiler = _load(*self._model)
        self._compiler.compile(grammar)
        return [self._compiler.matcher(grammar, output_tokens) for _ in range(choices)]


def _load(model_path: str, vocab_size: int, eos_ids: Sequence[int]) -> Compiler:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False).backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Compiler(make_tokenizer(tokenizer.to_str(), vocab_size, eos_ids), vocab_size)
