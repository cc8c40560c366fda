"""A stack from start to stop through its command line, with real processes on loopback."""

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest

from serving import haproxy, host, rundir, stack, torchserve
from serving.archive import verify_archive
from serving.client import Client, Prediction, RequestFailed
from serving.errors import StackError, UserError
from serving.rundir import Stack
from serving.stack import Options
from serving.topology import MIB, Frozen
from tests.colour import colour_archive, png
from tests.stacks import free_port, jvm_of, private_run_dir, served, stub_archive

pytestmark = pytest.mark.e2e


class Served(NamedTuple):
    """A stack that the command line started, and what it printed."""

    port: int
    archive: Path
    image: Path
    printed: str
    stack: Stack


def serving(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serving", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)


@pytest.fixture(scope="module")
def colour(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("colour folder")  # a space: paths are quoted wherever they are written
    archive, image, port = colour_archive(folder), folder / "red square.png", free_port()
    image.write_bytes(png("red"))
    with private_run_dir():
        result = serving("start", "--mar", archive, "--port", port, "--workers", 2, "--image", image)
        assert result.returncode == 0, result.stderr
        running = stack.running(port)
        assert running is not None
        yield Served(port, archive, image, result.stdout, running)
        stack.stop(port)


def url(colour: Served, path: str = "/predictions/colour") -> str:
    return f"http://127.0.0.1:{colour.port}{path}"


def error_of(response: httpx.Response) -> str:
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()["error"]) == {"code", "message"}
    return str(response.json()["error"]["code"])


def test_start_returns_ready_and_prints_the_answer_the_address_the_digest_and_a_command(colour: Served) -> None:
    answer = json.loads(next(line for line in colour.printed.splitlines() if line.startswith("{")))
    assert answer["predictions"][0]["label"] == "red"
    assert f"at http://127.0.0.1:{colour.port}" in colour.printed
    assert verify_archive(colour.archive).graph_digest[:12] in colour.printed
    assert httpx.get(url(colour, "/readyz"), trust_env=False).json() == {"status": "ready", "replicas": 2, "of": 2}


def test_printed_command_gives_the_same_answer(colour: Served) -> None:
    line = next(line for line in colour.printed.splitlines() if line.startswith("try: "))
    if shutil.which("curl") is None:
        pytest.skip("no curl on this machine")
    result = subprocess.run([*shlex.split(line.removeprefix("try: ")), "-sS"], capture_output=True, check=True)
    assert json.loads(result.stdout)["predictions"][0]["label"] == "red"


@pytest.mark.parametrize("name", ["red", "green", "blue", "white", "black"])
def test_every_colour_gets_its_own_name(colour: Served, name: str) -> None:
    with Client(url(colour, ""), model="colour") as client:
        answer = client.predict(png(name), top_k=1)
    assert [candidate.label for candidate in answer.predictions] == [name]
    assert answer.digest == verify_archive(colour.archive).graph_digest


def test_top_k_of_the_query_reaches_the_handler(colour: Served) -> None:
    response = httpx.post(url(colour), params={"top_k": 3}, content=png("red"), trust_env=False)
    assert len(response.json()["predictions"]) == 3


@pytest.mark.parametrize("kind", [None, "image/jpeg", "application/x-www-form-urlencoded", "application/json"])
def test_declared_type_does_not_matter(colour: Served, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    for method in ("POST", "PUT"):
        response = httpx.request(method, url(colour), content=png("blue"), headers=headers, trust_env=False)
        assert (response.status_code, response.json()["predictions"][0]["label"]) == (200, "blue")


def test_values_in_force_are_those_of_the_description(colour: Served) -> None:
    topology = colour.stack.topology
    for replica in topology.replicas:
        description = torchserve.describe(replica, "colour", timeout_s=5)
        assert description is not None
        expected = torchserve.effective_values(topology, replica)
        assert {name: description[name] for name in expected} == expected
        assert description["maxBatchDelay"] == 0


def test_status_shows_every_replica_for_programs_and_for_people(colour: Served) -> None:
    shown = json.loads(serving("status", "--port", colour.port, "--json").stdout)
    assert (shown["state"], shown["model"], shown["version"]) == ("ready", "colour", "1.0")
    assert shown["digest"] == verify_archive(colour.archive).graph_digest
    for replica in shown["replicas"]:
        assert (replica["state"], replica["balancer"], replica["restarts"], replica["error"]) == ("ready", "UP", 0, "")
        assert replica["rss_mib"] > 50
        assert replica["pid"] > 0
    table = serving("status", "--port", colour.port).stdout
    assert re.search(r"replica-1 +│ ready +│ 1/1 +│ UP", table)


def test_starting_the_same_archive_again_says_so_and_does_nothing(colour: Served) -> None:
    before = {process.pid for process in host.marked(colour.stack.topology.run_dir)}
    result = serving("start", "--mar", colour.archive, "--port", colour.port)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("already running: colour 1.0")
    assert {process.pid for process in host.marked(colour.stack.topology.run_dir)} == before


def test_starting_with_another_number_of_replicas_changes_nothing_and_says_how_to(colour: Served) -> None:
    result = serving("start", "--mar", colour.archive, "--port", colour.port, "--replicas", 3)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"serving start: port {colour.port} already serves with 2 replicas, not 3; change it with: "
        f"make stop serve PORT={colour.port} REPLICAS=3\n"
    )
    assert httpx.get(url(colour, "/readyz"), trust_env=False).json()["of"] == 2


def test_starting_another_archive_on_the_port_is_one_line(colour: Served, tmp_path: Path) -> None:
    other = colour_archive(tmp_path, version="2.0")
    result = serving("start", "--mar", other, "--port", colour.port)
    assert result.returncode == 2
    assert re.fullmatch(
        rf"serving start: port {colour.port} already serves another archive .*stop it.*\n", result.stderr
    )


def test_prediction_and_logs_from_the_command_line(colour: Served) -> None:
    result = serving("predict", "--port", colour.port, "--image", colour.image, "--top-k", 2)
    assert [p["label"] for p in json.loads(result.stdout)["predictions"]][:1] == ["red"]
    assert "==> logs/supervisord.log <==" in serving("logs", "--port", colour.port).stdout


def test_body_at_the_limit_passes_and_one_byte_more_is_413_stating_the_limit(colour: Served) -> None:
    image = png("red")
    for extra, statuses in ((0, {200, 400}), (1, {413})):
        body = image + b"\0" * (10 * MIB - len(image) + extra)
        for content in (body, iter([body[:100], body[100:]])):  # with a length, and chunked
            response = httpx.post(url(colour), content=content, timeout=30, trust_env=False)
            assert response.status_code in statuses
            if response.status_code == 413:
                assert error_of(response) == "body_too_large"
                assert str(10 * MIB) in response.text


def test_client_that_sends_everything_before_it_reads_still_sees_the_413(colour: Served) -> None:
    request = urllib.request.Request(url(colour), data=b"\0" * (12 * MIB))
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30)
    with caught.value:
        assert caught.value.code == 413
        assert json.loads(caught.value.read())["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/predictions/other", 404, "not_found"),
        ("POST", "/predictions/colour/1.0", 404, "not_found"),
        ("POST", "/models", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("GET", "/predictions/colour", 405, "method_not_allowed"),
        ("DELETE", "/predictions/colour", 405, "method_not_allowed"),
        ("POST", "/readyz", 405, "method_not_allowed"),
    ],
)
def test_only_the_documented_paths_and_methods_exist(
    colour: Served, method: str, path: str, status: int, code: str
) -> None:
    response = httpx.request(method, url(colour, path), trust_env=False)
    assert (response.status_code, error_of(response)) == (status, code)


