"""A worker whose model says what the prompt tells it to, for clients that need more than a small model can do. Everything else
is real: `tests.e2e.scripted_serve` starts it where `crossdock serve` would start `python -m prefill_worker`.

    @@@<tool_call>{"name": "Read", "arguments": {}}</tool_call>%%%The file has: $RESULT@@@

A prompt with these words is answered with the call, and after the tool's result with the second text. `$RESULT` stands for that
result. Its KV cache is the tokens that it has read, so a wrong hand-over of KV changes what it says.
"""

import re
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.engine import Engine, SeqChunk
from engine.model import loader
from runtime.process.exits import leave
from runtime.settings.command_line import run_role
from runtime.settings.workers import WorkerSettings
from tests import tiny_models
from worker import process

CONTEXT_TOKENS = 1 << 18  # a token is a byte: the tools of Claude Code alone have 64 KiB
TEMPLATE = """\
{%- for tool in tools or [] %}<|system|>{{ tool | tojson }}{% endfor %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|user|><tool_response>{{ message.content }}</tool_response>
{%- else %}<|{{ message.role }}|>{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
RESULT_CHARS = 2000
_ASSISTANT = tiny_models.SPECIAL.index("<|assistant|>")
_SCRIPT = re.compile(r"@@@(.*?)@@@", re.DOTALL)
_RESULT = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)


def make_model(folder: Path) -> Path:
    """Saves the smallest model with a long context and a template that has tools, and returns the folder."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    tiny_models.make("llama", folder, max_position_embeddings=CONTEXT_TOKENS, **sizes)
    for old in folder.glob("chat_template*"):
        old.unlink()
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template, tokenizer.model_max_length = TEMPLATE, CONTEXT_TOKENS
    tokenizer.save_pretrained(folder)
    return folder


class ScriptedRunner:
    """Keeps each token that it reads as the first number of its K."""

    backend = "scripted"
    numerics = "scripted"
    is_batch_invariant = True

    def __init__(self, pool: torch.Tensor, vocab_size: int) -> None:
        self._kept = pool[:, 0, 0, :, 0, 0]  # [blocks, block_size]
        self._vocab_size = vocab_size

    def forward(self, chunks: Sequence[SeqChunk]) -> torch.Tensor:
        size, rows = self._kept.shape[1], []
        for chunk in chunks:
            end = chunk.start + len(chunk.tokens)
            places = torch.arange(chunk.start, end)
            table = torch.tensor(list(chunk.blocks))
            self._kept[table[places // size], places % size] = torch.tensor(list(chunk.tokens), dtype=self._kept.dtype)
            if chunk.wants_logits:
                rows.append(self._logits(self._kept[table].flatten()[:end].numpy().astype(np.uint16)))
        return torch.stack(rows) if rows else torch.empty(0, self._vocab_size)

    def _logits(self, tokens: Any) -> torch.Tensor:
        """`tokens`: the prompt and the answer so far."""
        begins = int(np.flatnonzero(tokens == _ASSISTANT)[-1]) + 1 if _ASSISTANT in tokens else len(tokens)
        answer = _answer(tokens[:begins].tobytes())
        # Where a grammar forbids what the script says, the first token that it permits comes: never anything at random.
        row = torch.arange(self._vocab_size) * -100.0
        said = len(tokens) - begins
        row[answer[said] if said < len(answer) else tiny_models.EOS] = 1000.0
        return row


@lru_cache(maxsize=64)
def _answer(prompt: bytes) -> list[int]:
    tokenizer = tiny_models.tokenizer()
    text = tokenizer.decode(np.frombuffer(prompt, np.uint16).tolist())
    assert isinstance(text, str)
    found = list(_SCRIPT.finditer(text))
    if not found:
        return list(tokenizer.encode("Nothing to say."))
    steps, rest = found[-1][1].split("%%%"), text[found[-1].end() :]
    turn = rest.count("<|assistant|>") - 1
    said = steps[turn] if turn < len(steps) else "Done."
    results = _RESULT.findall(rest.rsplit("<|assistant|>", 2)[-2])
    return list(tokenizer.encode(said.replace("$RESULT", "\n".join(results)[:RESULT_CHARS])))


def run(settings: WorkerSettings) -> int:
    load = loader.load_engine

    def load_scripted(*arguments: Any, **options: Any) -> Engine:
        engine = load(*arguments, **options)
        engine.runner = ScriptedRunner(engine.pool, engine.info.vocab_size)  # type: ignore[assignment]
        return engine

    loader.load_engine = load_scripted
    return process.run_worker(settings)


if __name__ == "__main__":
    name = sys.argv[sys.argv.index("--name") + 1]
    leave(run_role("worker", WorkerSettings, run, fixed={"role": name.partition("-")[0]}))
