"""The JSON of answers, whole and in chunks, as OpenAI defines it, with vLLM's `token_ids` and `prompt_token_ids`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from gateway.http.encoding import encode
from gateway.http.errors import ApiError
from gateway.openai.evaluation import echoed_logprobs, finite, prompt_logprobs
from gateway.openai.prepare import Prepared
from gateway.streams.prompt_scores import PromptScores
from gateway.streams.types import Deliver, Finish
from gateway.text.token_texts import TokenTexts
from gateway.text.tokenizer import ModelTokenizer
from gateway.tools.reader import AnswerReader
from proto.sampling import TokenLogprobs

Json = dict[str, Any]
_DONE = b"data: [DONE]\n\n"
_ENDS = (Finish.STOP, Finish.TOOL_CALLS)  # Finish reasons after which the last token may be a stop token


@dataclass
class ChoiceState:
    """The state of one choice. Its texts and tokens are kept only if the answer is sent in one piece."""

    index: int
    prompt: int  # Number of its prompt
    token_texts: TokenTexts | None = None  # Where log probabilities are asked for
    started: bool = False
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    reader: AnswerReader | None = None  # Where thoughts and calls are taken out of the text
    reasoning: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)  # Whole ones, as they have come so far

    @property
    def mean_logprob(self) -> float:
        """Per token, for `best_of`."""
        return sum(finite(entry.logprob) for entry in self.logprobs) / max(1, len(self.logprobs))


class _Shown(NamedTuple):
    """One token of a choice, for its log probabilities."""

    text: str
    name: str  # as of `TokenTexts.name`
    own_bytes: bytes
    offset: int  # Where `text` begins in the choice's text, in characters
    logprob: float
    top: list[tuple[str, bytes, float]]  # Texts, bytes and log probabilities of the likeliest tokens at its place


class Head(NamedTuple):
    """The fields that begin each answer, and each chunk of one."""

    answer_id: str
    created: int  # Unix time in seconds
    model: str
    system_fingerprint: Callable[[], str | None]


class Answer(ABC):
    """Writes the answer to one request of one kind of endpoint."""

    whole_kind = ""
    chunk_kind = ""

    def __init__(self, prepared: Prepared, tokenizer: ModelTokenizer, head: Head) -> None:
        self.prepared = prepared
        self.tokenizer = tokenizer
        self._head = {"id": head.answer_id, "created": head.created, "model": head.model}
        self._fingerprint = head.system_fingerprint
        self.prompt_scores: Sequence[PromptScores | None] = [None] * len(prepared.prompts)  # whole before any token
        self._shows_logprobs = prepared.sampling.logprobs >= 0 and not prepared.hides_logprobs
        self._readers: list[AnswerReader] = []

    @abstractmethod
    def chunks(self, choice: ChoiceState, part: Deliver) -> Iterable[Json]: ...
    @abstractmethod
    def whole(self, choices: Iterable[ChoiceState], cached_tokens: int) -> Json: ...

    def collect(self, choice: ChoiceState, part: Deliver) -> None:
        """Take this part for an answer in one piece."""
        choice.texts.append(part.text)
        choice.tokens.extend(part.tokens)
        choice.logprobs.extend(part.logprobs)
        choice.finish = part.finish or choice.finish

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {**self._head, "object": kind, "system_fingerprint": self._fingerprint(), "choices": choices}

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = self._envelope(self.chunk_kind, choices)
        if self.prepared.include_usage:
            chunk["usage"] = None
        return chunk

    def event(self, content: Json) -> bytes:
        """A chunk as it is sent."""
        return b"data: " + encode(content) + b"\n\n"

    def opening(self) -> bytes:
        """The bytes that are sent as soon as the request is accepted."""
        return b""

    def closing(self, completion_tokens: int, cached_tokens: int) -> bytes:
        """The end of a stream whose choices have all ended."""
        if not self.prepared.include_usage:
            return _DONE
        usage = self.usage(completion_tokens, cached_tokens)
        return self.event(self._envelope(self.chunk_kind, []) | {"usage": usage}) + _DONE

    async def settle(self) -> None:  # noqa: B027 - most answers need nothing
        """Called once the end of the answer has been written, before it is sent."""

    def failing(self, error: ApiError, request_id: str) -> bytes:
        """The end of a stream that fails, without `[DONE]`."""
        return self.event(error.body(request_id))

    @abstractmethod
    def _logprobs(self, choice: ChoiceState, part: Deliver | ChoiceState) -> Json: ...

    def _entry(self, choice: ChoiceState, part: Deliver | ChoiceState, finish: Finish | None, **content: Any) -> Json:
        """One entry of `choices`. `part` is what a chunk adds, or the whole choice."""
        logprobs = self._logprobs(choice, part) if self._shows_logprobs else None
        entry = {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": finish}
        return entry | ({"token_ids": part.tokens} if self.prepared.return_token_ids else {})

    def _shown(self, choice: ChoiceState, part: Deliver | ChoiceState) -> Iterator[_Shown]:
        texts = choice.token_texts = choice.token_texts or self.prepared.token_texts(choice.prompt, self.tokenizer)
        stop_ids = self.prepared.sampling.stop_token_ids
        for number, (token, entry) in enumerate(zip(part.tokens, part.logprobs, strict=True), 1):
            top = [(*texts.candidate(other), finite(logprob)) for other, logprob in entry.top]
            offset = texts.chars
            is_last = part.finish is not None and number == len(part.tokens)
            is_text = not (is_last and part.finish in _ENDS and token in stop_ids)
            text, own_bytes = texts.push(token, is_last=is_last, is_text=is_text)
            yield _Shown(text, texts.name(token, text, is_text=is_text), own_bytes, offset, finite(entry.logprob), top)

    def _prompt_logprobs(self, prompt: int) -> Json:
        """vLLM's field, where it is asked for."""
        scores, prepared = self.prompt_scores[prompt], self.prepared
        if prepared.prompt_logprobs < 0 or scores is None:
            return {}
        tokens, top = prepared.prompts[prompt], prepared.prompt_logprobs
        return {"prompt_logprobs": prompt_logprobs(tokens, scores, top, self.tokenizer)}

    def usage(self, completion_tokens: int, cached_tokens: int) -> Json:
        prompt_tokens = sum(len(prompt) for prompt in self.prepared.prompts)
        usage: Json = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }
        if self._readers:
            reasoning = sum(reader.reasoning_tokens for reader in self._readers)
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return usage


