"""The JSON of answers, whole and in chunks, as OpenAI defines it, with vLLM's `token_ids` and `prompt_token_ids`."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.prepare import Prepared
from gateway.stream_types import Deliver
from gateway.tokenizer import ModelTokenizer
from proto.sampling import TokenLogprobs

Json = dict[str, Any]
_LOGPROB_MIN = -9999.0
"""JSON has no minus infinity."""


def _finite(logprob: float) -> float:
    return max(_LOGPROB_MIN, logprob)


@dataclass
class ChoiceState:
    """What has been said of one choice so far; all of it is kept only for an answer in one piece."""

    index: int
    prompt: int
    """Number of its prompt."""
    text_chars: int = 0
    """Of the tokens' own texts, from which `text_offset` counts."""
    started: bool = False
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None


class Answer(Protocol):
    """One kind of endpoint's way of writing."""

    def chunks(self, choice: ChoiceState, part: Deliver) -> Iterable[Json]: ...
    def usage_chunk(self, completion_tokens: int, cached_tokens: int) -> Json: ...
    def whole(self, choices: Iterable[ChoiceState], cached_tokens: int) -> Json: ...


class _Base:
    whole_kind = ""
    chunk_kind = ""

    def __init__(
        self, prepared: Prepared, tokenizer: ModelTokenizer, *, answer_id: str, created: int, model: str
    ) -> None:
        self.prepared = prepared
        self.tokenizer = tokenizer
        self._head = {"id": answer_id, "created": created, "model": model}

    def _chunk(self, choices: list[Json]) -> Json:
        chunk: Json = {**self._head, "object": self.chunk_kind, "choices": choices}
        if self.prepared.include_usage:
            chunk["usage"] = None
        return chunk

    def usage_chunk(self, completion_tokens: int, cached_tokens: int) -> Json:
        usage = self._usage(completion_tokens, cached_tokens)
        return {**self._head, "object": self.chunk_kind, "choices": [], "usage": usage}

    def _usage(self, completion_tokens: int, cached_tokens: int) -> Json:
        prompt_tokens = sum(len(prompt) for prompt in self.prepared.prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }


class CompletionAnswer(_Base):
    whole_kind = chunk_kind = "text_completion"

    def chunks(self, choice: ChoiceState, part: Deliver) -> Iterable[Json]:
        echo = "" if choice.started else self.prepared.echoes[choice.prompt]
        text = echo + part.text
        wanted = self.prepared.sampling.logprobs >= 0
        if not (text or part.finish or wanted or self.prepared.return_token_ids):
            return
        body: Json = {"index": choice.index, "text": text}
        body["logprobs"] = self._logprobs(choice, part.tokens, part.logprobs) if wanted else None
        body["finish_reason"] = part.finish and part.finish.value
        if self.prepared.return_token_ids:
            body["prompt_token_ids"] = None if choice.started else self.prepared.prompts[choice.prompt]
            body["token_ids"] = part.tokens
        choice.started = True
        yield self._chunk([body])

    def whole(self, choices: Iterable[ChoiceState], cached_tokens: int) -> Json:
        bodies, completion_tokens = [], 0
        for choice in choices:
            completion_tokens += len(choice.tokens)
            wanted = self.prepared.sampling.logprobs >= 0
            body: Json = {
                "index": choice.index,
                "text": self.prepared.echoes[choice.prompt] + "".join(choice.texts),
                "logprobs": self._logprobs(choice, choice.tokens, choice.logprobs) if wanted else None,
                "finish_reason": choice.finish,
            }
            if self.prepared.return_token_ids:
                body["prompt_token_ids"] = self.prepared.prompts[choice.prompt]
                body["token_ids"] = choice.tokens
            bodies.append(body)
        usage = self._usage(completion_tokens, cached_tokens)
        return {**self._head, "object": self.whole_kind, "choices": bodies, "usage": usage}

    def _logprobs(self, choice: ChoiceState, tokens: Iterable[int], logprobs: Iterable[TokenLogprobs]) -> Json:
        texts, drawn, tops, offsets = [], [], [], []
        for token, entry in zip(tokens, logprobs, strict=True):
            text = self.tokenizer.token_text(token)
            top: dict[str, float] = {}
            for candidate, logprob in entry.top:
                top.setdefault(self.tokenizer.token_text(candidate), _finite(logprob))
            top.setdefault(text, _finite(entry.logprob))
            texts.append(text)
            drawn.append(_finite(entry.logprob))
            tops.append(top)
            offsets.append(choice.text_chars)
            choice.text_chars += len(text)
        return {"tokens": texts, "token_logprobs": drawn, "top_logprobs": tops, "text_offset": offsets}


class ChatAnswer(_Base):
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def chunks(self, choice: ChoiceState, part: Deliver) -> Iterable[Json]:
        if not choice.started:
            choice.started = True
            head = {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            chunk = self._chunk([{**head, "finish_reason": None}])
            if self.prepared.return_token_ids:
                chunk["prompt_token_ids"] = self.prepared.prompts[choice.prompt]
            yield chunk
        wanted = self.prepared.sampling.logprobs >= 0
        if not (part.text or part.finish or wanted or self.prepared.return_token_ids):
            return
        body: Json = {"index": choice.index, "delta": {"content": part.text} if part.text else {}}
        body["logprobs"] = self._logprobs(part.tokens, part.logprobs) if wanted else None
        body["finish_reason"] = part.finish and part.finish.value
        if self.prepared.return_token_ids:
            body["token_ids"] = part.tokens
        yield self._chunk([body])

    def whole(self, choices: Iterable[ChoiceState], cached_tokens: int) -> Json:
        bodies, completion_tokens = [], 0
        wanted = self.prepared.sampling.logprobs >= 0
        for choice in choices:
            completion_tokens += len(choice.tokens)
            body: Json = {
                "index": choice.index,
                "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
                "logprobs": self._logprobs(choice.tokens, choice.logprobs) if wanted else None,
                "finish_reason": choice.finish,
            }
            if self.prepared.return_token_ids:
                body["token_ids"] = choice.tokens
            bodies.append(body)
        usage = self._usage(completion_tokens, cached_tokens)
        answer = {**self._head, "object": self.whole_kind, "choices": bodies, "usage": usage}
        if self.prepared.return_token_ids:
            answer["prompt_token_ids"] = self.prepared.prompts[0]
        return answer

    def _logprobs(self, tokens: Iterable[int], logprobs: Iterable[TokenLogprobs]) -> Json:
        content = []
        for token, entry in zip(tokens, logprobs, strict=True):
            top = [self._token(candidate, logprob) for candidate, logprob in entry.top]
            content.append({**self._token(token, entry.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> Json:
        return {
            "token": self.tokenizer.token_text(token),
            "logprob": _finite(logprob),
            "bytes": list(self.tokenizer.token_bytes(token)),
        }
