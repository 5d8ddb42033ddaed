"""Finds out before a run what the server is, which model it has, what it understands, and how to make prompts of a known
length."""

from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec

from launcher.http.client import headers, read_whole
from launcher.http.streams import WORDS, BenchFailed
from launcher.load.client import LoadTarget
from launcher.load.plan import LoadPlan
from launcher.load.prompts import Prompts, words_with_a_tokenizer
from launcher.load.settings import LoadSettings

ANSWER_BYTES_MAX = 8 << 20
TIMEOUT_S = 300.0  # after which a request is given up
EXTENDED = ("crossdock", "vllm")  # as `owned_by` of a model: servers whose own fields are known
PROBE_WORDS = 30  # few enough for small contexts, even with a token for each letter


@dataclass(frozen=True)
class Probed:
    target: LoadTarget
    pool: tuple[int, ...] = ()  # token ids that are safe to send; empty where the server takes only text
    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0
    server: str = ""  # its name for itself

    def prompts(self, settings: LoadSettings, plan: LoadPlan) -> Prompts:
        """Raises `SettingsError`."""
        common = (plan.block_tokens, settings.prefix_tokens)
        if self.pool:
            return Prompts(settings.seed, self.pool, *common)
        if settings.tokenizer:
            words, each = words_with_a_tokenizer(settings.tokenizer, self.overhead_tokens)
            return Prompts(settings.seed, words, *common, each, self.overhead_tokens)
        return Prompts(settings.seed, WORDS, *common, self.tokens_per_word, self.overhead_tokens)


async def probe(
    session: aiohttp.ClientSession,
    base_url: str,
    key: str,
    model_id: str,
    *,
    chat: bool = False,
    ignore_eos: bool = True,
    standard: bool = False,
) -> Probed:
    """`standard`: a server gets only OpenAI's fields, unless it says that it is crossdock or vLLM. Raises `BenchFailed` where
    the server cannot be measured."""
    base = base_url.rstrip("/").removesuffix("/v1")
    status, content, server = await _call(session, "GET", f"{base}/v1/models", key)
    models = [one for one in content.get("data", []) if isinstance(one, dict)] if status == 200 else []
    known = next((one for one in models if not model_id or one.get("id") == model_id), {})
    model = model_id or str(known.get("id", ""))
    if not model:
        raise BenchFailed(f"GET {base}/v1/models: HTTP {status}, and no model; see --url, --api-key and --model")
    context = known.get("max_model_len")
    extended = not standard or known.get("owned_by") in EXTENDED
    target = LoadTarget(
        url=f"{base}/v1/{'chat/completions' if chat else 'completions'}",
        model=model,
        chat=chat,
        ignore_eos=ignore_eos and extended,
        token_ids=extended,
        timeout_s=TIMEOUT_S,
        context_tokens=context if isinstance(context, int) and context > 0 else 0,
    )
    return await _learn(session, Probed(target, server=server), key)


async def _learn(session: aiohttp.ClientSession, probed: Probed, key: str) -> Probed:
    """Learns which extensions the server takes, and how many tokens words are."""
    words = list(WORDS[:PROBE_WORDS])
    target = probed.target
    extensions = {"return_token_ids": True, "ignore_eos": True} if target.token_ids else {}
    status, content = await _ask(session, target, words, extensions, key)
    if status in (400, 422):  # OpenAI's own API knows neither extension
        extensions.pop("return_token_ids", None)
        target = replace(target, token_ids=False)
        status, content = await _ask(session, target, words, extensions, key)
    if status in (400, 422):
        target = replace(target, ignore_eos=False)
        status, content = await _ask(session, target, words, {}, key)
    if status != 200:
        raise BenchFailed(f"POST {target.url}: HTTP {status}: {str(content.get('error', content))[:300]}")
    ids = _prompt_ids(content)
    if ids and not target.chat:
        # The first token may be one that only begins texts.
        return replace(probed, target=target, pool=tuple(dict.fromkeys(ids[1:])))
    status, longer = await _ask(session, target, words * 2, {}, key)
    counts = [_prompt_tokens(one) for one in (content, longer)]
    if status != 200 or counts[1] <= counts[0]:
        return replace(probed, target=target)  # The server does not count tokens, so each word is taken for one token.
    per_word = (counts[1] - counts[0]) / len(words)
    overhead = max(0.0, counts[0] - per_word * len(words))
    return replace(probed, target=target, tokens_per_word=per_word, overhead_tokens=overhead)


async def _ask(
    session: aiohttp.ClientSession, target: LoadTarget, words: list[str], extensions: dict[str, bool], key: str
) -> tuple[int, dict[str, Any]]:
    text = " ".join(words)
    asked = {"messages": [{"role": "user", "content": text}]} if target.chat else {"prompt": text}
    body = msgspec.json.encode({"model": target.model, "max_tokens": 1, "temperature": 0, **asked, **extensions})
    status, content, _ = await _call(session, "POST", target.url, key, body)
    return status, content


async def _call(
    session: aiohttp.ClientSession, method: str, url: str, key: str, body: bytes | None = None
) -> tuple[int, dict[str, Any], str]:
    try:
        timeout = aiohttp.ClientTimeout(total=120.0)
        async with session.request(method, url, data=body, headers=headers(key), timeout=timeout) as response:
            content = await read_whole(response, ANSWER_BYTES_MAX)
            found = msgspec.json.decode(content) if content else {}
            server = response.headers.get("Server", "")[:100]
            return response.status, found if isinstance(found, dict) else {}, server
    except (aiohttp.ClientError, TimeoutError) as error:
        raise BenchFailed(f"{url} cannot be reached: {error or type(error).__name__}") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return response.status, {"error": "the answer is not JSON"}, ""


def _prompt_ids(content: dict[str, Any]) -> list[int]:
    choices = content.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    ids = first.get("prompt_token_ids") or content.get("prompt_token_ids") or []
    return [one for one in ids if type(one) is int] if isinstance(ids, list) else []


def _prompt_tokens(content: dict[str, Any]) -> int:
    usage = content.get("usage")
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else 0
    return count if type(count) is int else 0
