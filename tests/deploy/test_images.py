"""`deploy/Dockerfile` and `deploy/compose.yaml`: what they name exists. `scripts/image_test` builds and asks an image."""

import re
import tomllib
from pathlib import Path

import pytest

from engine.vllm.order import VERSIONS
from runtime.settings.serve import ServeSettings

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text("utf-8")
TARGETS = ("cpu", "cuda", "vllm")


def stage(name: str) -> str:
    """The lines of a stage and of those it begins with."""
    [(base, lines)] = re.findall(rf"(?ms)^FROM (\S+) AS {name}\n(.*?)(?=^FROM |\Z)", DOCKERFILE)
    return (stage(base) if re.fullmatch(r"[a-z-]+", base) else "") + lines


def test_image_source_is_that_of_the_wheel() -> None:
    """The build sees the wheel's packages, and nothing else of the checkout but what pins requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    packages = {one.rstrip("*") for one in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert "*" in lines
    let_in = {line[1:] for line in lines if line.startswith("!")}
    assert let_in == packages | {"pyproject.toml", "README.md", "LICENSE", "constraints.txt", "requirements.lock"}


@pytest.mark.parametrize("target", TARGETS)
def test_images_run_without_root(target: str) -> None:
    """The last user of each image is a number, which Kubernetes can check, and `crossdock serve` is what it runs."""
    lines = stage(target)
    assert re.findall(r"(?m)^USER (\S+)", lines)[-1] == "10001:10001"
    assert 'ENTRYPOINT ["crossdock"]' in lines and f"COPY --from=build-{target} /opt/crossdock" in lines


@pytest.mark.parametrize("target", TARGETS)
def test_images_have_the_extras_of_roles(target: str) -> None:
    """Each image can trace, and keep its ledger in PostgreSQL."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = stage(f"build-{target}")
    extras = set(",".join(re.findall(r"\.\[([a-z,]+)\]", lines)).split(","))
    for extra in ("postgresql", "tracing"):
        packages = [re.split("[>=]", one)[0] for one in project["optional-dependencies"][extra]]
        assert extra in extras or all(name in lines for name in packages)


def test_vllm_image_has_a_known_version() -> None:
    """The image with vLLM is of a version that crossdock runs."""
    [version] = re.findall(r"vllm-openai:v(\S+)", DOCKERFILE)
    assert version.startswith(VERSIONS)


def test_compose_file_fits_images_and_options() -> None:
    """Each service builds a target, may not write to its root, and is given options that `crossdock serve` has."""
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text("utf-8"))
    assert {one["build"]["target"] for one in compose["services"].values()} == set(TARGETS)
    for one in compose["services"].values():
        assert one["read_only"] and one["cap_drop"] == ["ALL"] and (ROOT / one["build"]["dockerfile"]).is_file()
        options = {name.removeprefix("CROSSDOCK_").lower() for name in one["environment"]}
        assert options <= set(ServeSettings.model_fields)
        assert all(port.startswith("127.0.0.1:") for port in one["ports"])
