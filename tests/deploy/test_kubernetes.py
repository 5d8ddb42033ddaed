"""`deploy/kubernetes.yaml`: every object fits its schema, refers to what is there, and gives crossdock options that it has."""

from pathlib import Path
from typing import Any

import pytest

from runtime.settings.options import load
from runtime.settings.roles import CoordinatorSettings, GatewaySettings
from runtime.settings.types import Options
from runtime.settings.workers import WorkerSettings

yaml = pytest.importorskip("yaml")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="of the extra `test`")
VERSIONS = ("1.30", "1.37")
PATH = Path(__file__).parents[2] / "deploy/kubernetes.yaml"
OBJECTS: list[dict[str, Any]] = list(yaml.safe_load_all(PATH.read_text()))
PODS = {
    one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in OBJECTS if "template" in one.get("spec", {})
}
SETTINGS: dict[str, type[Options]] = {
    "coordinator": CoordinatorSettings,
    "gateway": GatewaySettings,
    "prefill_worker": WorkerSettings,
    "decode_worker": WorkerSettings,
}


def names(kind: str) -> set[str]:
    return {one["metadata"]["name"] for one in OBJECTS if one["kind"] == kind}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_its_schema(version: str) -> None:
    """Every Kubernetes object is valid under the strict schema of each version."""
    for one in OBJECTS:
        kubernetes_validate.validate(one, version, strict=True)


def test_schema_check_detects_mistakes() -> None:
    """The schema check refuses an object with a misspelt key."""
    broken = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"prots": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


def test_manifest_references_resolve() -> None:
    """Namespaces, volumes, ports and claims that the objects refer to exist."""
    assert names("Namespace") == {one["metadata"].get("namespace", "crossdock") for one in OBJECTS}
    for pod in PODS.values():
        (container,) = pod["containers"]
        volumes = {volume["name"] for volume in pod["volumes"]} | {"state"}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        ports = {port["name"] for port in container.get("ports", ())}
        probes = [probe for key, probe in container.items() if key.endswith("Probe")]
        assert {probe.get("httpGet", probe.get("tcpSocket"))["port"] for probe in probes} <= ports
        claims = {v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
        assert claims <= names("PersistentVolumeClaim")
    roles = {
        one["spec"]["template"]["metadata"]["labels"]["role"] for one in OBJECTS if "template" in one.get("spec", {})
    }
    assert roles == {"coordinator", "gateway", "prefill", "decode"}
    for one in OBJECTS:
        if one["kind"] == "Service":
            assert one["spec"]["selector"]["role"] in roles


@pytest.mark.parametrize("name", sorted(PODS))
def test_pod_options_belong_to_the_role(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pod's environment sets only options of its role, and they load."""
    (container,) = PODS[name]["containers"]
    module = container["command"][-1]
    config = next(one["data"] for one in OBJECTS if one["kind"] == "ConfigMap")
    own = {one["name"]: one.get("value", "10.1.2.3") for one in container["env"]}
    assert {key for key in own if key.startswith("CROSSDOCK_")} <= {
        f"CROSSDOCK_{key.upper()}" for key in SETTINGS[module].model_fields
    }
    for key, value in {**config, **own}.items():
        monkeypatch.setenv(key, value)
    load(SETTINGS[module], {"role": module.removesuffix("_worker")} if module.endswith("_worker") else {})


@pytest.mark.parametrize("name", sorted(PODS))
def test_pods_are_locked_down(name: str) -> None:
    """Pods run without root, privileges or a writable root, and with the keys of their role alone."""
    pod = PODS[name]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    assert pod["enableServiceLinks"] is False, "Kubernetes would set CROSSDOCK_PORT"
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    secret = next(volume["secret"] for volume in pod["volumes"] if volume["name"] == "keys")
    assert secret["secretName"] == f"{name}-keys" and secret["defaultMode"] & 0o007 == 0
    wants_gpu = "nvidia.com/gpu" in container["resources"]["limits"]
    assert wants_gpu == container["command"][-1].endswith("_worker")


@pytest.mark.parametrize("name", sorted(PODS))
def test_stalled_pods_are_restarted(name: str) -> None:
    """By the port that fails with the checks of the watchdog; and none while it starts."""
    (container,) = PODS[name]["containers"]
    for probe in ("livenessProbe", "startupProbe"):
        assert container[probe]["httpGet"] == {"path": "/live", "port": "metrics"}
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["periodSeconds"] * container["livenessProbe"]["failureThreshold"] >= 60
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 300


def test_drain_evicts_one_pod_per_role() -> None:
    """Disruption budgets let a node drain evict one pod of a role at a time."""
    budgets = [one for one in OBJECTS if one["kind"] == "PodDisruptionBudget"]
    labels = {one["spec"]["selector"]["matchLabels"]["role"]: one["spec"] for one in budgets}
    assert set(labels) == {"gateway", "prefill", "decode"}
    replicas = {
        one["spec"]["template"]["metadata"]["labels"]["role"]: one["spec"]["replicas"]
        for one in OBJECTS
        if "template" in one.get("spec", {})
    }
    for role, spec in labels.items():
        assert spec["maxUnavailable"] == 1 <= replicas[role], "a drain can end"


def test_api_key_is_required() -> None:
    """Gateways and the coordinator read a tenants file from a Secret, which is not optional and readable by nobody else."""
    config = next(one["data"] for one in OBJECTS if one["kind"] == "ConfigMap")
    for name in ("crossdock-coordinator", "crossdock-gateway"):
        (container,) = PODS[name]["containers"]
        mount = next(mount for mount in container["volumeMounts"] if mount["name"] == "tenants")
        assert mount["readOnly"] and "subPath" not in mount, "a subPath is not updated"
        assert config["CROSSDOCK_TENANTS"].startswith(mount["mountPath"] + "/")
        secret = next(volume["secret"] for volume in PODS[name]["volumes"] if volume["name"] == "tenants")
        assert secret["secretName"] == "crossdock-tenants" and secret["defaultMode"] & 0o007 == 0
        assert not secret.get("optional") and "CROSSDOCK_INSECURE" not in config
        assert f"create secret generic {secret['secretName']} " in PATH.read_text()
