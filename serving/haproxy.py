"""The balancer: its configuration, its JSON answers, and its runtime socket."""

import csv
import json
import shlex
import socket
import subprocess
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from serving.errors import StackError
from serving.openapi import document
from serving.rundir import Model
from serving.topology import Topology
from serving.torchserve import render

BUFSIZE_BYTES = 131072
RESEND_BYTES = BUFSIZE_BYTES - 16384  # largest body that certainly fits the buffer beside its headers
BACKENDS = ("replicas", "replicas_large")
# What HAProxy answers by itself: status -> code for programs, message for people.
ERRORS = {
    400: ("bad_request", "the request is not valid HTTP or its headers are too large"),
    401: ("unauthorized", "a token is needed"),
    403: ("forbidden", "this is not allowed"),
    404: ("not_found", "there is nothing at this path"),
    405: ("method_not_allowed", "this path does not take this method"),
    408: ("too_slow", "the request did not arrive in time"),
    413: ("body_too_large", "the body is too large"),
    429: ("too_many_requests", "too many requests; try again later"),
    500: ("internal_error", "the request could not be answered; the fault is ours"),
    502: ("replica_lost", "the replica ended while it answered; sending the request again is safe"),
    503: ("unavailable", "no replica can take the request now; try again later"),
    504: ("timeout", "the replica did not answer in time"),
}


class Server(NamedTuple):
    """One replica as the balancer sees it; counts since the balancer started."""

    name: str
    status: str
    requests: int
    current: int


def error_body(code: str, message: str) -> str:
    """Return the JSON shape of every error of the endpoint; the handler in the archive answers the same."""
    return json.dumps({"error": {"code": code, "message": message}}, separators=(",", ":"))


def error_file(status: int) -> str:
    """Return the complete HTTP answer for an error that HAProxy raises."""
    body = error_body(*ERRORS[status])
    retry = "Retry-After: 1\r\n" if status in (429, 503) else ""
    return (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nCache-Control: no-store\r\n{retry}\r\n{body}"
    )


class Answer(NamedTuple):
    """One of the balancer's own answers, quoted for its configuration, in both shapes of an error."""

    status: int
    body: str
    infer: str  # on the paths of the Open Inference Protocol, which wants {"error": message}


def answer(status: int, message: str, *, code: str = "") -> Answer:
    """Return the answer with the status's own code, or with another one."""
    body, infer = error_body(code or ERRORS[status][0], message), json.dumps({"error": message})
    return Answer(status, shlex.quote(body), shlex.quote(infer))


def too_large_message(topology: Topology) -> str:
    """Return what the 413 says: it states the limit."""
    return f"the body is larger than the limit of {topology.limits.body_bytes} bytes"


def v2_bases(model: Model) -> tuple[str, str]:
    """Return the two paths of the model in the Open Inference Protocol: without its version and with it."""
    return f"/v2/models/{model.name}", f"/v2/models/{model.name}/versions/{model.version}"


def v2_metadata(model: Model) -> dict[str, object]:
    """Return what the Open Inference Protocol tells about the model; -1 stands for any number of images."""
    return {
        "name": model.name,
        "versions": [model.version],
        "platform": "onnxruntime_onnx",
        "inputs": [
            {"name": "images", "datatype": "UINT8", "shape": [-1, *model.image_shape]},
            {"name": "image", "datatype": "BYTES", "shape": [-1]},
        ],
        "outputs": [
            {"name": "probabilities", "datatype": "FP32", "shape": [-1, model.classes]},
            {"name": "label", "datatype": "BYTES", "shape": [-1]},
        ],
    }


def config(topology: Topology, model: Model) -> str:
    """Return haproxy.cfg."""
    server = {"name": "quartet", "version": version("quartet"), "extensions": ["binary_tensor_data", "classification"]}
    return render(
        "haproxy.cfg.j2",
        topology=topology,
        limits=topology.limits,
        timeouts=topology.timeouts,
        model=model.name,
        bufsize=BUFSIZE_BYTES,
        resend_bytes=RESEND_BYTES,
        error_statuses=sorted(ERRORS),
        ms=lambda seconds: f"{round(seconds * 1000)}ms",
        v2_models=v2_bases(model),
        v2_server=shlex.quote(json.dumps(server)),
        v2_model=shlex.quote(json.dumps(v2_metadata(model))),
        unknown_path=answer(
            404, f"not found; there are /predictions/{model.name}, /healthz, /readyz, /v2 and /openapi.json"
        ),
        only_get=answer(405, "this path answers GET and HEAD"),
        only_post=answer(405, "send the image with POST"),
        not_ready=answer(503, "no replica is ready; try again later", code="not_ready"),
        too_large=answer(413, too_large_message(topology)),
        overloaded=answer(503, "there is no room for this request now; try again later", code="overloaded"),
        worker_lost=answer(
            503, "the worker died or took too long; sending the request again is safe", code="worker_lost"
        ),
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
        f"{number} {backend} {index} {replica.name} - 0 0 100 100 0 1 0 0 6 0 0 0 - 0 - 0 0 - - 0\n"
        for number, backend in enumerate(BACKENDS, start=3)
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
    message = too_large_message(topology)
    refusal = render(
        "refuse.lua.j2",
        body_bytes=topology.limits.body_bytes,
        too_large=error_body(ERRORS[413][0], message),
        too_large_infer=json.dumps({"error": message}),
    )
    (topology.run_dir / "refuse.lua").write_text(refusal)
    (topology.run_dir / "openapi.json").write_text(json.dumps(document(model, topology.limits), separators=(",", ":")))
    path = topology.run_dir / "haproxy.cfg"
    path.write_text(config(topology, model))
    result = subprocess.run([binary, "-c", "-f", path], capture_output=True, text=True, check=False)
    # That servers start as down is our own wish.
    lines = (line for line in result.stderr.splitlines() if "changed from server-state" not in line)
    complaints = [line for line in lines if "[ALERT]" in line or "[WARNING]" in line]
    if result.returncode != 0 or complaints:
        raise StackError(f"haproxy refuses {path}: {' '.join(complaints) or result.stderr.strip()}")


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
    """Return the state of every replica by name: both backends added up, the state that of the ordinary one."""
    found: dict[str, Server] = {}
    for backend in reversed(BACKENDS):
        for row in csv.DictReader(command(topology, f"show stat {backend} 4 -1").lstrip("# ").splitlines()):
            known = found.get(row["svname"])
            found[row["svname"]] = Server(
                name=row["svname"],
                status=row["status"],
                requests=int(row["stot"] or 0) + (known.requests if known else 0),
                current=int(row["scur"] or 0) + (known.current if known else 0),
            )
    return found


def release(topology: Topology, name: str) -> None:
    """End the exchanges that replica `name` holds: those that can be sent again are, the others get a 5xx at once."""
    for backend in BACKENDS:
        command(topology, f"shutdown sessions server {backend}/{name}")
