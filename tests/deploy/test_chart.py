"""`deploy/chart`: what it renders for several values. Without helm these tests are skipped; those of the manifest, which
the chart makes, run everywhere.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.link.keys import ROLES
from runtime.settings.autopilot import AutopilotSettings
from runtime.settings.options import load
from runtime.settings.roles import CoordinatorSettings, GatewaySettings
from runtime.settings.types import Options
from runtime.settings.workers import WorkerSettings

yaml = pytest.importorskip("yaml")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="of the extra `test`")
ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "chart"
HELM = shutil.which("helm") or ""
needs_helm = pytest.mark.skipif(not HELM, reason="there is no helm on the PATH")
VERSIONS = ("1.30", "1.37")
WITHOUT_SCHEMA = ("ScaledObject",)  # of KEDA
AUTOPILOT = ("autopilot.enabled=true", "autopilot.profile={}")
VALUES = {
    "default": (),
    "ratio": ("prefill.replicas=3", "decode.replicas=5", "gateway.replicas=4"),
    "cpu": ("worker.gpus=0", "worker.kvGib=4", "model.claim=mine"),
    "cards": ("worker.gpus=2", "worker.engine=vllm", "decode.gpus=4"),
    "tls": ("tls.secret=cert", "tls.clientCa=true"),
    "tokens": (
        "jwt.issuer=https://login.example.org",
        "jwt.audience=crossdock",
        "jwt.jwks=https://login.example.org/keys",
    ),
    "database": ("database.secret=mine",),
    "standbys": ("database.secret=mine", "coordinator.replicas=3"),
    "keda": (*AUTOPILOT, "autoscaling.kind=keda"),
    "hpa": (*AUTOPILOT, "autoscaling.kind=hpa", "autoscaling.maxReplicas=12"),
    "secrets": ("keys.files.prefill\\.key=p", "keys.files.prefill\\.key_secret=s", "tenants.file=[tenants.acme]"),
    "metrics": ("networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.team=monitoring",),
    "candidate": ("env.CROSSDOCK_MODEL_ID=llama", "candidate.revision=v2", "candidate.decode=3"),
    "bare": ("networkPolicy.enabled=false", "podDisruptionBudget.enabled=false", "image.tag=1.2.3"),
}
DATABASE = "postgresql://crossdock@db/crossdock"
SETTINGS: dict[str, type[Options]] = {
    "coordinator": CoordinatorSettings,
    "gateway": GatewaySettings,
    "prefill": WorkerSettings,
    "decode": WorkerSettings,
    "autopilot": AutopilotSettings,
}


def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, timeout=60, check=check)


def render(*values: str) -> list[dict[str, Any]]:
    options = [part for value in values for part in ("--set", value.replace("={}", "=\\{\\}"))]
    text = run("template", "crossdock", str(CHART), "--namespace", "crossdock", *options).stdout
    return [one for one in yaml.safe_load_all(text) if one]


def find(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    [found] = [one for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def pods(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for one in objects:
        if "template" in one.get("spec", {}):
            yield one["spec"]["template"]["metadata"]["labels"]["role"], one["spec"]["template"]["spec"]


@needs_helm
def test_chart_passes_lint() -> None:
    """`helm lint` finds no mistake, and takes warnings for mistakes."""
    assert "0 chart(s) failed" in run("lint", "--strict", str(CHART)).stdout


@needs_helm
def test_manifest_is_what_the_chart_renders() -> None:
    """`deploy/kubernetes.yaml` is what `scripts/manifest` prints."""
    printed = subprocess.run([ROOT / "scripts/manifest"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert printed == (ROOT / "deploy/kubernetes.yaml").read_text("utf-8")


@needs_helm
@pytest.mark.parametrize("values", VALUES.values(), ids=list(VALUES))
def test_rendered_objects_fit_their_schemas(values: tuple[str, ...]) -> None:
    """Objects are valid for the oldest and the newest Kubernetes under test, with no key that the schema does not have."""
    for one in render(*values):
        if one["kind"] not in WITHOUT_SCHEMA:
            for version in VERSIONS:
                kubernetes_validate.validate(one, version, strict=True)


@needs_helm
@pytest.mark.parametrize("values", VALUES.values(), ids=list(VALUES))
def test_rendered_options_load(values: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every role starts with the options of its pod, and mounts what they name."""
    objects = render(*values)
    config = find(objects, "ConfigMap", "crossdock")["data"]
    for role, pod in pods(objects):
        [container] = pod["containers"]
        own = {one["name"]: one.get("value") or _filled_in(one["valueFrom"]) for one in container["env"]}
        with monkeypatch.context() as patch:
            for key, value in {**config, **own}.items():
                patch.setenv(key, value)
            load(SETTINGS[role], {"role": role} if role in ("prefill", "decode") else {})
        volumes = {one["name"] for one in pod["volumes"]} | {"state"}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]


def _filled_in(source: dict[str, Any]) -> str:
    return DATABASE if "secretKeyRef" in source else "10.1.2.3"


