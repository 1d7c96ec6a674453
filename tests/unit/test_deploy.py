"""deploy/, compose.yaml and the Dockerfile: valid by their schemas, and true of the engine.

Checkers that are not installed are skipped by name.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import deploy_files
from source_tree import REPO
from triptych.services.executor.settings import ExecutorSettings
from triptych.services.runtime.settings import Settings, load_settings
from triptych.services.scheduler.settings import SchedulerSettings
from triptych.services.tokenizer.settings import TokenizerSettings

SERVICES: dict[str, type[Settings]] = {
    "scheduler": SchedulerSettings,
    "executor": ExecutorSettings,
    "tokenizer": TokenizerSettings,
}


def loaded(service: str, *arguments: str) -> Settings:
    return load_settings(SERVICES[service], list(arguments), prog=service)


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = deploy_files.kubernetes_object("Deployment")["spec"]["template"]["spec"]
    return spec


# ------------------------------------------------------------------------------------- Kubernetes


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_objects_fit_their_schemas(version: str) -> None:
    checker = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is missing")
    kinds = [each["kind"] for each in deploy_files.kubernetes()]
    assert {"Deployment", "Service", "HorizontalPodAutoscaler"} <= {*kinds}
    for each in deploy_files.kubernetes():
        checker.validate(each, version, strict=True)


def test_the_pods_settings_are_the_services_own(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(deploy_files.kubernetes_object("ConfigMap")["data"]["engine.yaml"])
    containers = {each["name"]: each for each in (*pod()["initContainers"], *pod()["containers"])}
    assert [*containers] == ["scheduler", "executor", "tokenizer"]
    for name, container in containers.items():
        command, flag, path = container["args"]
        assert (command, flag, path) == (name, "--config", "/etc/triptych/engine.yaml")
        settings = loaded(name, flag, str(file))
        assert settings.run_dir == "/run/triptych/engine"
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        mounts = {each["mountPath"] for each in container["volumeMounts"]}
        assert {"/run/triptych", "/etc/triptych", "/tmp"} <= mounts
    # Their environment would have TRIPTYCH_SERVICE_HOST and the like, which are no settings.
    assert pod()["enableServiceLinks"] is False


def test_the_grace_of_the_pod_is_longer_than_that_of_the_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(deploy_files.kubernetes_object("ConfigMap")["data"]["engine.yaml"])
    settings = loaded("tokenizer", "--config", str(file))
    assert isinstance(settings, TokenizerSettings)
    sleeping = 5
    assert pod()["terminationGracePeriodSeconds"] > settings.shutdown_grace + sleeping


def test_the_autoscaler_looks_at_a_figure_that_there_is() -> None:
    from triptych.services.tokenizer.openai_http import metrics

    hpa = deploy_files.kubernetes_object("HorizontalPodAutoscaler")
    name = hpa["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert name == "triptych_num_requests_waiting"
    rule = (deploy_files.KUBERNETES / "autoscaling.yaml").read_text()
    assert "triptych:num_requests_waiting" in rule
    assert "num_requests_waiting" in Path(metrics.__file__).read_text()


# ---------------------------------------------------------------------------------------- systemd


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    copies = []
    for unit in deploy_files.unit_files():
        copy = tmp_path / unit.name
        # It wants programs that are there.
        copy.write_text(unit.read_text().replace("/opt/triptych/bin/triptych", sys.executable))
        copies.append(str(copy))
    assert len(copies) == 4
    command = ["systemd-analyze", "verify", "--man=no", *copies]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    # Of units that this machine has itself, it may complain.
    ours = [line for line in done.stderr.splitlines() if "triptych" in line]
    assert ours == []


@pytest.mark.parametrize("service", SERVICES)
def test_units_start_what_there_is_with_settings_that_it_takes(service: str) -> None:
    text = (deploy_files.SYSTEMD / f"triptych-{service}.service").read_text()
    assert (
        f"ExecStart=/opt/triptych/bin/triptych {service} --config /etc/triptych/engine.yaml\n"
        in text
    )
    settings = loaded(service, "--config", str(deploy_files.SYSTEMD / "engine.yaml"))
    assert settings.run_dir == "/run/triptych"
    stop = re.search(r"^TimeoutStopSec=(\d+)$", text, flags=re.MULTILINE)
    assert stop is not None
    if isinstance(settings, TokenizerSettings):
        assert int(stop[1]) > settings.shutdown_grace


# ----------------------------------------------------------------------------- Docker and compose


def test_compose_fits_its_schema() -> None:
    checker = pytest.importorskip("compose_spec", reason="compose-spec is missing")
    checker.models.ComposeSpecification.model_validate(deploy_files.compose())


def test_compose_starts_what_there_is_with_settings_that_it_takes() -> None:
    services = deploy_files.compose()["services"]
    default = {name for name, service in services.items() if "profiles" not in service}
    assert default == {*SERVICES}
    for name in SERVICES:
        service = services[name]
        command, *arguments = service["command"]
        assert command == name
        settings = loaded(name, *arguments)
        assert service["read_only"] is True
        assert service["user"] == "10001:10001"
        if isinstance(settings, TokenizerSettings):
            assert int(service["stop_grace_period"].removesuffix("s")) > settings.shutdown_grace


def test_the_dockerfiles_pass_hadolint() -> None:
    if (hadolint := shutil.which("hadolint", path=f"{Path(sys.executable).parent}")) is None:
        pytest.skip("hadolint is not installed")
    files = [str(deploy_files.DOCKERFILE), str(REPO / "examples" / "go" / "Dockerfile")]
    done = subprocess.run(
        [hadolint, *files], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_dockerfile_copies_is_there_and_not_ignored() -> None:
    kept = {
        line.removeprefix("!").rstrip("/")
        for line in (REPO / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copies = re.findall(
        r"^COPY (?!--from)(?:--chmod=\S+ )?(.+) \S+$",
        deploy_files.DOCKERFILE.read_text(),
        flags=re.MULTILINE,
    )
    sources = [source for copy in copies for source in copy.split()]
    assert "services" in sources
    for source in sources:
        assert (REPO / source).exists(), source
        assert source in kept, f".dockerignore keeps {source} out"


def test_the_images_user_and_folders_are_those_of_the_manifests() -> None:
    text = deploy_files.DOCKERFILE.read_text()
    assert "USER 10001:10001" in text
    assert pod()["securityContext"]["runAsUser"] == 10001
    known = {key.upper() for settings in SERVICES.values() for key in settings.model_fields}
    assert {*re.findall(r"TRIPTYCH_(\w+)=", text)} <= known


def test_triton_finds_a_compiler_and_a_folder_that_it_may_write() -> None:
    stage = deploy_files.DOCKERFILE.read_text().split("\nFROM runtime AS cuda\n")[1]
    stage = stage.split("\nFROM ")[0]
    assert {"gcc", "libc6-dev", "python3-dev"} <= set(stage.split())
    users = re.findall(r"^USER (\S+)$", stage, flags=re.MULTILINE)
    assert users == ["0:0", "10001:10001"]
    cache = re.search(r"^(?:ENV|   ) TRITON_CACHE_DIR=(\S+)$", stage, flags=re.MULTILINE)
    assert cache is not None
    gpu = deploy_files.compose()["services"]["executor-gpu"]
    assert gpu["read_only"] is True
    folders = [volume.split(":")[1] for volume in gpu["volumes"]]
    assert any(cache[1].startswith(f"{folder}/") for folder in folders)
    unit = (deploy_files.SYSTEMD / "triptych-executor.service").read_text()
    assert f"\nEnvironment=TRITON_CACHE_DIR={cache[1]}\n" in unit
    assert "\nCacheDirectory=triptych\n" in unit


def test_the_image_serves_every_contract_that_has_a_flag() -> None:
    assert "deploy/requirements.py vllm-grpc" in deploy_files.DOCKERFILE.read_text()


@pytest.mark.parametrize("part", ["build", "run", "cuda", "vllm-grpc"])
def test_requirements_are_pyprojects(part: str) -> None:
    command = [sys.executable, "deploy/requirements.py", part, "--without", "torch"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    names = [re.split(r"[<>=~ ]", line)[0] for line in done.stdout.splitlines()]
    expected = {
        "build": "pybind11", "run": "grpcio", "cuda": "triton", "vllm-grpc": "smg-grpc-proto",
    }[part]  # fmt: skip
    assert expected in names
    assert "torch" not in names
