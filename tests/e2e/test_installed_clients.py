"""Clients as their users install them, from PyPI, npm and Debian, each through a session with `crossdock serve`. They and the
clusters are in a network namespace that has only loopback. Clients that need more than a small model can do talk with a
scripted one: `scripted_worker`."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher.models import resolve
from launcher.models.hub import ModelError
from tests.documents import ROOT, blocks
from tests.e2e import installed, scripted_worker
from tests.e2e.live import Live, live
from tests.e2e.netns import loopback_only

SCRIPTS = Path(__file__).parent / "clients"
METRICS_PORT, API_PORT = 9400, 8000  # as the pages have them
PATIENT = ("--ready-timeout-s", "600")
NAME = "llm.example.org"

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * installed.INSTALL_S + installed.RUN_S)]


@pytest.fixture(scope="module")
def inside() -> Iterator[list[str]]:
    with loopback_only() as command:
        yield command


@pytest.fixture(scope="module")
def scripted(inside: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    model = scripted_worker.make_model(tmp_path_factory.mktemp("models") / "scripted")
    command = (*inside, sys.executable, "-m", "tests.e2e.scripted_serve")
    with live(model, tmp_path_factory.mktemp("state"), *PATIENT, command=command) as up:
        yield up


@pytest.fixture(scope="module")
def small(inside: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The default model, with the ports and options that the pages give."""
    try:
        model = resolve.ready("", "", Console(quiet=True)).path
    except ModelError as error:
        pytest.skip(f"the default model cannot be had here: {error}")
    command = (*inside, sys.executable, "-m", "launcher.cli")
    asked: dict[str, Any] = {"ALLOWED_HOSTS": NAME, "TRUSTED_PROXIES": "127.0.0.1", "port": API_PORT}
    state = tmp_path_factory.mktemp("state")
    with live(model, state, *PATIENT, "--metrics", str(METRICS_PORT), command=command, **asked) as up:
        yield up


class Desk:
    """Runs commands in the namespace, with a HOME of their own."""

    def __init__(self, inside: list[str], home: Path) -> None:
        self.inside, self.home = inside, home
        (home / "note.txt").write_text("the kettle is blue\n")

    def run(self, *command: str | Path, stdin: str = "", **environment: str) -> str:
        return installed.run_client([*self.inside, *command], self.home, environment, stdin=stdin)

    def script(self, python: Path, name: str, *arguments: str) -> str:
        return self.run(python / "python", SCRIPTS / name, *arguments)


@pytest.fixture
def desk(inside: list[str], tmp_path: Path) -> Desk:
    return Desk(inside, tmp_path)


def _script(*calls: tuple[str, dict[str, object]], last: str) -> str:
    """A prompt that makes the scripted model call tools one after the other, and say `last` then."""
    written = [
        f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(given)}}}</tool_call>' for name, given in calls
    ]
    return f"@@@{'%%%'.join([*written, last])}@@@"


def test_claude_code_reads_a_file(scripted: Live, desk: Desk) -> None:
    modules = installed.node_client(
        "claude-code", "@anthropic-ai/claude-code@2.1.197", finish="@anthropic-ai/claude-code/install.cjs"
    )
    said = desk.run(
        modules / ".bin/claude", "-p", "--allowedTools", "Read",
        stdin=_script(("Read", {"file_path": str(desk.home / "note.txt")}), last="The file says: $RESULT"),
        ANTHROPIC_BASE_URL=scripted.base_url, ANTHROPIC_API_KEY="dummy", ANTHROPIC_MODEL=scripted.model_id,
        ANTHROPIC_SMALL_FAST_MODEL=scripted.model_id,
    )  # fmt: skip
    assert "the kettle is blue" in said


CODEX = """
model = "{model}"
model_provider = "crossdock"
model_context_window = 262144
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.crossdock]
name = "crossdock"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "DUMMY_KEY"
request_max_retries = 0
stream_max_retries = 0
"""


def test_codex_runs_a_command(scripted: Live, desk: Desk) -> None:
    modules = installed.node_client("codex", "@openai/codex@0.171.0")
    (desk.home / ".codex").mkdir()
    (desk.home / ".codex/config.toml").write_text(CODEX.format(model=scripted.model_id, url=scripted.base_url))
    prompt = _script(("exec_command", {"cmd": "echo kettle-$((40 + 2))"}), last="The shell says: $RESULT")
    said = desk.run(
        modules / ".bin/codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt,
        DUMMY_KEY="dummy",
    )  # fmt: skip
    assert re.search(r"The shell says: .*kettle-42", said, re.DOTALL)


