"""The process that compiles clients' grammars for a gateway: a line in, a line out. See `gateway.structured.checker`.

The first line is a `Hello`; each of the others a grammar, as a JSON string. Each answer is a JSON string, empty if all is well.
SIGPROF ends the process where a grammar takes too long, whether or not its gateway lives.
"""

import os
import resource
import signal
import sys
from typing import Final

import msgspec

from gateway.structured.hello import COMPILE_CPU_S, Hello
from runtime.grammar.compiler import GrammarError, make_matcher, make_tokenizer

MEMORY_BYTES_MAX: Final = 2 << 30
"""Address space: a grammar that needs more ends the process, not the machine."""
_NICE: Final = 5


def main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gateway, whose end closes our input
    os.nice(_NICE)
    lines = iter(sys.stdin.buffer.readline, b"")
    hello = msgspec.json.decode(next(lines), type=Hello)
    try:
        tokenizer = make_tokenizer(hello.tokenizer, hello.vocab_size, hello.eos_ids)
    except GrammarError as error:
        _say(str(error))
        return 1
    _say("")
    for line in lines:
        signal.setitimer(signal.ITIMER_PROF, COMPILE_CPU_S)
        try:
            make_matcher(msgspec.json.decode(line, type=str), tokenizer)
            _say("")
        except GrammarError as error:
            _say(str(error) or "it cannot be compiled")
        signal.setitimer(signal.ITIMER_PROF, 0)
    return 0


def _say(text: str) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(text) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
