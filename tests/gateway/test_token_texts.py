"""The texts of an answer's tokens, joined, are the answer's text, and their bytes are its bytes, whatever the tokenizer."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.text.tokenizer import ModelTokenizer
from tests.gateway import tokenizers
from tests.gateway.fakes import Site
from tests.gateway.http_words import chat, completion, events, flat, on_site

KINDS = {
    "byte_level": tokenizers.byte_level(),
    "bpe_with_byte_fallback": tokenizers.wrapped(tokenizers.sentencepiece_like()),
    "unigram_with_metaspace": tokenizers.wrapped(tokenizers.unigram()),
    "word_piece": tokenizers.wrapped(tokenizers.word_piece()),
}
SENTENCEPIECE = ["bpe_with_byte_fallback", "unigram_with_metaspace"]
texts = st.text(alphabet=st.sampled_from("ab hello world.! é日本🌍\n") | st.characters(codec="utf-8"), max_size=40)


def parts_of(tokenizer: ModelTokenizer, ids: list[int]) -> tuple[list[str], list[bytes]]:
    state, found = tokenizer.token_texts(), []
    for number, token in enumerate(ids, 1):
        offset = state.chars
        found.append(state.push(token, is_last=number == len(ids)))
        assert offset == len("".join(text for text, _ in found[:-1]))
    return [text for text, _ in found], [own for _, own in found]


@settings(deadline=None)
@given(st.sampled_from(sorted(KINDS)), texts)
@example("bpe_with_byte_fallback", "  a")
@example("unigram_with_metaspace", " \n 🌍  a ")
def test_token_texts_add_up(kind: str, text: str) -> None:
    """Texts and bytes of a text's tokens add up to the text."""
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    found, own = parts_of(tokenizer, ids)
    assert "".join(found) == whole
    if "�" not in whole:
        assert b"".join(own).decode() == whole


@settings(deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.data())
def test_arbitrary_token_texts_add_up(kind: str, data: st.DataObject) -> None:
    """A model may say any token after any other, special ones and broken characters included."""
    tokenizer = KINDS[kind]
    size = 262 if kind == "byte_level" else tokenizer.facts.vocab_size
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=40))
    found, own = parts_of(tokenizer, ids)
    answer = tokenizer.text_sink([])()
    text = "".join([*(answer.push(token).text for token in ids), answer.finish().text])
    assert "".join(found) == text
    if "�" not in text and kind != "word_piece":
        assert b"".join(own).decode() == text == tokenizer.decode(ids)


@settings(deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.data())
def test_any_tokens_continue_any_others(kind: str, data: st.DataObject) -> None:
    """Tokens add to a prompt what decoding both together adds to it."""
    tokenizer = KINDS[kind]
    size = 262 if kind == "byte_level" else tokenizer.facts.vocab_size
    ids = st.lists(st.integers(0, size - 1), max_size=40)
    prompt, said = data.draw(ids), data.draw(ids)
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *said])
    answer = tokenizer.text_sink([], behind=tokenizer.end_of(prompt, keeps_special=False))()
    text = "".join([*(answer.push(token).text for token in said), answer.finish().text])
    if "�" not in whole:
        assert before.rstrip("�") + text == whole


def use(site: Site, kind: str, text: str, *, end: bool = True) -> list[int]:
    """Have the cluster answer with this text; returns its tokens."""
    tokenizer = site.gateway.models[0].tokenizer = KINDS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False) + sorted(tokenizer.facts.eos_ids)[: 1 if end else 0]
    site.cluster.answer = lambda _submit, _choice: ids
    return ids


def bytes_of(entries: list[Any]) -> bytes:
    return bytes(flat(entry["bytes"] for entry in entries))


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"word_piece"}))
@pytest.mark.parametrize("text", ["Hello world!", "a 日本\n🌍 b", " two  spaces "])
def test_logprob_tokens_add_up(kind: str, text: str) -> None:
    """The tokens and offsets of an answer with log-probabilities fit its text."""

    async def test(site: Site) -> None:
        use(site, kind, text)
        site.cluster.batch = 1
        (choice,) = (await completion(site, prompt=[5], logprobs=1))["choices"]
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == choice["text"] + logprobs["tokens"][-1] != ""
        assert logprobs["tokens"][-1] == next(iter(logprobs["top_logprobs"][-1])) in ("<end>", "<eos>")
        at = 0
        for token, offset, top in zip(
            logprobs["tokens"], logprobs["text_offset"], logprobs["top_logprobs"], strict=True
        ):
            assert offset == at and token in top
            at += len(token)
        chunks, _ = await events(site, "/v1/completions", prompt=[5], logprobs=1)
        streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        for name in ("tokens", "text_offset", "token_logprobs"):
            assert flat(part[name] for part in streamed) == logprobs[name]

    on_site(test)


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_only_the_first_space_is_dropped(kind: str) -> None:
    """The first space of a chat answer belongs to no token, and later spaces belong to their tokens."""

    async def test(site: Site) -> None:
        use(site, kind, "Hello world!")
        (choice,) = (await chat(site, logprobs=True))["choices"]
        assert choice["message"]["content"] == "Hello world!"
        assert any(entry["token"].startswith(" w") for entry in choice["logprobs"]["content"])

    on_site(test)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("prompt", ["hello", "a b", "a 日本"])
