"""TorchServe as one replica runs it: the rendered configuration, the JVM's command line, the management API."""

import http.client
import re
import subprocess
import sys
import time
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from serving import unixhttp
from serving.errors import StackError
from serving.logs import tail
from serving.rundir import Model
from serving.topology import Replica, Topology

# TorchServe 0.12 reaches into the JVM in ways that newer Java versions announce on every start.
JAVA_FLAGS = (
    "-Xms64m",
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:+ExitOnOutOfMemoryError",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
)
# What stands at the beginning of the last line of a Python traceback, or after the time stamp in TorchServe's logs.
REMARK = re.compile(r"^\S+ (?:DEBUG|INFO|WARN) ")  # TorchServe warns of what is as it should be
ERROR_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b")

LOG_LINES = 500  # how far back an error is looked for


def render(template: str, **values: object) -> str:
    """Return the text of templates/`template`; an unknown name is an error."""
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    source = (files("serving") / "templates" / template).read_text()
    return environment.from_string(source).render(**values)


def config_properties(topology: Topology, replica: Replica) -> str:
    """Return config.properties for `replica`."""
    return render(
        "config.properties.j2",
        replica=replica,
        body_bytes=topology.limits.body_bytes,
        job_queue_size=2 * topology.server_maxconn(replica),
        response_s=topology.timeouts.response_s,
        startup_s=topology.timeouts.startup_s,
        # TorchServe takes it for a pattern; brackets, because a backslash means something in a properties file.
        store_pattern=str(replica.store).replace(".", "[.]"),
    )


def java_command(java: Path, replica: Replica, *, java_major: int) -> list[str]:
    """Return the command line that runs `replica`, without TorchServe's own launcher."""
    quiet = ["--enable-native-access=ALL-UNNAMED"] if java_major >= 22 else []
    quiet += ["--sun-misc-unsafe-memory-access=allow"] if java_major >= 23 else []
    flags = [*JAVA_FLAGS, *quiet, f"-Dlog4j.configurationFile=file://{replica.directory}/log4j2.xml"]
    configuration = replica.directory / "config.properties"
    return model_server(java, *flags, temp=replica.temp, configuration=configuration, store=replica.store)


def model_server(java: Path, *flags: str, temp: Path, configuration: Path, store: Path) -> list[str]:
    """Return the command line that `torchserve --start --foreground` would run, with `flags` for the JVM."""
    spec = find_spec("ts")
    assert spec is not None, "torchserve is a dependency"
    assert spec.origin is not None, "torchserve is a regular package"
    home = Path(spec.origin).parent.parent
    command = [str(java), *flags, f"-Dmodel_server_home={home}", f"-Djava.io.tmpdir={temp}"]
    command += ["-cp", f"{home}/ts/frontend/*", "org.pytorch.serve.ModelServer"]
    return [*command, "--python", sys.executable, "-f", str(configuration), "-s", str(store), "-ncs"]


def registration(topology: Topology, replica: Replica, model: Model) -> dict[str, object]:
    """Return the query of the registration. Only this call can set a batch delay of 0: a file turns 0 into 100 ms."""
    return {
        "url": model.archive.name,
        "model_name": model.name,
        "batch_size": topology.limits.batch_size,
        "max_batch_delay": 0,
        "initial_workers": replica.workers,
        "response_timeout": topology.timeouts.response_s,
        "startup_timeout": topology.timeouts.startup_s,
        "synchronous": "true",
    }


def effective_values(topology: Topology, replica: Replica) -> dict[str, int]:
    """Return what the management API must report back after `registration`."""
    return {
        "batchSize": topology.limits.batch_size,
        "maxBatchDelay": 0,
        "minWorkers": replica.workers,
        "maxWorkers": replica.workers,
        "responseTimeout": topology.timeouts.response_s,
        "startupTimeout": topology.timeouts.startup_s,
    }


def describe(replica: Replica, model: str, *, timeout_s: float) -> dict[str, Any] | None:
    """Return what the management API says about `model`, or None when it does not answer or does not know it."""
    try:
        reply = unixhttp.call(replica.management_socket, "GET", f"/models/{model}", timeout_s=timeout_s)
    except (OSError, http.client.HTTPException):
        return None
    return reply.body[0] if reply.status == 200 and reply.body else None


def is_ready(description: dict[str, Any] | None) -> bool:
    """Tell whether at least one worker has loaded the model and answered its golden images."""
    return any(worker["status"] == "READY" for worker in (description or {}).get("workers", []))


def last_error(replica: Replica) -> str:
    """Return the last line of the replica's logs that names an exception, else the last that is no remark, else ''."""
    told = ""
    for name in ("model.log", "ts.log"):
        path = replica.logs / name
        written = [line for line in tail(path, lines=LOG_LINES) if line.strip()] if path.is_file() else []
        if errors := [line for line in map(_message, written) if ERROR_LINE.match(line)]:
            return errors[-1][:300]
        told = next((_message(line) for line in reversed(written) if not REMARK.match(line)), told)
    return told[:300]


def launcher_error(replica: Replica) -> str:
    """Return the last line with which the replica's launcher said why it ended, else an empty text.

    A launcher that crashes has no time to report anything else than its traceback.
    """
    if not replica.launcher_log.is_file():
        return ""
    own = re.compile(rf"{ERROR_LINE.pattern}|^(?:serving replica|{replica.name}): ")
    lines = [line for line in tail(replica.launcher_log, lines=LOG_LINES) if own.match(line)]
    return lines[-1].removeprefix("serving replica: ").removeprefix(f"{replica.name}: ")[:300] if lines else ""


def _message(line: str) -> str:
    parts = line.split(None, 2)
    return parts[2] if len(parts) == 3 and parts[1] in ("INFO", "WARN", "ERROR", "DEBUG", "FATAL") else line


def register(topology: Topology, replica: Replica, model: Model) -> None:
    """Load `model` into a running JVM and check the values that took effect.

    Raises StackError with the worker's own error when it does not load.
    """
    timeout_s = topology.timeouts.startup_s + 10
    reply = unixhttp.call(
        replica.management_socket, "POST", "/models", query=registration(topology, replica, model), timeout_s=timeout_s
    )
    if reply.status != 200:
        said = reply.body.get("message", "") if isinstance(reply.body, dict) else ""
        raise StackError(last_error(replica) or said or f"registration answered {reply.status}")
    description = describe(replica, model.name, timeout_s=10) or {}
    expected = effective_values(topology, replica)
    actual = {name: description.get(name) for name in expected}
    if actual != expected:
        raise StackError(f"TorchServe changed the configuration: wanted {expected}, got {actual}")


def wait_for_management(replica: Replica, jvm: subprocess.Popen[bytes], *, timeout_s: float) -> None:
    """Return once the management API answers; raises StackError when the JVM ends first or time runs out."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if jvm.poll() is not None:
            raise StackError(f"the JVM ended with status {jvm.returncode}: {last_error(replica)}")
        try:
            if unixhttp.call(replica.management_socket, "GET", "/models", timeout_s=2).status == 200:
                return
        except (OSError, http.client.HTTPException):
            time.sleep(0.1)
    raise StackError(f"the management API did not answer within {timeout_s} s")
