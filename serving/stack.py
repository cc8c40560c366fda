"""Start and stop a whole stack: the order of things, and what happens when one of them fails."""

import fcntl
import hashlib
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import Field

from serving import haproxy, host, rundir, torchserve
from serving.archive import ArchiveInfo
from serving.errors import StackError, UserError
from serving.rundir import Model, ReplicaState, Stack
from serving.supervisor import Supervisor, config
from serving.supervisor import start as start_supervisor
from serving.topology import Frozen, Limits, Replica, Timeouts, Topology, Watch, plan

Say = Callable[[str], None]
DEFAULT_REPLICAS = 2
NO_ERROR = "no error, only slow; a busy machine may need another try"


def running(port: int) -> Stack | None:
    """Return the stack whose supervisord answers on `port`, or None; raises StackError when another version runs it."""
    stack = rundir.read_stack(rundir.run_dir_of(port))
    return stack if stack and Supervisor(stack.topology, timeout_s=5).alive() else None


class Options(Frozen):
    """The shape of a stack, apart from what it serves and where."""

    replicas: int | None = Field(default=None, gt=0)  # None: two, or as many as run already
    workers: int | None = Field(default=None, gt=0)  # over all replicas; None: one per CPU, as far as memory allows
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    watch: Watch = Watch()


def start(archive: ArchiveInfo, *, port: int, options: Options, say: Say) -> tuple[Stack, bool]:
    """Serve `archive` on `port` and return once every replica is ready; False when it already was.

    Raises UserError, before anything is started, for whatever the caller can mend, and StackError, after everything is
    stopped again, when a replica does not become ready.
    """
    run_dir = rundir.run_dir_of(port)
    rundir.prepare(run_dir)
    with _lock(run_dir):
        if stack := running(port):
            _require_same(stack, archive, options)
            return stack, False
        try:
            stack = _describe(archive, run_dir=run_dir, port=port, options=options)
            host.sweep(run_dir)
            host.require_free_port(port)
        except UserError:
            with suppress(OSError):  # what an earlier stack left there stays
                run_dir.rmdir()
            raise
        cpus = host.available_cpus()
        if (replicas := len(stack.topology.replicas)) > cpus:
            say(f"warning: {replicas} replicas share {cpus} CPUs; they add availability, not speed")
        _write_files(stack, archive)
        try:
            start_supervisor(stack)
            wait_until_ready(stack, say=say)
        except BaseException:
            _end(stack.topology, drain=False)
            raise
    return stack, True


def _require_same(stack: Stack, archive: ArchiveInfo, options: Options) -> None:
    port, model = stack.topology.port, stack.model
    if model.digest != archive.digest:
        raise UserError(
            f"port {port} already serves another archive ({model.name} {model.version}, {model.graph_digest[:12]}); "
            f"stop it first: python -m serving stop --port {port}"
        )
    running, workers = len(stack.topology.replicas), stack.topology.workers
    if options.replicas not in (None, running):
        raise UserError(
            f"port {port} already serves with {running} replicas, not {options.replicas}; change it with: "
            f"make stop serve PORT={port} REPLICAS={options.replicas}"
        )
    if options.workers and max(options.workers, running) != workers:  # at least one per replica, as in `plan`
        raise UserError(
            f"port {port} already serves with {workers} workers, not {options.workers}; "
            f"stop it first: python -m serving stop --port {port}"
        )


def _describe(archive: ArchiveInfo, *, run_dir: Path, port: int, options: Options) -> Stack:
    """Decide everything about a stack; raises UserError when this machine lacks something."""
    java, java_major = host.find_java()
    replicas = options.replicas or DEFAULT_REPLICAS
    return Stack(
        topology=plan(
            run_dir=run_dir,
            port=port,
            replicas=replicas,
            workers=options.workers or host.default_workers(replicas=replicas),
            limits=options.limits,
            timeouts=options.timeouts,
            watch=options.watch,
        ),
        model=Model(
            name=archive.name,
            version=archive.version,
            digest=archive.digest,
            graph_digest=archive.graph_digest,
            archive=run_dir / "archives" / f"{archive.name}.mar",
            image_shape=archive.image_shape,
            classes=archive.classes,
            gpus=() if archive.provider == "cpu" else host.require_gpus(archive.provider),
        ),
        java=java,
        java_major=java_major,
        haproxy=host.find_haproxy(),
        started_at=time.time(),
    )