def raw_exchange(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(request)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def test_garbage_instead_of_http_is_400_and_repeats_nothing_of_it(colour: Served) -> None:
    # HAProxy answers what it cannot parse with a page of its own, whatever its configuration says.
    answer = raw_exchange(colour.port, b"EHLO example.org\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"EHLO" not in answer


def test_client_that_asks_before_it_sends_is_told_to_go_on(colour: Served) -> None:
    image = png("green")
    with socket.create_connection(("127.0.0.1", colour.port), timeout=10) as connection:
        head = f"POST /predictions/colour HTTP/1.1\r\nHost: x\r\nContent-Length: {len(image)}\r\n"
        connection.sendall(f"{head}Expect: 100-continue\r\nConnection: close\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(image)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert b" 200 OK" in answer
    assert b'"label":"green"' in answer


def test_only_the_balancer_listens_beyond_loopback_sockets_of_the_jvms(colour: Served) -> None:
    listening = {
        (process.name(), connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for process in host.marked(colour.stack.topology.run_dir)
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {ip for _, ip, _ in listening} == {"127.0.0.1"}
    assert {(name, port) for name, _, port in listening if name != "java"} == {("haproxy", colour.port)}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_stop_answers_what_is_in_flight_and_leaves_no_process_socket_or_port(tmp_path: Path) -> None:
    with served(stub_archive(tmp_path), Options(replicas=1, workers=1)) as running, ThreadPoolExecutor(8) as pool:
        topology = running.topology
        with Client(topology.url, model="stub") as client:
            time.sleep(2.5)  # the balancer lets a replica that just came up have its full share only by and by
            answers = [pool.submit(client.post, b"sleep 1") for _ in range(8)]
            wait_until(lambda: haproxy.servers(topology)["replica-0"].current == 8)
            assert stack.stop(topology.port)
            assert [future.result()["length"] for future in answers] == [7] * 8
        assert host.marked(topology.run_dir) == []
        assert [path for path in topology.run_dir.rglob("*") if path.is_socket()] == []
        assert [path.name for path in topology.run_dir.iterdir()] == ["logs"]
        host.require_free_port(topology.port)
        assert not stack.stop(topology.port)  # once more is no error
        assert rundir.read_stack(topology.run_dir) is None


def next_answer(client: Client) -> Prediction:
    """Return the first answer of a replica that is on its way."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return client.predict(png("red"))
        except RequestFailed:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_next_archive_of_the_same_name_and_path_is_served_after_a_stop_and_not_before(tmp_path: Path) -> None:
    """A build that overwrites the file under a running stack changes no answer, not even of a replica that restarts."""
    old = verify_archive(colour_archive(tmp_path, version="1.0"))
    with private_run_dir():
        port, options = free_port(), Options(replicas=1, workers=1)
        stack.start(old, port=port, options=options, say=lambda line: None)
        new = verify_archive(colour_archive(tmp_path, version="2.0"))
        assert new.path == old.path
        with pytest.raises(UserError, match="already serves another archive"):
            stack.start(new, port=port, options=options, say=lambda line: None)
        versions = []
        with Client(f"http://127.0.0.1:{port}", model="colour") as client:
            running = stack.running(port)
            assert running is not None
            jvm_of(running, 0).kill()
            versions.append(next_answer(client).version)
            assert stack.stop(port)
            stack.start(new, port=port, options=options, say=lambda line: None)
            versions.append(client.predict(png("red")).version)
        assert versions == ["1.0", "2.0"]
        assert stack.stop(port)


def test_stack_that_another_version_started_is_named_by_status_and_ended_by_stop(tmp_path: Path) -> None:
    with served(stub_archive(tmp_path), Options(replicas=1, workers=1)) as running:
        topology = running.topology
        described = json.loads((topology.run_dir / "stack.json").read_text())
        (topology.run_dir / "stack.json").write_text(json.dumps(described | {"colour": "red"}))
        shown = serving("status", "--port", topology.port)
        assert (shown.returncode, len(shown.stderr.splitlines())) == (1, 1)
        assert "of another version of this program (colour: " in shown.stderr
        stopped = serving("stop", "--port", topology.port)
        assert (stopped.returncode, stopped.stdout, stopped.stderr) == (0, "stopped\n", "")
        assert host.marked(topology.run_dir) == []
        assert [path.name for path in topology.run_dir.iterdir()] == ["logs"]


def test_launcher_that_cannot_read_the_description_ends_the_start_at_once_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def describe_in_another_way(path: Path, value: Frozen) -> None:
        path.write_text(value.model_dump_json().replace('"java_major"', '"java_minor"'))

    with private_run_dir():
        port, begin = free_port(), time.monotonic()
        monkeypatch.setattr(rundir, "write", describe_in_another_way)
        with pytest.raises(StackError, match=r"replica-0 did not start: .*stack\.json is of another version"):
            stack.start(stub_archive(tmp_path), port=port, options=Options(replicas=1, workers=1), say=print)
        assert time.monotonic() - begin < 30
        assert host.marked(rundir.run_dir_of(port)) == []
