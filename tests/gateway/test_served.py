"""The gateway on a real port: the openai client, disconnects, large bodies, shutdown, the whole process."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from prometheus_client import generate_latest

from gateway.main import GatewayProcess, _listen
from gateway.openai.context import ServedModel
from gateway.openai.prepare import ModelRules
from gateway.text.model_files import ModelFilesError, load
from proto import limits
from proto.codec import pack_tokens
from proto.errors import CancelReason, FinishReason, Reject
from proto.messages import Accepted, ClusterState, Hello, Message, Role, Submit, TokenItem, Tokens, Welcome
from runtime.link.client import LinkClient
from runtime.link.server import LinkServer, Peer
from runtime.process import clock
from runtime.process.driver import Stop
from runtime.settings.roles import GatewaySettings
from tests import tiny_models
from tests.gateway.fakes import ANSWER, BODY_BYTES_MAX, MODEL, Site, make_site, rejecting, served, tokenizer
from tests.helpers import printed, until

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


def on_port(test: Callable[[Site, str], Awaitable[None]], **options: Any) -> None:
    async def body() -> None:
        site = make_site(**options)
        async with served(site) as url:
            await test(site, url)

    asyncio.run(body())


def test_openai_client_gets_answers() -> None:
    """OpenAI's client lists models and gets chats and completions, streamed or not."""

    async def test(_site: Site, url: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == [MODEL]
            whole = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, n=2, logprobs=True, top_logprobs=2
            )
            assert [choice.message.content for choice in whole.choices] == [ANSWER, ANSWER]
            assert whole.choices[0].logprobs is not None
            texts, usage = {0: "", 1: ""}, None
            stream = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, n=2, stream=True, stream_options={"include_usage": True}
            )
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                usage = chunk.usage
            assert texts == {0: ANSWER, 1: ANSWER}
            assert usage is not None
            assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
            done = await client.completions.create(model=MODEL, prompt=["a", "b"], echo=True, stop=" is", max_tokens=99)
            assert [choice.text for choice in done.choices] == ["aThe capital", "bThe capital"]
            text = ""
            extra = {"return_token_ids": True, "top_k": 5}
            async for part in await client.completions.create(
                model=MODEL, prompt="a", stream=True, max_tokens=99, extra_body=extra
            ):
                text += part.choices[0].text
            assert text == ANSWER

    on_port(test)


def test_openai_client_sees_typed_errors() -> None:
    """OpenAI's client raises its typed errors for refused and failed requests."""

    async def test(site: Site, url: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="none", prompt="a")
            with pytest.raises(openai.BadRequestError) as bad:
                await client.completions.create(model=MODEL, prompt="a", temperature=3)
            assert bad.value.param == "temperature"
            site.cluster.reject = rejecting(Reject.QUEUE_FULL)
            with pytest.raises(openai.RateLimitError):
                await client.completions.create(model=MODEL, prompt="a", stream=True)
            site.cluster.reject = lambda _submit: None
            site.cluster.interrupt_at = dict.fromkeys(range(1, 9), 4)
            with pytest.raises(openai.APIError, match="interrupted"):
                async for _ in await client.completions.create(model=MODEL, prompt="a", stream=True):
                    pass

    on_port(test)


def test_two_hundred_streams_at_once() -> None:
    """Two hundred streams at once all get their whole answers."""

    async def test(site: Site, url: str) -> None:
        site.cluster.gap_s = 0.001
        async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=200), timeout=60) as client:

            async def one(number: int) -> str:
                body = {"model": MODEL, "prompt": f"p{number}", "stream": True, "max_tokens": 60}
                answer = await client.post("/v1/completions", json=body)
                lines = answer.text.split("\n\n")
                assert lines[-2] == "data: [DONE]"
                return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-2])

            assert set(await asyncio.gather(*(one(number) for number in range(200)))) == {ANSWER}

    on_port(test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold", [False, True])
def test_disconnect_cancels_all_prompts(stream: bool, hold: bool) -> None:
    """All prompts of a request are cancelled if its client disconnects."""

    async def test(site: Site, url: str) -> None:
        site.cluster.gap_s, site.cluster.hold = 0.2, hold
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            body = {"model": MODEL, "prompt": ["a", "b"], "stream": stream}
            request = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: len(site.cluster.submits) == 2)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        await until(lambda: len(site.cluster.cancels) == 2)
        assert {cancel.reason for cancel in site.cluster.cancels} == {CancelReason.DISCONNECTED}
        await until(lambda: site.gateway.intake.idle)
        assert not site.gateway.backend.keeper.streams
        assert b'outcome="disconnected"} 1.0' in generate_latest(site.gateway.metrics.registry)

    on_port(test)