@needs_helm
def test_values_set_the_ratio_and_the_cards() -> None:
    """Replicas and cards per worker come from the values; a role's own value comes before that of both roles."""
    objects = render(*VALUES["ratio"], *VALUES["cards"])
    replicas = {role: find(objects, "Deployment", f"crossdock-{role}")["spec"] for role in ("prefill", "decode")}
    assert [replicas[role]["replicas"] for role in ("prefill", "decode")] == [3, 5]
    for role, cards in (("prefill", "2"), ("decode", "4")):
        [container] = replicas[role]["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == cards
        assert {"name": "CROSSDOCK_VLLM_ARGS", "value": f"--tensor-parallel-size {cards}"} in container["env"]


@needs_helm
def test_candidate_has_workers_of_its_own() -> None:
    """Another revision's workers come beside the others, with its weights and name, and no selector finds both."""
    objects = render(*VALUES["candidate"])
    for role, count in (("prefill", 1), ("decode", 3)):
        main, candidate = (find(objects, "Deployment", f"crossdock-{role}{end}")["spec"] for end in ("", "-candidate"))
        assert candidate["replicas"] == count and candidate["selector"] != main["selector"]
        [container] = candidate["template"]["spec"]["containers"]
        env = {one["name"]: one.get("value") for one in container["env"]}
        assert (env["CROSSDOCK_MODEL"], env["CROSSDOCK_REVISION"]) == ("/models/llama-2", "v2")


@needs_helm
@pytest.mark.parametrize("kind", ["keda", "hpa"])
def test_autoscaling_leaves_replicas_alone(kind: str) -> None:
    """Each role is scaled by the autopilot's metric, and an upgrade of the release does not set replicas back."""
    objects = render(*AUTOPILOT, f"autoscaling.kind={kind}")
    for role in ("prefill", "decode"):
        assert "replicas" not in find(objects, "Deployment", f"crossdock-{role}")["spec"]
        scaler = find(objects, {"keda": "ScaledObject", "hpa": "HorizontalPodAutoscaler"}[kind], f"crossdock-{role}")
        assert scaler["spec"]["scaleTargetRef"]["name"] == f"crossdock-{role}"
        text = json.dumps(scaler)
        assert "crossdock_autopilot_needed_workers" in text and role in text
    assert "`crossdock_autopilot_needed_workers`" in (ROOT / "docs/metrics.md").read_text("utf-8")


@needs_helm
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("autoscaling.kind=keda", "needs autopilot.enabled"),
        ("coordinator.replicas=2", "needs database.secret"),
        ("jwt.issuer=https://login.example.org", "jwt.issuer needs jwt."),
        ("candidate.revision=v2", "needs env.CROSSDOCK_MODEL_ID"),
    ],
)
def test_value_without_its_partner_is_refused(value: str, words: str) -> None:
    """A scaler without its metric, coordinators without a database, and tokens without keys are errors."""
    refused = run("template", "crossdock", str(CHART), "--set", value, check=False)
    assert refused.returncode and words in refused.stderr


@needs_helm
def test_every_coordinator_is_found() -> None:
    """Processes know the address of each coordinator; one that stands by is ready, and keeps nothing on a volume. Gateways have
    the database, too."""
    objects = render(*VALUES["standbys"])
    config = find(objects, "ConfigMap", "crossdock")["data"]
    hosts = [f"crossdock-coordinator-{number}.crossdock-coordinator.crossdock.svc" for number in range(3)]
    assert config["CROSSDOCK_COORDINATOR"] == ",".join(f"tcp://{host}:7070" for host in hosts)
    spec = find(objects, "StatefulSet", "crossdock-coordinator")["spec"]
    assert spec["replicas"] == 3 and "volumeClaimTemplates" not in spec
    [container] = spec["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/live"
    names = {one["name"]: one.get("valueFrom", {}).get("secretKeyRef") for one in container["env"]}
    assert names["CROSSDOCK_DATABASE"] == {"name": "mine", "key": "url"} and names["PGPASSWORD"]["key"] == "password"
    assert "CROSSDOCK_USAGE_DB" not in names
    [gateway] = find(objects, "Deployment", "crossdock-gateway")["spec"]["template"]["spec"]["containers"]
    assert [one for one in container["env"] if one["name"] in ("CROSSDOCK_DATABASE", "PGPASSWORD")] == [
        one for one in gateway["env"] if one["name"] in ("CROSSDOCK_DATABASE", "PGPASSWORD")
    ]


@needs_helm
def test_each_role_gets_its_own_secret_key() -> None:
    """Secrets made from values have all public keys, and the secret key of one role."""
    files = [f"keys.files.{role}\\.{kind}={role}" for role in ROLES for kind in ("key", "key_secret")]
    objects = render(*files)
    for role in ROLES:
        content = find(objects, "Secret", f"crossdock-{role}-keys")["stringData"]
        assert set(content) == {f"{role}.key_secret", *(f"{name}.key" for name in ROLES)}


@needs_helm
def test_client_ca_moves_the_ready_probe() -> None:
    """The kubelet has no certificate: where clients need one, no probe asks at the port of clients."""
    for values, port in ((VALUES["tls"], "metrics"), (("tls.secret=cert",), "http")):
        probes = dict(pods(render(*values)))["gateway"]["containers"][0]
        assert probes["readinessProbe"]["httpGet"] == {"path": "/ready", "port": port, "scheme": "HTTPS"}


def test_page_names_values_of_the_chart() -> None:
    """Every value in the table of docs/install.md exists in values.yaml."""
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    page = (ROOT / "docs/install.md").read_text("utf-8")
    named = [
        cell.strip("` ")
        for line in page.splitlines()
        if line.startswith("| `")
        for cell in line.split("|")[1].split(",")
    ]
    chart = [name for name in named if name.split(".")[0] in values]
    assert len(chart) >= 12
    for name in chart:
        found = values
        for part in name.split("."):
            assert part in found, name
            found = found[part]
