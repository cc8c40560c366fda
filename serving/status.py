"""What `status` shows: every replica as its supervisor, its JVM, the balancer and the watchdog see it."""

import time
from typing import Literal

import psutil
from rich.table import Table

from serving import haproxy, rundir, torchserve
from serving.errors import StackError
from serving.haproxy import Server
from serving.rundir import ReplicaState, Stack, WatchState
from serving.supervisor import Process, Supervisor
from serving.topology import Frozen, Replica

Condition = Literal["ready", "starting", "not ready", "down", "failed"]


class ReplicaStatus(Frozen):
    """One line of the table."""

    name: str
    state: Condition
    workers_ready: int
    workers: int
    balancer: str
    requests: int
    restarts: int
    pid: int
    rss_mib: int
    uptime_s: float
    error: str


class StackStatus(Frozen):
    """The whole table; `state` is ready when every replica is, degraded when some are."""

    url: str
    state: Literal["ready", "degraded", "down"]
    model: str
    version: str
    digest: str  # of the ONNX file, as in every answer
    archive_digest: str
    uptime_s: float
    replicas: tuple[ReplicaStatus, ...]


def status(stack: Stack) -> StackStatus:
    """Ask every part of a running stack; parts that do not answer are shown as down."""
    topology = stack.topology
    processes = Supervisor(topology, timeout_s=5).processes()
    try:
        servers = haproxy.servers(topology)
    except StackError:
        servers = {}
    replicas = tuple(
        _replica(stack, replica, processes[replica.name], servers.get(replica.name)) for replica in topology.replicas
    )
    ready = sum(replica.state == "ready" and replica.balancer.startswith("UP") for replica in replicas)
    return StackStatus(
        url=topology.url,
        state="ready" if ready == len(replicas) else "degraded" if ready else "down",
        model=stack.model.name,
        version=stack.model.version,
        digest=stack.model.graph_digest,
        archive_digest=stack.model.digest,
        uptime_s=round(time.time() - stack.started_at, 1),
        replicas=replicas,
    )


def _replica(stack: Stack, replica: Replica, process: Process, server: Server | None) -> ReplicaStatus:
    watched = rundir.read(replica.directory / "watch.json", WatchState) or WatchState()
    launcher = rundir.read(replica.directory / "state.json", ReplicaState)
    description = torchserve.describe(replica, stack.model.name, timeout_s=2) or {}
    ready = sum(worker["status"] == "READY" for worker in description.get("workers", []))
    condition = _condition(process, launcher, held=watched.held, ready=ready)
    return ReplicaStatus(
        name=replica.name,
        state=condition,
        workers_ready=ready,
        workers=replica.workers,
        balancer=server.status if server else "down",
        requests=server.requests if server else 0,
        restarts=watched.restarts,
        pid=process.pid,
        rss_mib=_rss_mib(process.pid),
        uptime_s=round(time.time() - process.started_at, 1) if process.pid else 0.0,
        error="" if condition == "ready" else _error(replica, process, launcher, held=watched.held),
    )


def _condition(process: Process, launcher: ReplicaState | None, *, held: bool, ready: int) -> Condition:
    if held:
        return "failed"
    if ready:
        return "ready"
    if not process.pid:
        return "down"
    return "starting" if launcher and launcher.phase in ("starting", "loading") else "not ready"


def _error(replica: Replica, process: Process, launcher: ReplicaState | None, *, held: bool) -> str:
    if launcher and launcher.phase == "failed":
        return launcher.error
    if launcher and launcher.pid == process.pid:
        # One that is held may just have been started once more, and has nothing to say yet: the one before has.
        return torchserve.last_error(replica) or (torchserve.launcher_error(replica) if held else "")
    # Nothing was reported by the launcher that runs, or ran last: it may have crashed.
    return torchserve.launcher_error(replica) or torchserve.last_error(replica)


def _rss_mib(pid: int) -> int:
    """Return the resident memory of a launcher with its JVM and workers."""
    if not pid:
        return 0
    total = 0
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in family:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total // 1024**2


def table(shown: StackStatus) -> Table:
    """Return the status as a table for a terminal."""
    title = f"{shown.url} {shown.state}: {shown.model} {shown.version} ({shown.digest[:12]}), up {shown.uptime_s:.0f} s"
    grid = Table(title=title, title_justify="left")
    for column in (
        "replica",
        "state",
        "workers",
        "balancer",
        "requests",
        "restarts",
        "pid",
        "RSS MiB",
        "up s",
        "error",
    ):
        grid.add_column(column, no_wrap=column != "error")
    for row in shown.replicas:
        grid.add_row(
            row.name,
            row.state,
            f"{row.workers_ready}/{row.workers}",
            row.balancer,
            str(row.requests),
            str(row.restarts),
            str(row.pid),
            str(row.rss_mib),
            f"{row.uptime_s:.0f}",
            row.error,
        )
    return grid