def test_too_large_body_is_refused() -> None:
    """Too large a body is refused with status 413, with a declared length or without."""

    async def test(site: Site, url: str) -> None:
        async def chunks() -> Any:
            for _ in range(200):
                yield b" " * 1024

        headers = {"Content-Type": "application/json"}
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for content in (b" " * (BODY_BYTES_MAX + 1), chunks()):
                answer = await client.post("/v1/completions", content=content, headers=headers)
                assert answer.status_code == 413
                assert answer.json()["error"]["code"] == "request_too_large"
        assert site.gateway.intake.idle

    on_port(test)


def test_shutdown_ends_open_streams_with_error() -> None:
    """A stream that is open at shutdown ends with an error event."""

    async def body() -> None:
        site = make_site()
        site.cluster.gap_s = 600.0  # after the first tokens
        async with httpx.AsyncClient(timeout=60) as client:
            async with served(site) as url:
                request = {"model": MODEL, "prompt": "a", "stream": True, "max_tokens": 60}
                asking = client.build_request("POST", f"{url}/v1/completions", json=request)
                answer = await client.send(asking, stream=True)
                parts = answer.aiter_text()
                text = await anext(parts)
            text += "".join([part async for part in parts])
            await answer.aclose()
        assert text.count("data: ") > 1
        assert json.loads(text.split("\n\n")[-2][6:])["error"]["code"] == "shutting_down"
        assert "[DONE]" not in text

    asyncio.run(body())


# --- the process --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("models") / "tiny")


def test_model_files_are_loaded_or_refused(model_folder: Path, tmp_path: Path) -> None:
    """The facts of a model are loaded from its folder, and missing or odd files are refused."""
    tokenizer = load(str(model_folder))
    assert tokenizer.facts.context_tokens == 512
    assert tokenizer.facts.vocab_size == tiny_models.VOCAB
    assert tokenizer.facts.eos_ids == {tiny_models.EOS}
    assert tokenizer.has_chat_template
    with pytest.raises(ModelFilesError, match="no such folder"):
        load(str(tmp_path / "none"))
    with pytest.raises(ModelFilesError, match=r"config\.json"):
        load(str(tmp_path))
    odd = tmp_path / "odd"
    shutil.copytree(model_folder, odd)
    for config, said in (
        ({"model_type": "bloom"}, "odd: its configuration does not say how long a context may be"),
        ({"model_type": "llama", "text_config": None}, "odd: its tokenizer or configuration cannot be used"),
    ):
        (odd / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelFilesError, match=said):
            load(str(odd))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFilesError, match="tokenizer"):
        load(str(tmp_path))


def test_import_does_not_load_torch() -> None:
    """Importing the gateway loads neither torch nor transformers."""
    code = "import sys, gateway.main; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


