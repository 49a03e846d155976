"""What a team copies from deploy/ fits the server: options that it has, and parts that find one another.

Nothing is built or started here: files are parsed.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from compiled_llm.commands.app import app
from compiled_llm.server.openai.status import router
from support.docs.pages import CHECKOUT

DEPLOY = CHECKOUT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yml").read_text())
SERVER = COMPOSE["services"]["compiled-llm"]


def instructions() -> list[tuple[str, str]]:
    """Those of the Dockerfile, each with what follows it."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    found = (line.partition(" ") for line in text.replace("\\\n", " ").splitlines() if line)
    return [(name, " ".join(rest.split())) for name, _, rest in found]


def last(name: str) -> str:
    return [rest for found, rest in instructions() if found == name][-1]


def unit(name: str) -> list[str]:
    """The values of a setting of the service of systemd."""
    text = (DEPLOY / "compiled-llm.service").read_text().replace("\\\n", " ")
    return re.findall(rf"^{name}=(.*)$", text, re.MULTILINE)


KUBERNETES = {part["kind"]: part for part in yaml.safe_load_all((DEPLOY / "kubernetes.yml").read_text())}
POD = KUBERNETES["Deployment"]["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]
PAGE = (CHECKOUT / "docs" / "how-to" / "deploy.md").read_text()

COMMANDS = {
    "Dockerfile": json.loads(last("ENTRYPOINT"))[1:] + json.loads(last("CMD")),
    "compose.yml": json.loads(last("ENTRYPOINT"))[1:] + SERVER["command"],
    "kubernetes.yml": json.loads(last("ENTRYPOINT"))[1:] + CONTAINER["args"],
    "compiled-llm.service": shlex.split(unit("ExecStart")[0])[1:],
}


def options(arguments: Sequence[str]) -> dict[str, Any]:
    """How ``compiled-llm`` reads arguments of ``serve``; raises what it would say of them."""
    name, *rest = arguments
    assert name == "serve"
    command: Any = typer.main.get_command(app)
    return dict(command.commands[name].make_context(name, rest).params)


@pytest.mark.parametrize("file", COMMANDS)
def test_the_server_has_the_options_that_it_is_started_with(file: str) -> None:
    given = options(COMMANDS[file])
    assert given["model"] == "demo"
    assert (given["api_key_file"] is None) is (
        file in ("Dockerfile", "kubernetes.yml")
    )  # which give it by the environment


def test_an_option_that_is_missing_is_seen() -> None:
    with pytest.raises(Exception, match="--no-such-option"):
        options(["serve", "demo", "--no-such-option"])


def test_the_image_runs_as_a_user_that_may_write_where_caches_are() -> None:
    order = [name for name, _ in instructions()]
    assert last("USER") == "compiled-llm"
    assert order.index("USER") < order.index("ENTRYPOINT")
    assert f"-o {last('USER')} {last('VOLUME')}" in last("RUN")
    cached = re.findall(r"(\w+)=(/caches/\S+)", last("ENV"))
    assert {name for name, _ in cached} == set(caches_on_the_page())
    assert SERVER["volumes"] == [f"caches:{last('VOLUME')}"]


def caches_on_the_page() -> list[str]:
    page = (CHECKOUT / "docs" / "how-to" / "containers.md").read_text()
    return re.findall(r"^\| [^|]+ \| `(\w+)` \|", page, re.MULTILINE)


def test_the_service_keeps_all_caches_where_only_its_user_may_look() -> None:
    kept = dict(line.split("=", 1) for line in unit("Environment"))
    assert set(kept) == {*caches_on_the_page(), "HOME"}
    assert all(path.startswith(f"/var/cache/{unit('CacheDirectory')[0]}") for path in kept.values())
    assert unit("CacheDirectoryMode") == unit("RuntimeDirectoryMode") == ["0700"]
    given = options(COMMANDS["compiled-llm.service"])
    assert given["operations_uds"].parent == Path("/run") / unit("RuntimeDirectory")[0]


def test_requests_may_end_before_the_server_is_killed() -> None:
    for file, seconds in (
        ("compose.yml", SERVER["stop_grace_period"]),
        ("kubernetes.yml", str(POD["spec"]["terminationGracePeriodSeconds"])),
        ("compiled-llm.service", unit("TimeoutStopSec")[0]),
    ):
        assert int(seconds.removesuffix("s")) > options(COMMANDS[file])["drain_seconds"]


def test_the_image_is_watched_at_a_path_that_needs_no_key() -> None:
    port, path = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)'", last("HEALTHCHECK")).groups()  # type: ignore[union-attr]
    assert port == last("EXPOSE") == "8000"
    assert path == "/health"
    assert path in {route.path for route in router.routes}  # type: ignore[attr-defined]


