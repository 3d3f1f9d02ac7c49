from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CHART = DEPLOY / "helm/skipjoin"
UNIT = DEPLOY / "systemd/skipjoin.service"
pytestmark = pytest.mark.artifacts
ONE_KEY = ("--set", "keys.file=secret")
SHARED = ("--set", "keys.existingSecret=k", "--set", "batches.databaseSecret=d", "--set", "batches.existingClaim=c")


def run(*command: object) -> subprocess.CompletedProcess[str]:
    program = str(command[0])
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


def test_dockerfile_has_no_lint() -> None:
    done = run("hadolint", DEPLOY / "docker/Dockerfile")
    assert done.returncode == 0, done.stdout


def test_compose_file_follows_its_specification() -> None:
    done = run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "docker/compose.yaml")
    assert done.returncode == 0, done.stdout


def test_compose_mounts_existing_files_and_publishes_on_loopback_only() -> None:
    services = yaml.safe_load((DEPLOY / "docker/compose.yaml").read_text())["services"]
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (DEPLOY / "docker" / source).exists(), source


def test_compose_file_has_no_default_password_and_names_all_that_it_needs() -> None:
    text = (DEPLOY / "docker/compose.yaml").read_text()
    grafana = yaml.safe_load(text)["services"]["grafana"]
    assert grafana["environment"]["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")
    needed = set(re.findall(r"\$\{(\w+):\?", text))
    assert needed == set(re.findall(r'^#   echo "(\w+)=', text, re.MULTILINE))


def test_unit_is_valid_and_hardened(tmp_path: Path) -> None:
    # The program of the unit is not installed here.
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/skipjoin/bin/skipjoin", "/bin/true"))
    done = run("systemd-analyze", "verify", unit)
    assert (done.returncode, done.stderr) == (0, "")
    done = run("systemd-analyze", "security", "--offline=yes", "--threshold=20", unit)
    assert done.returncode == 0, done.stdout


def rendered(*values: str) -> dict[str, Any]:
    done = run("helm", "template", "llm", CHART, "--kube-version", "1.31.0", *values)
    assert done.returncode == 0, done.stderr
    return {document["kind"]: document for document in yaml.safe_load_all(done.stdout) if document}


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        (ONE_KEY, {"StatefulSet", "Service", "ConfigMap", "Secret", "PodDisruptionBudget"}),
        ((*SHARED, "--set", "autoscaling.kind=hpa"), {"HorizontalPodAutoscaler"}),
        ((*SHARED, "--set", "autoscaling.kind=keda"), {"ScaledObject"}),
        ((*ONE_KEY, "--set", "serviceMonitor.enabled=true"), {"ServiceMonitor"}),
        ((*ONE_KEY, "--set", "tls.existingSecret=t", "--set", "serviceMonitor.enabled=true"), {"ServiceMonitor"}),
    ],
    ids=["one replica", "hpa", "keda", "service monitor", "tls"],
)
def test_chart_renders(values: tuple[str, ...], kinds: set[str]) -> None:
    assert run("helm", "lint", CHART, *values).returncode == 0
    assert kinds <= set(rendered(*values))


@pytest.mark.parametrize(
    ("values", "scheme"),
    [((), "HTTP"), (("--set", "tls.existingSecret=t"), "HTTPS"), (("--set", "settings.ssl_certfile=/x"), "HTTPS")],
)
def test_probes_use_the_scheme_of_the_server(values: tuple[str, ...], scheme: str) -> None:
    container = rendered(*ONE_KEY, *values)["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]
    probes = [container[f"{name}Probe"]["httpGet"]["scheme"] for name in ("startup", "liveness", "readiness")]
    assert probes == [scheme] * 3


def test_pods_restart_when_keys_change() -> None:
    pods = [rendered("--set", f"keys.file={key}")["StatefulSet"]["spec"]["template"] for key in ("a", "b")]
    assert pods[0]["metadata"]["annotations"]["checksum/keys"] != pods[1]["metadata"]["annotations"]["checksum/keys"]


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ((), "keys.file or keys.existingSecret"),
        ((*ONE_KEY, "--set", "replicaCount=2"), "batches.databaseSecret"),
        ((*ONE_KEY, "--set", "settings.ssl-ca-certs=/x"), "probes have no certificate"),
    ],
)
def test_chart_refuses_values_that_cannot_work(values: tuple[str, ...], error: str) -> None:
    done = run("helm", "template", "llm", CHART, "--kube-version", "1.31.0", *values)
    assert done.returncode != 0
    assert error in done.stderr