@contextmanager
def _lock(run_dir: Path) -> Iterator[None]:
    # Beside the run directory, which is cleared. Two starts at once: the second one finds the first one's stack.
    with (run_dir.parent / f"{run_dir.name}.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _clear(run_dir: Path, *, keep: str = "") -> None:
    for entry in run_dir.iterdir():
        if entry.name == keep:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _write_files(stack: Stack, archive: ArchiveInfo) -> None:
    topology = stack.topology
    _clear(topology.run_dir)
    for folder in (topology.logs, stack.model.archive.parent, *(replica.directory for replica in topology.replicas)):
        folder.mkdir(mode=0o700)
    # A copy: what a later build writes to the same path must not reach a replica that restarts.
    shutil.copyfile(archive.path, stack.model.archive)
    with stack.model.archive.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != archive.digest:
            raise UserError(f"{archive.path} changed while it was read; start again")
    haproxy.write(topology, stack.model, binary=stack.haproxy)
    (topology.run_dir / "supervisord.conf").write_text(config(topology, haproxy=stack.haproxy))
    rundir.write(topology.run_dir / "stack.json", stack)


def wait_until_ready(stack: Stack, *, say: Say) -> None:
    """Return once the balancer sees every replica up; raises StackError with a replica's own error otherwise."""
    topology = stack.topology
    begin = time.monotonic()
    missing = {replica.name: replica for replica in topology.replicas}
    pids: dict[str, int] = {}
    while missing:
        _require_launchers(topology, missing.values(), pids)
        for name in _up(topology) & missing.keys():
            del missing[name]
            say(f"{name} ready after {time.monotonic() - begin:.1f} s")
        if time.monotonic() - begin > topology.timeouts.startup_s:
            causes = "; ".join(f"{name}: {torchserve.last_error(r) or NO_ERROR}" for name, r in missing.items())
            raise StackError(f"not ready within {topology.timeouts.startup_s} s: {causes}; logs in {topology.logs}")
        time.sleep(0.1)


def _require_launchers(topology: Topology, replicas: Collection[Replica], pids: dict[str, int]) -> None:
    """Raise StackError with the error of the first launcher that failed or crashed; `pids` are those seen before."""
    for replica in replicas:
        state = rundir.read(replica.directory / "state.json", ReplicaState)
        if state and state.phase == "failed":
            raise StackError(f"{replica.name} did not start: {state.error}")
    processes = Supervisor(topology, timeout_s=10).processes()
    for replica in replicas:
        process = processes[replica.name]
        # supervisord may have started it again between two looks.
        again = process.pid and pids.setdefault(replica.name, process.pid) != process.pid
        if again or process.state in ("BACKOFF", "EXITED", "FATAL"):
            error = torchserve.launcher_error(replica) or f"its launcher ended, see {replica.launcher_log}"
            raise StackError(f"{replica.name} did not start: {error}")


def _up(topology: Topology) -> set[str]:
    if not topology.haproxy_socket.exists():
        return set()
    try:
        return {name for name, server in haproxy.servers(topology).items() if server.status == "UP"}
    except StackError:
        return set()


def stop(port: int) -> bool:
    """Stop the stack on `port`: no process and no socket is left, requests in flight are answered first.

    Returns False when nothing ran.
    """
    run_dir = rundir.run_dir_of(port)
    if not run_dir.is_dir():
        return host.sweep(run_dir) > 0
    with _lock(run_dir):
        stack = None
        with suppress(StackError):  # another version wrote it: nobody to ask, but its processes are known by their mark
            stack = rundir.read_stack(run_dir)
        if stack:
            return _end(stack.topology, drain=True)
        swept = host.sweep(run_dir)
        _clear(run_dir, keep="logs")
        return swept > 0


def _end(topology: Topology, *, drain: bool) -> bool:
    supervisor = Supervisor(topology, timeout_s=topology.timeouts.drain_s + 30)
    alive = supervisor.alive()
    if alive:
        with suppress(StackError):  # a supervisord that ends or hangs meanwhile: what it leaves is swept
            _end_in_order(topology, supervisor, drain=drain)
    swept = host.sweep(topology.run_dir)
    _clear(topology.run_dir, keep="logs")
    return alive or swept > 0


def _end_in_order(topology: Topology, supervisor: Supervisor, *, drain: bool) -> None:
    supervisor.stop("watchdog")
    if drain:
        supervisor.stop("haproxy")  # SIGUSR1: stops listening, ends with its last request
    for replica in topology.replicas:
        supervisor.stop(replica.name, wait=False)
    for replica in topology.replicas:
        supervisor.stop(replica.name)
    supervisor.shutdown()
    _wait_for_end(topology)


def _wait_for_end(topology: Topology) -> None:
    deadline = time.monotonic() + 30
    while host.marked(topology.run_dir) and time.monotonic() < deadline:
        time.sleep(0.1)
