"""The balancer: its configuration, its JSON answers, and its runtime socket."""

import csv
import json
import shlex
import socket
import subprocess
from pathlib import Path
from typing import NamedTuple

from serving.errors import StackError
from serving.rundir import Model
from serving.topology import Topology
from serving.torchserve import render

BUFSIZE_BYTES = 131072
# What HAProxy answers by itself, and what the client should know about it.
ERRORS = {
    400: "the request is not valid HTTP or its headers are too large",
    401: "a token is needed",
    403: "forbidden",
    404: "not found",
    405: "method not allowed",
    408: "the request did not arrive in time",
    413: "the body is too large",
    429: "too many requests",
    500: "internal error of the balancer",
    502: "the replica ended while it answered; sending the request again is safe",
    503: "no replica can take the request now; try again later",
    504: "the replica did not answer in time",
}
REASONS = {
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Payload Too Large",
    429: "Too Many Requests",
    500: "Internal Server Error",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}


class Server(NamedTuple):
    """One replica as the balancer sees it; counts since the balancer started."""

    name: str
    status: str
    requests: int
    current: int
    queued: int
    errors: int
    check: str


def error_body(message: str) -> str:
    """Return the one JSON shape of every error of the endpoint."""
    return json.dumps({"error": message})


def error_file(status: int) -> str:
    """Return the complete HTTP answer for an error that HAProxy raises."""
    body = error_body(ERRORS[status])
    retry = "Retry-After: 1\r\n" if status in (429, 503) else ""
    return (
        f"HTTP/1.1 {status} {REASONS[status]}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nCache-Control: no-store\r\n{retry}\r\n{body}"
    )


def config(topology: Topology, model: Model) -> str:
    """Return haproxy.cfg."""

    def text(message: str) -> str:
        return shlex.quote(error_body(message))

    limit = f"{topology.limits.body_bytes} bytes"
    return render(
        "haproxy.cfg.j2",
        topology=topology,
        limits=topology.limits,
        timeouts=topology.timeouts,
        model=model.name,
        bufsize=BUFSIZE_BYTES,
        error_statuses=sorted(ERRORS),
        ms=lambda seconds: f"{round(seconds * 1000)}ms",
        unknown_path=text(f"not found; there are /predictions/{model.name}, /healthz and /readyz"),
        only_get=text("this path answers GET and HEAD"),
        only_post=text("send the image with POST or PUT"),
        not_ready=text("no replica is ready"),
        too_large=text(f"the body is larger than the limit of {limit}"),
        overloaded=text("overloaded; try again later"),
        worker_died=text("the worker ended while it answered; sending the request again is safe"),
    )


def server_state(topology: Topology) -> str:
    """Return a state file that starts every server as down: a replica is up only once a check has passed."""
    header = (
        "1\n# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_iweight "
        "srv_time_since_last_change srv_check_status srv_check_result srv_check_health srv_check_state "
        "srv_agent_state bk_f_forced_id srv_f_forced_id srv_fqdn srv_port srvrecord srv_use_ssl srv_check_port "
        "srv_check_addr srv_agent_addr srv_agent_port\n"
    )
    rows = (
        f"3 replicas {index} {replica.name} - 0 0 100 100 0 1 0 0 6 0 0 0 - 0 - 0 0 - - 0\n"
        for index, replica in enumerate(topology.replicas, start=1)
    )
    return header + "".join(rows)


def write(topology: Topology, model: Model, *, binary: Path) -> None:
    """Render everything HAProxy reads into the run directory and let HAProxy itself check it.

    Raises StackError with HAProxy's words when it refuses the file.
    """
    folder = topology.run_dir / "errors"
    folder.mkdir(mode=0o700, exist_ok=True)
    for status in ERRORS:
        (folder / f"{status}.http").write_text(error_file(status), newline="")
    (topology.run_dir / "server-state").write_text(server_state(topology))
    path = topology.run_dir / "haproxy.cfg"
    path.write_text(config(topology, model))
    result = subprocess.run([binary, "-c", "-q", "-f", path], capture_output=True, text=True, check=False)
    if result.returncode != 0 or result.stderr.strip():
        raise StackError(f"haproxy refuses {path}: {result.stderr.strip()}")


def command(topology: Topology, line: str, *, timeout_s: float = 5) -> str:
    """Send one line to the runtime socket and return the answer; raises StackError when nobody answers."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(topology.haproxy_socket))
            connection.sendall(f"{line}\n".encode())
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
    except OSError as error:
        raise StackError(f"haproxy does not answer at {topology.haproxy_socket}: {error}") from error
    return b"".join(parts).decode()


def servers(topology: Topology) -> dict[str, Server]:
    """Return the state of every replica by name."""
    lines = command(topology, "show stat replicas 4 -1").lstrip("# ").splitlines()
    return {
        row["svname"]: Server(
            name=row["svname"],
            status=row["status"],
            requests=int(row["stot"] or 0),
            current=int(row["scur"] or 0),
            queued=int(row["qcur"] or 0),
            errors=int(row["econ"] or 0) + int(row["eresp"] or 0),
            check=row["check_status"],
        )
        for row in csv.DictReader(lines)
    }


def set_state(topology: Topology, name: str, state: str) -> None:
    """Set replica `name` to `ready`, `drain` or `maint`; raises StackError when the balancer refuses."""
    answer = command(topology, f"set server replicas/{name} state {state}").strip()
    if answer:
        raise StackError(f"haproxy refused state {state} for {name}: {answer}")
