"""The compose file and the Dockerfile say what the server needs, and agree with the rest of the repository."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "build" / "Dockerfile").read_text()
INSTRUCTIONS = [
    tuple(line.split(maxsplit=1))
    for line in DOCKERFILE.replace("\\\n", " ").splitlines()
    if line and not line.startswith("#")
]


def values_of(instruction: str) -> list[str]:
    return [value for name, value in INSTRUCTIONS if name == instruction]


def seconds(text: str) -> int:
    assert text.endswith("s")
    return int(text.removesuffix("s"))


def test_each_profile_has_one_service() -> None:
    assert {name: service["profiles"] for name, service in SERVICES.items()} == {
        "triton-gpu": ["gpu"],
        "triton-cpu": ["cpu"],
    }


def test_only_the_gpu_profile_reserves_a_gpu() -> None:
    (device,) = SERVICES["triton-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert "gpu" in device["capabilities"]
    assert "deploy" not in SERVICES["triton-cpu"]


@pytest.mark.parametrize("name", SERVICES)
def test_service_survives_a_lost_engine_and_drains_before_it_is_killed(name: str) -> None:
    service = SERVICES[name]
    command = service["command"]
    assert service["restart"] == "unless-stopped"
    assert service["init"] is True
    assert seconds(service["stop_grace_period"]) > int(command[command.index("--exit-timeout") + 1]) + 15


@pytest.mark.parametrize("name", SERVICES)
def test_service_is_healthy_when_ready_and_has_time_to_load(name: str) -> None:
    check = SERVICES[name]["healthcheck"]
    assert check["test"][-1].endswith("/v2/health/ready")
    assert seconds(check["start_period"]) >= 300
    assert seconds(check["timeout"]) > 5  # the server itself may take 5 s to ask a model


@pytest.mark.parametrize("name", SERVICES)
def test_service_has_room_for_the_shared_memory_of_its_stubs(name: str) -> None:
    assert SERVICES[name]["shm_size"] == "2g"


@pytest.mark.parametrize("name", SERVICES)
def test_service_publishes_the_three_ports_and_mounts_models_read_only(name: str) -> None:
    service = SERVICES[name]
    assert [port.rpartition(":")[2] for port in service["ports"]] == ["8000", "8001", "8002"]
    assert values_of("EXPOSE") == ["8000 8001 8002"]
    (models,) = [volume for volume in service["volumes"] if ":/models" in volume]
    assert models.endswith(":/models:ro")
    assert service["command"][:2] == ["--repository", "/models"]


@pytest.mark.parametrize("name", SERVICES)
def test_named_volumes_are_declared(name: str) -> None:
    for volume in SERVICES[name]["volumes"]:
        source = volume.partition(":")[0]
        assert source.startswith(("$", ".", "/")) or source in COMPOSE["volumes"]


@pytest.mark.parametrize("name", SERVICES)
def test_build_uses_the_dockerfile_with_arguments_it_knows(name: str) -> None:
    build = SERVICES[name]["build"]
    assert (ROOT / build["context"] / build["dockerfile"]).samefile(ROOT / "build" / "Dockerfile")
    known = {value.partition("=")[0] for value in values_of("ARG")}
    assert set(build.get("args", {})) <= known


def test_image_is_pinned_to_a_release() -> None:
    (image,) = [value.partition("=")[2] for value in values_of("ARG") if value.startswith("TRITON_IMAGE=")]
    assert re.fullmatch(r"nvcr\.io/nvidia/tritonserver:\d\d\.\d\d-py3", image)


def test_entry_point_is_a_script_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert values_of("ENTRYPOINT") == ['["mstar", "serve"]']
    assert "mstar" in project["scripts"]


def test_copied_paths_exist_and_are_let_through() -> None:
    let_through = (ROOT / "build" / "Dockerfile.dockerignore").read_text().splitlines()
    for value in values_of("COPY"):
        for source in value.split()[:-1]:
            assert (ROOT / source).exists()
            assert f"!{source}" in let_through


def test_torch_and_weights_are_those_of_the_local_set_up() -> None:
    set_up = (ROOT / "build" / "setup_env.py").read_text()
    arguments = dict(value.split("=", 1) for value in values_of("ARG"))
    assert f'"torch=={arguments["TORCH_VERSION"]}"' in set_up
    assert f'"{arguments["WEIGHTS"]}"' in set_up