def test_opencode_reads_a_file(scripted: Live, desk: Desk) -> None:
    modules = installed.node_client("opencode", "opencode-ai@1.18.33", finish="opencode-ai/postinstall.mjs")
    models = {scripted.model_id: {"limit": {"context": scripted_worker.CONTEXT_TOKENS, "output": 8192}}}
    options = {"baseURL": f"{scripted.base_url}/v1", "apiKey": "dummy"}
    name = f"crossdock/{scripted.model_id}"
    config = {
        "share": "disabled", "autoupdate": False, "model": name, "small_model": name, "enabled_providers": ["crossdock"],
        "provider": {"crossdock": {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}},
    }  # fmt: skip
    (desk.home / "opencode.json").write_text(json.dumps(config))
    prompt = _script(("read", {"filePath": str(desk.home / "note.txt")}), last="The file says: $RESULT")
    assert "1: the kettle is blue" in desk.run(modules / ".bin/opencode", "run", stdin=prompt)


def test_anthropic_python_runs_tools(scripted: Live, desk: Desk) -> None:
    python = installed.python_client("anthropic", "anthropic==2.14.0")
    said = desk.script(python, "anthropic_runner.py", scripted.base_url, scripted.model_id)
    assert said.splitlines()[-2:] == ["plain It says: rain in Oslo", "streamed It says: rain in Oslo"]


def test_anthropic_node_runs_tools(scripted: Live, desk: Desk) -> None:
    modules = installed.node_client("anthropic-node", "@anthropic-ai/sdk@1.14.0")
    script = modules.parent / "anthropic_runner.mjs"  # which finds packages from where it lies
    script.write_text((SCRIPTS / script.name).read_text())
    said = desk.run("node", script, scripted.base_url, scripted.model_id)
    assert said.splitlines()[-2:] == ["plain It says: rain in Oslo", "streamed It says: rain in Oslo"]


def test_instructor_parses_in_every_mode(scripted: Live, desk: Desk) -> None:
    """instructor gets an object in each mode that the APIs of OpenAI and Anthropic have."""
    python = installed.python_client("instructor", "instructor==1.17.0", "anthropic==2.14.0")
    said = desk.script(python, "instructor_modes.py", scripted.base_url, scripted.model_id)
    assert said.count(" ok\n") == 12


def test_litellm_falls_back_on_overflow(small: Live, scripted: Live, desk: Desk) -> None:
    """LiteLLM sends a prompt that is too long for one model to another."""
    python = installed.python_client("litellm", "litellm==1.108.7")
    said = desk.script(
        python, "litellm_fallback.py", small.base_url, small.model_id, scripted.base_url, scripted.model_id
    )
    assert re.findall(r"^(\w+) From the large one\.$", said, re.MULTILINE) == ["openai", "hosted_vllm", "anthropic"]


def test_nginx_passes_streams_on(small: Live, desk: Desk) -> None:
    """The block of the pages lets streams through piece by piece, and bodies of more than 1 MB."""
    nginx = installed.debian_program("nginx", "nginx-light")
    (block,) = blocks("nginx")
    (desk.home / "crossdock.conf").write_text(block.text)
    (desk.home / "nginx.conf").write_text(
        f"daemon off; pid {desk.home}/pid; error_log stderr; worker_processes 1; user root;\nevents {{}}\n"
        f"http {{ access_log off; client_body_temp_path {desk.home}/body; proxy_temp_path {desk.home}/proxy;\n"
        f"include {desk.home}/crossdock.conf; }}\n"
    )
    with installed.running([*desk.inside, nginx, "-c", desk.home / "nginx.conf", "-p", desk.home], desk.home):
        said = desk.script(Path(sys.executable).parent, "through_nginx.py", "http://127.0.0.1", NAME, small.model_id)
    assert said.splitlines()[-1] == "ok"


def test_prometheus_scrapes_every_process(small: Live, desk: Desk) -> None:
    """Prometheus finds all processes by the page's configuration, and evaluates the alerts and the dashboard's queries."""
    prometheus = installed.debian_program("prometheus", "prometheus")
    (block,) = [one for one in blocks("yaml") if "/targets" in one.text and one.page == "docs/observe.md"]
    config = desk.home / "prometheus.yml"
    rules = ROOT / "scripts/metrics/alerts.yaml"
    config.write_text(f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{rules}]\n{block.text}")
    assert "SUCCESS" in desk.run("promtool", "check", "config", config)
    command = [*desk.inside, prometheus, f"--config.file={config}", f"--storage.tsdb.path={desk.home}/tsdb",
               "--web.listen-address=127.0.0.1:9090"]  # fmt: skip
    with installed.running(command, desk.home):
        said = desk.script(
            Path(sys.executable).parent, "ask_prometheus.py", "http://127.0.0.1:9090", small.base_url, small.model_id,
            str(ROOT / "scripts/metrics/grafana-dashboard.json"),
        )  # fmt: skip
    assert said.splitlines()[-1] == "ok"


