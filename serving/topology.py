"""The frozen description of a served stack: replicas, workers, threads, sockets, limits and timeouts.

Pure: nothing here reads the machine. `start` writes it once into the run directory and every process of the stack
(launchers, watchdog, `status`, `stop`) reads that copy, so they can never disagree.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from serving.errors import UserError

MAX_SOCKET_PATH_BYTES = 100
MIB = 1024 * 1024


class Frozen(BaseModel):
    """A value that crosses process boundaries as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Limits(Frozen):
    """Bounds on what one client, or all of them, may ask for."""

    body_bytes: int = Field(default=10 * MIB, gt=0)  # the same number in the balancer and in TorchServe
    connections: int = Field(default=4096, gt=0)
    queued_requests: int = Field(default=256, ge=0)  # waiting in the balancer, over all replicas
    batch_size: int = Field(default=8, gt=0)
    retries: int = Field(default=4, ge=0)  # sendings again of a request that got no answer


class Timeouts(Frozen):
    """Every wait has a bound, and each layer waits longer than the one behind it."""

    response_s: int = Field(default=20, gt=0)  # TorchServe gives up on a batch and replaces the worker
    balancer_s: int = Field(default=25, gt=0)
    client_s: int = Field(default=35, gt=0)
    queue_s: float = Field(default=5, gt=0)
    request_s: float = Field(default=10, gt=0)  # headers, and the part of the body that fits the buffer
    drain_s: int = Field(default=30, gt=0)
    startup_s: int = Field(default=120, gt=0)
    check_interval_s: float = Field(default=0.5, gt=0)
    check_s: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _each_layer_outlasts_the_next(self) -> "Timeouts":
        if not self.client_s >= self.balancer_s + self.queue_s > self.balancer_s > self.response_s:
            raise ValueError(
                f"timeouts must satisfy client_s ({self.client_s}) >= balancer_s + queue_s "
                f"({self.balancer_s} + {self.queue_s}) and balancer_s > response_s ({self.response_s})"
            )
        return self


class Watch(Frozen):
    """When the watchdog replaces a replica, and how often it may."""

    interval_s: float = Field(default=1.0, gt=0)
    check_s: float = Field(default=2.0, gt=0)
    not_ready_s: float = Field(default=20.0, gt=0)
    max_restarts: int = Field(default=3, gt=0)
    window_s: float = Field(default=300.0, gt=0)


DEFAULT_LIMITS, DEFAULT_TIMEOUTS, DEFAULT_WATCH = Limits(), Timeouts(), Watch()


class Replica(Frozen):
    """One TorchServe process with everything it owns below one directory."""

    index: int = Field(ge=0)
    workers: int = Field(gt=0)
    directory: Path

    @property
    def name(self) -> str:
        """The name in the balancer, in supervisord and on the screen."""
        return f"replica-{self.index}"

    @property
    def inference_socket(self) -> Path:
        """Where predictions are sent."""
        return self.directory / "inf.sock"

    @property
    def management_socket(self) -> Path:
        """Where readiness is asked and models are registered."""
        return self.directory / "mgmt.sock"

    @property
    def metrics_socket(self) -> Path:
        """Where Prometheus text is served."""
        return self.directory / "met.sock"

    @property
    def temp(self) -> Path:
        """The private TMPDIR: unpacked archives and worker sockets."""
        return self.directory / "tmp"

    @property
    def logs(self) -> Path:
        """ts.log and model.log, rotated by log4j2; beside the replica, because logs outlive a stopped stack."""
        return self.directory.parent / "logs" / self.name

    @property
    def launcher_log(self) -> Path:
        """What the launcher and its JVM print."""
        return self.directory.parent / "logs" / f"{self.name}.log"

    @property
    def store(self) -> Path:
        """The private model store, the only place archives may be loaded from."""
        return self.directory / "store"


class Topology(Frozen):
    """One stack: `replicas` behind one balancer on 127.0.0.1:`port`."""

    run_dir: Path
    port: int = Field(ge=1, le=65535)
    replicas: tuple[Replica, ...] = Field(min_length=1)
    intra_op_threads: int = Field(default=1, gt=0)
    limits: Limits
    timeouts: Timeouts
    watch: Watch

    @property
    def url(self) -> str:
        """The address that clients use."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def workers(self) -> int:
        """Worker processes over all replicas."""
        return sum(replica.workers for replica in self.replicas)

    @property
    def supervisor_socket(self) -> Path:
        """The XML-RPC socket of supervisord."""
        return self.run_dir / "supervisor.sock"

    @property
    def haproxy_socket(self) -> Path:
        """The runtime API of the balancer."""
        return self.run_dir / "haproxy.sock"

    @property
    def logs(self) -> Path:
        """Logs of supervisord, balancer, launchers and watchdog."""
        return self.run_dir / "logs"

    def server_maxconn(self, replica: Replica) -> int:
        """Return how many requests the balancer lets into `replica`: one batch per worker at work, one waiting."""
        return replica.workers * self.limits.batch_size * 2

    def server_maxconn_large(self, replica: Replica) -> int:
        """Return how many requests with large bodies `replica` gets beside the others: batches do not speed them up."""
        return replica.workers * 2


def split_workers(total: int, *, replicas: int) -> list[int]:
    """Deal `total` workers to `replicas`, as evenly as possible and at least one each."""
    share, rest = divmod(max(total, replicas), replicas)
    return [share + (index < rest) for index in range(replicas)]


def plan(
    *,
    run_dir: Path,
    port: int,
    replicas: int,
    workers: int,
    limits: Limits = DEFAULT_LIMITS,
    timeouts: Timeouts = DEFAULT_TIMEOUTS,
    watch: Watch = DEFAULT_WATCH,
) -> Topology:
    """Describe a stack of `replicas` that share `workers` worker processes (at least one each).

    Raises UserError when a socket path in `run_dir` would exceed what the kernel allows.
    """
    shares = split_workers(workers, replicas=replicas)
    topology = Topology(
        run_dir=run_dir,
        port=port,
        replicas=tuple(
            Replica(index=index, workers=share, directory=run_dir / f"r{index}") for index, share in enumerate(shares)
        ),
        limits=limits,
        timeouts=timeouts,
        watch=watch,
    )
    longest = topology.replicas[-1].temp / ".ts.sock.90000"
    if len(str(longest).encode()) > MAX_SOCKET_PATH_BYTES:
        raise UserError(
            f"run directory {run_dir} is too long for unix sockets (at most {MAX_SOCKET_PATH_BYTES} bytes, "
            f"{longest} has {len(str(longest).encode())}); set QUARTET_RUN_DIR to a shorter path"
        )
    return topology
