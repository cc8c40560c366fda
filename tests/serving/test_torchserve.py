"""TorchServe's rendered configuration, command line and last errors."""

import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from serving import torchserve
from serving.rundir import Model
from serving.topology import Topology, plan

MODEL = Model(name="digits", version="1", digest="d", graph_digest="g", archive=Path("/tmp/q/1/archives/digits.mar"))


def topology() -> Topology:
    return plan(run_dir=Path("/tmp/q/1"), port=8080, replicas=2, workers=3)


def properties(index: int) -> dict[str, str]:
    text = torchserve.config_properties(topology(), topology().replicas[index])
    return dict(line.split("=", 1) for line in text.splitlines() if line and not line.startswith("#"))


def test_http_lives_on_unix_sockets_and_grpc_on_loopback() -> None:
    values = properties(1)
    assert [values[f"{name}_address"] for name in ("inference", "management", "metrics")] == [
        "unix:/tmp/q/1/r1/inf.sock",
        "unix:/tmp/q/1/r1/mgmt.sock",
        "unix:/tmp/q/1/r1/met.sock",
    ]
    assert values["grpc_inference_address"] == values["grpc_management_address"] == "127.0.0.1"


def test_archives_come_from_the_replicas_own_store_only() -> None:
    pattern = properties(0)["allowed_urls"]
    assert re.fullmatch(pattern, "file:///tmp/q/1/r0/store/digits.mar")
    assert not re.fullmatch(pattern, "file:///etc/passwd")
    assert not re.fullmatch(pattern, "https://example.org/digits.mar")


def test_dots_in_the_run_directory_stand_for_themselves() -> None:
    dotted = plan(run_dir=Path("/tmp/q.1/1"), port=8080, replicas=1, workers=1)
    text = torchserve.config_properties(dotted, dotted.replicas[0])
    pattern = next(line for line in text.splitlines() if line.startswith("allowed_urls=")).split("=", 1)[1]
    assert re.fullmatch(pattern, "file:///tmp/q.1/1/r0/store/digits.mar")
    assert not re.fullmatch(pattern, "file:///tmp/qx1/1/r0/store/digits.mar")


def test_body_limit_equals_the_balancers() -> None:
    assert properties(0)["max_request_size"] == str(topology().limits.body_bytes)


def test_queue_holds_all_that_the_balancer_lets_in() -> None:
    replica = topology().replicas[0]
    allowed = topology().server_maxconn(replica) + topology().server_maxconn_large(replica)
    assert int(properties(0)["job_queue_size"]) >= allowed


def test_registration_asks_for_exactly_what_is_checked_afterwards() -> None:
    replica = topology().replicas[0]
    asked = torchserve.registration(topology(), replica, MODEL)
    checked = torchserve.effective_values(topology(), replica)
    assert (asked["batch_size"], asked["max_batch_delay"]) == (checked["batchSize"], checked["maxBatchDelay"])
    assert checked["maxBatchDelay"] == 0
    assert asked["initial_workers"] == checked["minWorkers"] == checked["maxWorkers"] == 2


@pytest.mark.parametrize(("major", "flags"), [(17, 0), (22, 1), (25, 2)])
def test_java_gets_only_the_flags_that_it_knows(major: int, flags: int) -> None:
    command = torchserve.java_command(Path("java"), topology().replicas[0], java_major=major)
    assert sum("native-access" in word or "unsafe-memory" in word for word in command) == flags


def test_old_snapshots_cannot_win_over_the_configuration() -> None:
    assert "-ncs" in torchserve.java_command(Path("java"), topology().replicas[0], java_major=25)


@pytest.mark.parametrize(
    ("description", "ready"),
    [
        (None, False),
        ({}, False),
        ({"workers": []}, False),
        ({"workers": [{"status": "UNLOADING"}]}, False),
        ({"workers": [{"status": "UNLOADING"}, {"status": "READY"}]}, True),
    ],
)
def test_ready_means_a_worker_that_has_loaded_the_model(description: dict[str, object] | None, ready: bool) -> None:
    assert torchserve.is_ready(description) is ready


def test_last_error_is_the_exception_not_what_followed_it(tmp_path: Path) -> None:
    replica = plan(run_dir=tmp_path, port=1, replicas=1, workers=1).replicas[0]
    replica.logs.mkdir(parents=True)
    (replica.logs / "model.log").write_text(
        "2026-01-01T00:00:00,000 INFO  Traceback (most recent call last):\n"
        "2026-01-01T00:00:00,000 INFO  quartet_worker.model.PackageError: labels.json has changed\n"
        "2026-01-01T00:00:00,000 INFO  Backend worker process died.\n"
    )
    assert torchserve.last_error(replica) == "quartet_worker.model.PackageError: labels.json has changed"


def test_remark_of_torchserve_is_no_error(tmp_path: Path) -> None:
    replica = plan(run_dir=tmp_path, port=1, replicas=1, workers=1).replicas[0]
    replica.logs.mkdir(parents=True)
    (replica.logs / "ts.log").write_text("2026-01-01T00:00:00,000 WARN  ModelArchive - createdOn is not defined\n")
    assert torchserve.last_error(replica) == ""
    (replica.logs / "ts.log").write_text("Could not reserve enough space for the object heap\n")
    assert torchserve.last_error(replica) == "Could not reserve enough space for the object heap"


def test_replica_without_logs_has_no_error(tmp_path: Path) -> None:
    replica = plan(run_dir=tmp_path, port=1, replicas=1, workers=1).replicas[0]
    assert torchserve.last_error(replica) == torchserve.launcher_error(replica) == ""


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("Traceback (most recent call last):\n  File x\nValueError: a\nb\n", "ValueError: a"),
        ("serving replica: no stack in /tmp/q/1\n", "no stack in /tmp/q/1"),
        ("replica-0: the JVM ended with status 1\nWARNING: something of Java\n", "the JVM ended with status 1"),
        ("WARNING: something of Java\n", ""),
    ],
)
def test_launchers_last_word_is_its_error_not_what_java_prints(tmp_path: Path, log: str, error: str) -> None:
    replica = plan(run_dir=tmp_path, port=1, replicas=1, workers=1).replicas[0]
    replica.launcher_log.parent.mkdir()
    replica.launcher_log.write_text(log)
    assert torchserve.launcher_error(replica) == error


def test_template_with_an_unknown_name_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        torchserve.render("log4j2.xml.j2")