TASK = """
task: colours
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "The colour of {{{{thing}}}} is"
doc_to_choice: ["green", "purple"]
doc_to_target: label
metric_list: [{{metric: acc}}]
"""
LENGTHS = {"prompt": 48, "answer": 12}
ASKED = 4


def test_lm_eval_scores_choices(small: Live, desk: Desk) -> None:
    """lm-eval gets the log-probabilities for a local task that it computes with transformers."""
    python = installed.python_client("lm-eval", "lm-eval[api]==0.4.13", borrows=True)
    data = desk.home / "data.jsonl"
    data.write_text("".join(json.dumps({"thing": thing, "label": 0}) + "\n" for thing in ("grass", "a leaf", "moss")))
    (desk.home / "colours.yaml").write_text(TASK.format(data=data))

    def scores(model: str, arguments: str) -> list[list[float]]:
        desk.run(
            python / "lm_eval", "run", "--model", model, "--tasks", "colours", "--include_path", desk.home, "--model_args",
            arguments, "--device", "cpu", "--batch_size", "2", "--log_samples", "--output_path", desk.home / model,
        )  # fmt: skip
        (samples,) = (desk.home / model).rglob("samples_colours_*.jsonl")
        return [[float(one[0]) for one in json.loads(line)["filtered_resps"]] for line in samples.open()]

    server = f"base_url={small.base_url}/v1/completions,model={small.model_id},tokenizer={small.model}"
    expected = scores("hf", f"pretrained={small.model},dtype=float32")
    assert [len(one) for one in expected] == [2, 2, 2]
    assert scores("local-completions", server) == [pytest.approx(one, abs=1e-3) for one in expected]


@pytest.mark.parametrize("kind", ["openai-chat", "openai"])
def test_vllm_bench_measures(small: Live, desk: Desk, kind: str) -> None:
    """`vllm bench serve` measures chats and completions, without a failed request."""
    python = installed.vllm("0.32.0")
    path = "/v1/chat/completions" if kind == "openai-chat" else "/v1/completions"
    desk.run(
        python / "vllm", "bench", "serve", "--backend", kind, "--base-url", small.base_url, "--endpoint", path,
        "--model", small.model_id, "--tokenizer", small.model, "--dataset-name", "random", "--num-prompts", str(ASKED),
        "--random-input-len", str(LENGTHS["prompt"]), "--random-output-len", str(LENGTHS["answer"]), "--ignore-eos",
        "--save-result", "--result-filename", "result.json",
    )  # fmt: skip
    result = json.loads((desk.home / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (ASKED, 0)
    assert result["total_output_tokens"] == ASKED * LENGTHS["answer"]


@pytest.mark.parametrize("kind", ["chat", "completions", "responses"])
def test_aiperf_measures(small: Live, desk: Desk, kind: str) -> None:
    """aiperf measures each of the three APIs, and finds the server's metrics."""
    python = installed.python_client("aiperf", "aiperf==0.13.0")
    said = desk.run(
        python / "aiperf", "profile", "--model", small.model_id, "--url", small.base_url, "--endpoint-type", kind,
        "--streaming", "--tokenizer", small.model, "--request-count", str(ASKED), "--concurrency", "2",
        "--isl", str(LENGTHS["prompt"]), "--osl", str(LENGTHS["answer"]), "--extra-inputs", "ignore_eos:true",
        "--ui", "none", "--artifact-dir", desk.home / "out",
        HF_HUB_OFFLINE="", TRANSFORMERS_OFFLINE="",  # offline it knows names of the Hub's cache alone, and no folder
    )  # fmt: skip
    results = list((desk.home / "out").rglob("profile_export_aiperf.json"))
    assert len(results) == 1, said
    found = json.loads(results[0].read_text())
    assert found["request_count"]["avg"] == ASKED, said
    assert not found.get("error_summary")
    if kind != "responses":  # there it reads usage from `response.completed` alone; these answers end as incomplete
        assert found["total_usage_completion_tokens"]["avg"] == ASKED * LENGTHS["answer"]
    assert found["output_sequence_length"]["avg"] > 0
    assert found["time_to_first_token"]["min"] > 0.0
    assert list((desk.home / "out").rglob("server_metrics_export*")), said


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_guidellm_measures(small: Live, desk: Desk, path: str) -> None:
    """guidellm measures each of the three APIs, without a failed request."""
    python = installed.python_client("guidellm", "guidellm==0.8.1", borrows=True)
    desk.run(
        python / "guidellm", "run", "--disable-console-interactive",
        "--backend", f"kind=openai_http,target={small.base_url},model={small.model_id},request_format={path}",
        "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={ASKED}",
        "--tokenizer", f"kind=huggingface_auto,model={small.model}",
        "--data", f"kind=synthetic_text,prompt_tokens={LENGTHS['prompt']},output_tokens={LENGTHS['answer']}",
    )  # fmt: skip
    (found,) = json.loads((desk.home / "benchmarks.json").read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (ASKED, 0)