def test_the_pages_docker_run_reaches_the_server_with_a_key() -> None:
    lines = re.findall(r"^docker run (.+)$", PAGE, re.MULTILINE)
    built = re.findall(r"^docker build .*-t (\S+) \.$", PAGE, re.MULTILINE)
    for line, image in zip(lines, built, strict=True):
        given, _, arguments = f"{line} ".partition(f" {image} ")
        assert "-e COMPILED_LLM_API_KEY" in given
        assert f"-p 127.0.0.1:{last('EXPOSE')}:{last('EXPOSE')}" in given
        assert given.endswith(f":{last('VOLUME')} -e COMPILED_LLM_API_KEY")
        command = shlex.split(arguments) or json.loads(last("CMD"))
        assert options([*json.loads(last("ENTRYPOINT"))[1:], *command])["host"] == "0.0.0.0"


def test_kubernetes_finds_the_server_asks_paths_without_a_key_and_names_this_machine() -> None:
    service, spec = KUBERNETES["Service"], POD["spec"]
    assert service["spec"]["selector"].items() <= POD["metadata"]["labels"].items()
    assert KUBERNETES["Deployment"]["spec"]["selector"]["matchLabels"] == POD["metadata"]["labels"]
    assert service["metadata"]["name"] in options(COMMANDS["kubernetes.yml"])["allowed_host"]
    assert service["metadata"]["name"] != "compiled-llm-serve"  # its variables would look like options
    (port,) = CONTAINER["ports"]
    assert str(port["containerPort"]) == last("EXPOSE")
    assert {part["targetPort"] for part in service["spec"]["ports"]} == {port["name"]}
    paths = {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}
    for probe, path in paths.items():
        asked = CONTAINER[probe]["httpGet"]
        assert (asked["path"], asked["port"]) == (path, port["name"])
        assert asked["httpHeaders"] == [{"name": "Host", "value": "localhost"}]
        assert path in {route.path for route in router.routes}  # type: ignore[attr-defined]
    assert spec["securityContext"]["runAsUser"] == int(re.search(r"--uid (\d+)", last("RUN"))[1])  # type: ignore[index]


def test_kubernetes_mounts_caches_where_the_image_has_them_and_finds_the_key() -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in POD["spec"]["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert mounts["caches"] == last("VOLUME")
    claim = volumes["caches"]["persistentVolumeClaim"]["claimName"]
    assert claim == KUBERNETES["PersistentVolumeClaim"]["metadata"]["name"]
    (key,) = CONTAINER["env"]
    secret = key["valueFrom"]["secretKeyRef"]
    assert key["name"] == "COMPILED_LLM_API_KEY"
    assert f"kubectl create secret generic {secret['name']} --from-literal={secret['key']}=$(" in PAGE


def test_each_stage_that_compose_asks_for_is_there() -> None:
    stages = {rest.partition(" AS ")[2] for name, rest in instructions() if name == "FROM"}
    cuda = yaml.safe_load((DEPLOY / "compose.cuda.yml").read_text())["services"]["compiled-llm"]
    asked = {SERVER["build"]["args"]["DEVICE"], cuda["build"]["args"]["DEVICE"]}
    assert asked == {"cpu", "cuda"}
    assert asked < stages
    assert (DEPLOY / SERVER["build"]["context"] / SERVER["build"]["dockerfile"]).is_file()


def test_the_image_is_built_from_files_that_there_are_and_from_no_keys() -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    kept = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert all((CHECKOUT / name).exists() for name in kept)
    assert "deploy" not in kept


def test_prometheus_reaches_the_server_with_a_key_by_a_name_that_is_served() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    name, port = job["static_configs"][0]["targets"][0].split(":")
    given = options(COMMANDS["compose.yml"])
    assert name in COMPOSE["services"]
    assert name in given["allowed_host"]
    assert int(port) == int(last("EXPOSE"))
    assert given["host"] == "0.0.0.0"
    assert given["port"] is None  # 8000
    secret = Path(job["authorization"]["credentials_file"])
    assert secret.parent == given["api_key_file"].parent == Path("/run/secrets")
    assert secret.name in COMPOSE["services"]["prometheus"]["secrets"]
    assert given["api_key_file"].name in SERVER["secrets"]


def test_what_compose_mounts_is_there_and_nothing_listens_beyond_this_machine() -> None:
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert set(service["secrets"]) <= COMPOSE["secrets"].keys()
        for volume in service["volumes"]:
            source, place, *_ = volume.split(":")
            assert (DEPLOY / source).exists() if source.startswith("./") else source in COMPOSE["volumes"]
            assert place.startswith("/")
    ignored = (CHECKOUT / ".gitignore").read_text().splitlines()
    assert "/deploy/secrets/" in ignored
    assert all(secret["file"].startswith("./secrets/") for secret in COMPOSE["secrets"].values())


def test_grafana_finds_the_dashboard_and_its_source() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "dashboards.yml").read_text())["providers"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in COMPOSE["services"]["grafana"]["volumes"]
    assert source["url"] == "http://prometheus:9090"
    (file,) = (DEPLOY / "grafana" / "dashboards").iterdir()
    panels = json.loads(file.read_text())["panels"]
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_systemd_reads_the_service(tmp_path: Path) -> None:
    text = (DEPLOY / "compiled-llm.service").read_text()
    copy = tmp_path / "compiled-llm.service"
    copy.write_text(text.replace(shlex.split(unit("ExecStart")[0])[0], "/bin/true"))  # it looks for the program
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