@pytest.mark.parametrize("answer", ["world!", "a 日本 b", " a", "\n\n"])
def test_completion_continues_its_prompt(kind: str, prompt: str, answer: str) -> None:
    """Prompt and answer together are the text of their tokens, streamed and whole, with log-probabilities and an echo."""

    async def test(site: Site) -> None:
        said = use(site, kind, answer)[:-1]
        tokenizer = site.gateway.models[0].tokenizer
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        before, whole = tokenizer.decode(ids), tokenizer.decode([*ids, *said])
        for asked in (prompt, ids):
            answered = await completion(site, prompt=[asked, asked], echo=True, logprobs=1, n=2)
            assert len(answered["choices"]) == 4
            for choice in answered["choices"]:
                echoed = prompt if asked == prompt else before
                assert choice["text"] == echoed + whole.removeprefix(before)
                logprobs = choice["logprobs"]
                tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
                assert "".join(tokens[:-1]) == whole
                assert offsets[len(ids)] == len(echoed)
        chunks, _ = await events(site, "/v1/completions", prompt=ids)
        assert before + "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole

    on_site(test)


@pytest.mark.parametrize("kind", SENTENCEPIECE)
@pytest.mark.parametrize("asked", [{"regex": " a"}, {"choice": [" a", "b"]}, {"grammar": 'root ::= " a"'}], ids=str)
def test_constrained_answer_keeps_its_space(kind: str, asked: dict[str, Any]) -> None:
    """A space that a form asks for at the start of an answer is there, streamed and whole; a free chat answer has none."""

    async def test(site: Site) -> None:
        use(site, kind, "a")
        assert (await chat(site))["choices"][0]["message"]["content"] == "a"
        for path in ("/v1/completions", "/v1/chat/completions"):
            chunks, _ = await events(site, path, structured_outputs=asked)
            parts = [chunk["choices"][0] for chunk in chunks]
            assert "".join(part.get("text") or part.get("delta", {}).get("content") or "" for part in parts) == " a"
        assert (await chat(site, structured_outputs=asked))["choices"][0]["message"]["content"] == " a"

    on_site(test)


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_byte_tokens_give_their_bytes(kind: str) -> None:
    """Each byte token gives its byte, and the last one of a character the text."""
    text = "a\n日"
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    found, own = parts_of(tokenizer, ids)
    assert found[-4:] == ["\n", "", "", "日"]
    assert own[-4:] == [b"\n", *(bytes([byte]) for byte in "日".encode())]
    state = tokenizer.token_texts()
    assert state.candidate(ids[-1]) == ("�", "日".encode()[-1:])
    for token in ids[:-1]:
        state.push(token)
    assert state.candidate(tokenizer.encode("b w", add_special_tokens=False)[-1])[0] == " w"
    (end,) = tokenizer.facts.eos_ids
    assert state.candidate(end) == ("<end>", b"<end>"), "a candidate that would end the text is shown by its name"


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_chat_token_bytes_add_up(kind: str) -> None:
    """Tokens and bytes of a chat's log-probabilities add up to its text."""

    async def test(site: Site) -> None:
        use(site, kind, "Hello 日本 world!")
        (choice,) = (await chat(site, logprobs=True, top_logprobs=2))["choices"]
        entries = choice["logprobs"]["content"]
        assert "".join(entry["token"] for entry in entries) == choice["message"]["content"] == "Hello 日本 world!"
        assert bytes_of(entries).decode() == "Hello 日本 world!"

    on_site(test)


def test_text_stop_token_adds_no_text() -> None:
    """A stop token that is text adds none to the answer, and lists of tokens show it, as in vLLM."""

    async def test(site: Site) -> None:
        ids = use(site, "byte_level", "Paris.", end=False)
        (choice,) = (await completion(site, stop_token_ids=[ids[-1]], logprobs=0))["choices"]
        assert choice["text"] == "Paris" and "".join(choice["logprobs"]["tokens"]) == "Paris."
        assert len(choice["logprobs"]["tokens"]) == len(ids)

    on_site(test)
