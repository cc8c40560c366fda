"""The balancer's rendered configuration, which HAProxy itself accepts, and its answers."""

import json
import re
from pathlib import Path

import pytest

from serving import haproxy, host
from serving.errors import StackError
from serving.rundir import Model
from serving.topology import DEFAULT_LIMITS, Limits, Timeouts, Topology, plan

MODEL = Model(name="digits", version="1", digest="d", graph_digest="g", archive=Path("/tmp/q/1/archives/digits.mar"))


def topology_in(run_dir: Path, *, limits: Limits = DEFAULT_LIMITS) -> Topology:
    return plan(run_dir=run_dir, port=8080, replicas=2, workers=3, limits=limits)


def test_haproxy_accepts_the_rendered_file_without_a_warning(tmp_path: Path) -> None:
    haproxy.write(topology_in(tmp_path), MODEL, binary=host.find_haproxy())
    assert (tmp_path / "haproxy.cfg").exists()


def test_file_that_haproxy_refuses_is_an_error_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(haproxy, "config", lambda topology, model: "frontend broken\n    bind nonsense\n")
    with pytest.raises(StackError, match=r"haproxy refuses .*haproxy\.cfg: .*nonsense"):
        haproxy.write(topology_in(tmp_path), MODEL, binary=host.find_haproxy())


def milliseconds(text: str, name: str) -> float:
    match = re.search(rf"timeout {name} +([\d.]+)(ms|s)\b", text)
    assert match is not None
    return float(match[1]) * (1 if match[2] == "ms" else 1000)


def test_rendered_timeouts_keep_the_chain_client_balancer_torchserve(tmp_path: Path) -> None:
    text = haproxy.config(topology_in(tmp_path), MODEL)
    response_ms = Timeouts().response_s * 1000
    assert milliseconds(text, "server") > response_ms
    assert milliseconds(text, "client") >= milliseconds(text, "server") + milliseconds(text, "queue")


def test_every_replica_is_a_server_with_a_bounded_share_and_a_check_of_its_workers(tmp_path: Path) -> None:
    topology = topology_in(tmp_path)
    text = haproxy.config(topology, MODEL)
    ordinary = re.findall(
        r"server (\S+) unix@(\S+) addr unix@(\S+) maxconn (\d+)", text.split("\nbackend replicas_large")[0]
    )
    assert ordinary == [
        ("replica-0", f"{tmp_path}/r0/inf.sock", f"{tmp_path}/r0/mgmt.sock", "32"),
        ("replica-1", f"{tmp_path}/r1/inf.sock", f"{tmp_path}/r1/mgmt.sock", "16"),
    ]
    assert "http-check send meth GET uri /models/digits" in text


def test_only_loopback_is_bound(tmp_path: Path) -> None:
    assert re.findall(r"^ +bind (.*)$", haproxy.config(topology_in(tmp_path), MODEL), re.M) == ["127.0.0.1:8080"]


@pytest.mark.parametrize("status", sorted(haproxy.ERRORS))
def test_every_answer_of_the_balancer_is_typed_json_with_its_true_length(status: int) -> None:
    head, body = haproxy.error_file(status).split("\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert "Content-Type: application/json" in head
    assert f"Content-Length: {len(body)}" in head
    assert set(json.loads(body)["error"]) == {"code", "message"}


@pytest.mark.parametrize("status", [429, 503])
def test_answers_that_pass_with_time_say_when_to_come_back(status: int) -> None:
    assert "Retry-After: 1" in haproxy.error_file(status)


def test_body_limit_is_the_one_of_the_description_and_stated_in_the_answer(tmp_path: Path) -> None:
    text = haproxy.config(topology_in(tmp_path, limits=Limits(body_bytes=1234)), MODEL)
    assert "req.body_size gt 1234" in text
    assert "larger than the limit of 1234 bytes" in text


def test_every_server_starts_as_down_until_a_check_has_passed(tmp_path: Path) -> None:
    rows = [line.split() for line in haproxy.server_state(topology_in(tmp_path)).splitlines()[2:]]
    assert [(row[1], row[3], row[5]) for row in rows] == [
        (backend, replica, "0") for backend in haproxy.BACKENDS for replica in ("replica-0", "replica-1")
    ]


def test_balancer_that_is_not_there_is_an_error_with_its_socket(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"haproxy does not answer at .*haproxy\.sock"):
        haproxy.servers(topology_in(tmp_path))