class CompletionAnswer(Answer):
    whole_kind = chunk_kind = "text_completion"

    def chunks(self, choice: ChoiceState, part: Deliver) -> Iterable[Json]:
        echo = "" if choice.started else self.prepared.echoes[choice.prompt]
        text = echo + part.text
        if not (text or part.finish or self._shows_logprobs or self.prepared.return_token_ids):
            return
        entry = self._entry(choice, part, part.finish, text=text)
        if self.prepared.return_token_ids:
            entry["prompt_token_ids"] = None if choice.started else self.prepared.prompts[choice.prompt]
        choice.started = True
        yield self._chunk([entry])

    def whole(self, choices: Iterable[ChoiceState], cached_tokens: int) -> Json:
        entries, drawn = [], list(choices)
        for index, choice in enumerate(self._best(drawn)):
            text = self.prepared.echoes[choice.prompt] + "".join(choice.texts)
            entry = self._entry(choice, choice, choice.finish, text=text) | self._prompt_logprobs(choice.prompt)
            if self.prepared.return_token_ids:
                entry["prompt_token_ids"] = self.prepared.prompts[choice.prompt]
            entries.append(entry | {"index": index})
        usage = self.usage(sum(len(choice.tokens) for choice in drawn), cached_tokens)
        return self._envelope(self.whole_kind, entries) | {"usage": usage}

    def _best(self, drawn: list[ChoiceState]) -> list[ChoiceState]:
        """Returns the choices to give: for each prompt, those that are likeliest per token if more were drawn."""
        each, given = self.prepared.choices, self.prepared.answers
        if each == given:
            return drawn
        prompts = [drawn[at : at + each] for at in range(0, len(drawn), each)]
        return [choice for some in prompts for choice in sorted(some, key=lambda one: -one.mean_logprob)[:given]]

    def _logprobs(self, choice: ChoiceState, part: Deliver | ChoiceState) -> Json:
        """Returns the choice's log probabilities, after those of its prompt if the prompt is echoed."""
        own = self._own_logprobs(choice, part)
        if not self.prepared.echoes_logprobs:
            return own
        echo = len(self.prepared.echoes[choice.prompt])
        own["text_offset"] = [offset + echo for offset in own["text_offset"]]
        scores = self.prompt_scores[choice.prompt]
        if choice.started or scores is None:
            return own
        prompt, top = self.prepared.prompts[choice.prompt], self.prepared.sampling.logprobs
        kept = self.prepared.keeps_special
        echoed = echoed_logprobs(prompt, scores, top, self.tokenizer, keeps_special=kept)
        return {name: [*values, *own[name]] for name, values in echoed.items()}

    def _own_logprobs(self, choice: ChoiceState, part: Deliver | ChoiceState) -> Json:
        texts, drawn, tops, offsets = [], [], [], []
        for shown in self._shown(choice, part):
            top: dict[str, float] = {}
            for text, _, logprob in shown.top:
                top.setdefault(text, logprob)
            top.setdefault(shown.name, shown.logprob)
            texts.append(shown.name)
            drawn.append(shown.logprob)
            tops.append(top)
            offsets.append(shown.offset)
        return {"tokens": texts, "token_logprobs": drawn, "top_logprobs": tops, "text_offset": offsets}


