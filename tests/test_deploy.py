"""The files in deploy/: they parse, agree with the options of `regard serve`, and nginx passes streams on at once."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="install it with  pip install 'regard[serve]'")

from explorer import make_decoder
from regard.commands import Parser
from regard.commands import serve as command
from regard.serve.guard import Guard, Keys
from serving import Server, serving

FOLDER = Path(__file__).parent.parent / "deploy"


def parsed(arguments: list[str]) -> Any:
    """The options of a command line, which must all exist."""
    return Parser("regard serve", command.__doc__ or "", command.ARGUMENTS).parse_all(arguments)


def test_kubernetes() -> None:
    yaml = pytest.importorskip("yaml")
    documents = {one["kind"]: one for one in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())}
    assert documents.keys() == {"Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget"}
    deployment = documents["Deployment"]
    labels, pod = deployment["spec"]["template"]["metadata"]["labels"], deployment["spec"]["template"]["spec"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert documents["Service"]["spec"]["selector"].items() <= labels.items()
    assert documents["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert documents["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    (container,) = pod["containers"]
    options = parsed(container["args"])
    sleep = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > sleep + options.timeout
    assert container["readinessProbe"]["httpGet"]["path"] == container["startupProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    names = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert names == {"http": options.port} and documents["Service"]["spec"]["ports"][0]["targetPort"] == "http"
    variables = {one["name"] for one in container["env"]}
    assert "REGARD_API_KEYS" in variables and not any(
        "value" in one for one in container["env"] if "KEY" in one["name"]
    )
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert f"--uid {pod['securityContext']['runAsUser']}" in (FOLDER / "Dockerfile").read_text()


def test_docker() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.MULTILINE).group(1))  # type: ignore[union-attr]
    assert entry[:2] == ["regard", "serve"] and parsed([*entry[2:], "run"]).host == "0.0.0.0"
    assert f"EXPOSE {parsed(['run']).port}" in text
    assert text.index("\nUSER 10001") < text.index("\nENTRYPOINT")


def test_systemd() -> None:
    text = (FOLDER / "regard-serve.service").read_text()
    values = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    program, name, *arguments = shlex.split(values["ExecStart"])
    options = parsed(arguments)
    assert program.endswith("/regard") and name == "serve" and options.trust_proxy
    assert int(values["TimeoutStopSec"]) > options.timeout + 5, "longer than the supervisor waits"
    if shutil.which("systemd-analyze"):
        done = subprocess.run(
            ["systemd-analyze", "verify", FOLDER / "regard-serve.service"], capture_output=True, text=True
        )
        assert "Unknown" not in done.stderr


def test_nginx_agrees_with_the_server() -> None:
    text = (FOLDER / "nginx.conf").read_text()
    assert "proxy_buffering off;" in text and text.count("{") == text.count("}")
    waits, size = re.search(r"proxy_read_timeout (\d+)s", text), re.search(r"client_max_body_size (\d+)m", text)
    assert waits is not None and int(waits.group(1)) > parsed(["run"]).timeout
    assert size is not None and int(size.group(1)) * 2**20 >= parsed(["run"]).body_limit


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[tuple[Server, int]]:
    """A server behind nginx, and the port of nginx."""
    program = shutil.which("nginx") or pytest.skip("nginx is not installed")
    with serving({"lm": make_decoder(tmp_path / "lm")}, guard=Guard(Keys(), rate=4, proxy=True)) as server:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        text = (FOLDER / "nginx.conf").read_text().replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
        text = text.replace("listen 80;", f"listen 127.0.0.1:{port};")
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        folders = "".join(f"{kind}_temp_path {tmp_path}/{kind};" for kind in kinds)
        (tmp_path / "nginx.conf").write_text(text.replace("http {", f"http {{ access_log off; {folders}"))
        options = f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/log;"
        with subprocess.Popen([program, "-c", tmp_path / "nginx.conf", "-g", options], stderr=subprocess.PIPE) as nginx:
            try:
                for _ in range(100):
                    with socket.socket() as probe:
                        if probe.connect_ex(("127.0.0.1", port)) == 0:
                            break
                    time.sleep(0.05)
                yield server, port
            finally:
                nginx.terminate()


def test_streams_through_nginx(proxied: tuple[Server, int]) -> None:
    server, port = proxied
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = {"model": "lm", "prompt": "a", "max_tokens": 400, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200 and response.readline().strip()
    assert server.service.admission.tokens, "the first token is here before the last is computed"
    assert response.read().endswith(b"data: [DONE]\n\n")
    outside = Server(server.service, port)
    assert outside.get("/metrics")[0] == outside.get("/admin/reload")[0] == 403 and outside.get("/ready")[0] == 200
    statuses = [outside.get("/v1/models", **{"X-Forwarded-For": f"9.9.9.{at}"})[0] for at in range(4)]
    assert 429 in statuses, "the client cannot choose its address"
