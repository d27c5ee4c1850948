"""The compose file: what a platform in containers must not be started without."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
COMPOSE = ROOT / "docker-compose.yml"
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
SERVERS = ("postgres", "redis")
WORKERS = ("worker-cpu", "worker-gpu")

FILE: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
PLATFORM = sorted(set(SERVICES) - set(SERVERS))


def seconds(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(s|m|h)", text).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "m": 60, "h": 3600}[unit]


def test_it_is_a_compose_file() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_services_are_all_there() -> None:
    assert set(SERVICES) == {"postgres", "redis", "migrate", "api", "reconciler", *WORKERS}


def test_only_the_api_is_published_and_only_on_this_machine() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert list(published) == ["api"]
    assert all(port.startswith("127.0.0.1:") for port in published["api"])
    assert all(service.get("network_mode") != "host" for service in SERVICES.values())


def test_postgres_and_redis_are_reachable_from_the_inner_network_alone() -> None:
    assert FILE["networks"]["inner"]["internal"] is True
    for name in SERVERS:
        assert SERVICES[name]["networks"] == ["inner"]


def test_passwords_have_to_be_given() -> None:
    text = COMPOSE.read_text(encoding="utf-8")
    uses = re.findall(r"\$\{(\w*PASSWORD)(.*?)\}", text)
    assert {name for name, _ in uses} == {"POSTGRES_PASSWORD", "REDIS_PASSWORD"}
    assert all(rest.startswith(":?") for _, rest in uses), "a password with a default, or one that may be empty"
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    assert re.findall(r"^(\w*PASSWORD)=(.*)$", example, re.MULTILINE) == [
        ("POSTGRES_PASSWORD", ""), ("REDIS_PASSWORD", ""),
    ]  # fmt: skip


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_has_an_init_and_no_new_privileges(name: str) -> None:
    assert SERVICES[name]["init"] is True
    assert "no-new-privileges:true" in SERVICES[name]["security_opt"]


@pytest.mark.parametrize("name", [name for name in SERVICES if name != "migrate"])
def test_every_lasting_service_is_restarted(name: str) -> None:
    assert SERVICES[name]["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", [*SERVERS, "api"])
def test_what_others_wait_for_says_when_it_is_ready(name: str) -> None:
    assert SERVICES[name]["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")


def test_nothing_starts_before_what_it_needs() -> None:
    assert SERVICES["migrate"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    assert SERVICES["migrate"]["restart"] == "no"
    for name in ("api", "reconciler", *WORKERS):
        assert SERVICES[name]["depends_on"]["migrate"] == {"condition": "service_completed_successfully"}, name


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_has_time_to_save_and_memory_to_share(name: str) -> None:
    assert seconds(SERVICES[name]["stop_grace_period"]) >= 15 * 60
    assert SERVICES[name]["shm_size"] == "2gb"


def test_the_gpu_worker_is_a_profile_and_reserves_gpus() -> None:
    assert SERVICES["worker-gpu"]["profiles"] == ["gpu"]
    (device,) = SERVICES["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert all("profiles" not in service for name, service in SERVICES.items() if name != "worker-gpu")


@pytest.mark.parametrize("name", SERVICES)
def test_images_are_pinned(name: str) -> None:
    assert re.search(r":\d+\.\d+", SERVICES[name]["image"]), SERVICES[name]["image"]


@pytest.mark.parametrize("name", PLATFORM)
def test_our_services_share_the_data_and_see_inputs_read_only(name: str) -> None:
    volumes = SERVICES[name]["volumes"]
    assert "data:/data" in volumes
    assert any(volume.endswith(":/inputs:ro") for volume in volumes)
    assert SERVICES[name]["environment"]["PPO_DATA_DIR"] == "/data"


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_as_a_user_from_a_base_that_is_an_argument(dockerfile: Path) -> None:
    lines = dockerfile.read_text(encoding="utf-8").splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert all(base.startswith("${") for base in bases)
    arguments = [line for line in lines if line.startswith("ARG ") and "_BASE=" in line]
    assert arguments
    assert all(re.search(r":\d+\.\d+\.\d+", argument) for argument in arguments), "a base that moves by itself"
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER ppo"]
    assert "    && install -d -o ppo -g ppo /data" in lines, "a new volume would belong to root"


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_starts_by_the_entrypoint_without_a_shell(dockerfile: Path) -> None:
    lines = dockerfile.read_text(encoding="utf-8").splitlines()
    assert 'ENTRYPOINT ["entrypoint"]' in lines
    assert next(line for line in lines if line.startswith("CMD ")).startswith('CMD ["')
    assert (ROOT / "docker" / "entrypoint").read_text(encoding="utf-8").rstrip().endswith('exec "$@"')


def test_the_entrypoint_becomes_the_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "docker" / "entrypoint", "sh", "-c", "echo $$; ps -o ppid= -p $$ >/dev/null; echo ran"],
        env={"PATH": "/usr/bin:/bin", "PPO_DATA_DIR": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("ran\n")
    assert not list(tmp_path.iterdir())


def test_the_entrypoint_refuses_a_folder_it_cannot_write(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "docker" / "entrypoint", "true"],
        env={"PATH": "/usr/bin:/bin", "PPO_DATA_DIR": str(tmp_path / "absent")}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "cannot be written" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_entrypoint_refuses_too_little_shared_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "docker" / "entrypoint", "true"],
        env={"PATH": "/usr/bin:/bin", "PPO_DATA_DIR": str(tmp_path), "PPO_NEEDS_SHM_MIB": "999999999"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "shm_size" in done.stderr


def test_every_copied_path_is_in_the_build_context() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for dockerfile in DOCKERFILES:
        for line in dockerfile.read_text(encoding="utf-8").splitlines():
            if line.startswith("COPY ") and not line.startswith("COPY --from"):
                for source in line.split()[1:-1]:
                    assert source.split("/")[0] in allowed, f"{dockerfile.name}: {source}"
                    if (ROOT / source).parts[len(ROOT.parts)] != "web":
                        assert (ROOT / source).exists(), f"{dockerfile.name}: {source}"