class ChatAnswer(Answer):
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def _read(self, choice: ChoiceState, part: Deliver) -> tuple[Json, Finish | None]:
        """(what the part adds to the message, its finish reason)"""
        reading = self.prepared.form.reading
        if reading is None:
            return ({"content": part.text} if part.text else {}), part.finish
        if choice.reader is None:
            choice.reader = AnswerReader(reading, f"{self._head['id']} {choice.index}")
            self._readers.append(choice.reader)
        cut = part.finish is not None and not part.stop and not part.ended_by(self.tokenizer.facts.eos_ids)
        delta = choice.reader.feed(part.text, part.tokens, ended=part.finish is not None, cut=cut).delta()
        called = part.finish is Finish.STOP and choice.reader.calls and not choice.reader.ends_in_call
        return delta, Finish.TOOL_CALLS if called else part.finish

    def collect(self, choice: ChoiceState, part: Deliver) -> None:
        super().collect(choice, part)
        if self.prepared.form.reading is None:
            return
        choice.texts.pop()
        delta, finish = self._read(choice, part)
        choice.finish = finish or choice.finish
        choice.texts.append(delta.get("content", ""))
        choice.reasoning.append(delta.get("reasoning_content", ""))
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                choice.calls.append({key: value for key, value in call.items() if key != "index"})
            else:
                choice.calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]

    def _message(self, choice: ChoiceState) -> Json:
        content = "".join(choice.texts)
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if reasoning := "".join(choice.reasoning):
            message["reasoning_content"] = reasoning
        if choice.calls:
            message |= {"content": content or None, "tool_calls": choice.calls}
        return message

    def chunks(self, choice: ChoiceState, part: Deliver) -> Iterable[Json]:
        if not choice.started:
            choice.started = True
            head = {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            chunk = self._chunk([{**head, "finish_reason": None}])
            if self.prepared.return_token_ids:
                chunk["prompt_token_ids"] = self.prepared.prompts[choice.prompt]
            yield chunk
        delta, finish = self._read(choice, part)
        if delta or finish or self._shows_logprobs or self.prepared.return_token_ids:
            yield self._chunk([self._entry(choice, part, finish, delta=delta)])

    def whole(self, choices: Iterable[ChoiceState], cached_tokens: int) -> Json:
        drawn = list(choices)
        entries = [self._entry(choice, choice, choice.finish, message=self._message(choice)) for choice in drawn]
        usage = self.usage(sum(len(choice.tokens) for choice in drawn), cached_tokens)
        answer = self._envelope(self.whole_kind, entries) | {"usage": usage}
        answer |= self._prompt_logprobs(0)
        if self.prepared.return_token_ids:
            answer["prompt_token_ids"] = self.prepared.prompts[0]
        return answer

    def _logprobs(self, choice: ChoiceState, part: Deliver | ChoiceState) -> Json:
        content = [self._scored(shown) for shown in self._shown(choice, part)]
        return {"content": content, "refusal": None}

    def _scored(self, shown: _Shown) -> msgspec.Raw:
        own = self._token(shown.text, shown.own_bytes, shown.logprob)
        tops = [self._token(*candidate) for candidate in shown.top]
        return msgspec.Raw(encode(own | {"top_logprobs": tops}))

    def _token(self, text: str, own_bytes: bytes, logprob: float) -> Json:
        return {"token": text, "logprob": logprob, "bytes": list(own_bytes)}