class Answering:
    """A coordinator on a real link, which then speaks to the gateway's token port as a worker does."""

    def __init__(self) -> None:
        self.submitted: asyncio.Queue[tuple[Submit, bytes]] = asyncio.Queue()
        self.gateway: Peer | None = None
        self.workers: list[Peer] = []
        hello = Hello(limits.PROTOCOL_VERSION, Role.COORDINATOR, clock.new_incarnation(), "c")
        self.server = LinkServer(
            bind="tcp://127.0.0.1:0",
            hello=hello,
            accept=lambda _hello: None,
            on_up=self._up,
            on_message=self._message,
            on_down=lambda _peer, _reason: None,
        )

    def _up(self, peer: Peer) -> None:
        self.gateway = peer
        peer.send(ClusterState(("tiny",)))

    def _message(self, _peer: Peer, message: Message, blob: bytes) -> None:
        if isinstance(message, Submit):
            self.submitted.put_nowait((message, blob))

    def worker(self) -> LinkClient:
        assert self.gateway is not None
        hello = Hello(limits.PROTOCOL_VERSION, Role.DECODE, clock.new_incarnation(), "d", "tiny", "f")
        return LinkClient(
            address=self.gateway.hello.address,
            hello=hello,
            on_up=self._worker_up,
            on_message=lambda _peer, _message, _blob: None,
            on_down=lambda _peer, _reason: None,
        )

    def _worker_up(self, peer: Peer, _welcome: Welcome) -> None:
        self.workers.append(peer)


def test_process_serves_until_sigterm(model_folder: Path) -> None:
    """The process serves a request, and after SIGTERM refuses new ones and finishes the open one."""

    async def body() -> None:
        other = Answering()
        address = await other.server.start()
        arguments = ["--coordinator", address, "--model", str(model_folder), "--port", "0", "--log-format", "json"]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", *arguments, stderr=subprocess.PIPE, env=environment
        )
        try:
            assert process.stderr is not None
            url = ""
            async with asyncio.timeout(100):
                while not url:
                    line = await process.stderr.readline()
                    assert line, "the gateway ended"
                    url = json.loads(line).get("url", "")
                await until(lambda: other.gateway is not None)
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                assert (await client.get("/ready")).status_code == 200
                assert other.gateway is not None
                request = {"model": "tiny", "prompt": "abc", "stream": True}
                reading = asyncio.create_task(client.post("/v1/completions", json=request))
                submit, blob = await asyncio.wait_for(other.submitted.get(), 60)
                assert blob == pack_tokens(load(str(model_folder)).encode("abc", add_special_tokens=True))
                worker = other.worker()
                await worker.start()
                await until(lambda: bool(other.workers))
                other.gateway.send(Accepted(submit.request_id, 1))
                token = TokenItem(submit.request_id, 1, 0, 0, (6 + 40,), FinishReason.LENGTH)
                other.workers[0].send(Tokens((token,)))
                assert (await reading).text.endswith("data: [DONE]\n\n")
                reading = asyncio.create_task(client.post("/v1/completions", json=request))
                submit, _ = await asyncio.wait_for(other.submitted.get(), 60)
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(60):
                    while b'"draining"' not in await process.stderr.readline():
                        pass
                assert (await client.get("/ready")).status_code == 503
                refused = await client.post("/v1/completions", json=request)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
                assert refused.headers["connection"] == "close" and int(refused.headers["retry-after"]) >= 1
                other.workers[0].send(Tokens((msgspec.structs.replace(token, request_id=submit.request_id),)))
                assert (await reading).text.endswith("data: [DONE]\n\n"), "what had begun ends well"
                assert await asyncio.wait_for(process.wait(), 60) == 0
                await worker.close()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await other.server.close()

    asyncio.run(body())


def test_port_taken_meanwhile_is_reported(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Two gateways that start at once can both bind one port; the second to listen is told."""
    with _listen("127.0.0.1", 0) as other:

        async def load_slowly(_: GatewayProcess, __: asyncio.Event) -> list[ServedModel]:
            other.listen(1)
            return [ServedModel(tokenizer(), ModelRules("m", 0))]

        monkeypatch.setattr(GatewayProcess, "_load", load_slowly)
        port = other.getsockname()[1]

        async def body() -> int:
            process = GatewayProcess(GatewaySettings(model=MODEL, port=port, metrics="off", log_format="console"))
            return await asyncio.wait_for(process.run(Stop()), 30)

        assert asyncio.run(body()) == 1
    assert f"--port: {port} on 127.0.0.1: " in printed(capfd)
