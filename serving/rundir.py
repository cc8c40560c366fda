"""The run directory: who may own it, and the files through which the processes of one stack share facts."""

import os
import re
import stat
import tempfile
import time
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import ValidationError

from serving.errors import StackError, UserError
from serving.topology import Frozen, Topology

Shared = TypeVar("Shared", bound=Frozen)
Phase = Literal["starting", "loading", "ready", "failed"]
# A space ends a word in haproxy.cfg, a comma or a plus means something in config.properties, and so on.
PLAIN_PATH = re.compile(r"[A-Za-z0-9_./-]+")


class Model(Frozen):
    """The archive that a stack serves."""

    name: str
    version: str
    digest: str  # sha256 of the .mar file
    graph_digest: str  # sha256 of the ONNX file in it, which every answer carries
    archive: Path  # our copy, below the run directory
    image_shape: tuple[int, int, int] = (0, 0, 0)  # height, width, channels of the pixels that the graph takes
    classes: int = 0
    gpus: tuple[str, ...] = ()  # as CUDA names them, for the replicas in turn; none: the CPU


class Stack(Frozen):
    """What `start` decided, written once: topology, model and tools."""

    topology: Topology
    model: Model
    java: Path
    java_major: int
    haproxy: Path
    started_at: float


class ReplicaState(Frozen):
    """What a launcher last reported about its replica."""

    phase: Phase
    since: float
    pid: int
    error: str = ""


class WatchState(Frozen):
    """What the watchdog remembers about one replica."""

    pid: int = 0  # of the launcher it saw last
    last_ready: float = 0.0
    starts: tuple[float, ...] = ()  # starts inside the window that nobody asked for
    restarts: int = 0  # the same, ever
    held: bool = False  # left down until the window allows another try: shown as `failed`


def base_dir() -> Path:
    """Return the folder that holds this user's run directories: QUARTET_RUN_DIR, else one below the temp folder."""
    chosen = os.environ.get("QUARTET_RUN_DIR")
    return Path(chosen).absolute() if chosen else Path(tempfile.gettempdir()) / f"quartet-{os.getuid()}"


def run_dir_of(port: int) -> Path:
    """Return the run directory of the stack on `port`."""
    return base_dir() / str(port)


def prepare(run_dir: Path) -> None:
    """Create `run_dir` and its parent as 0700 folders of ours.

    Raises UserError when either is a symbolic link, belongs to somebody else or is open to others, and when the path
    has characters that the programs of a stack would read as syntax.
    """
    if not PLAIN_PATH.fullmatch(str(run_dir)):
        raise UserError(
            f"run directory {str(run_dir)!r} has other characters than A-Z, a-z, 0-9 and _ . / -, which HAProxy and "
            f"TorchServe would misread; set QUARTET_RUN_DIR to another path"
        )
    for folder in (run_dir.parent, run_dir):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot create run directory {folder}: {error.strerror}; set QUARTET_RUN_DIR") from error
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise UserError(f"run directory {folder} is a link or belongs to another user; set QUARTET_RUN_DIR")
        if status.st_mode & 0o077:
            raise UserError(f"run directory {folder} is open to other users; chmod 700 it or set QUARTET_RUN_DIR")


def write(path: Path, value: Frozen) -> None:
    """Replace `path` with `value` in one step: a reader sees the old or the new, never half."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(value.model_dump_json(indent=2))
    partial.replace(path)


def read(path: Path, kind: type[Shared]) -> Shared | None:
    """Return the value in `path`, or None when there is none; raises StackError when another version wrote it."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "text"
        raise StackError(
            f"{path} is of another version of this program ({where}: {first['msg']}); stop the stack and start it again"
        ) from error


def read_stack(run_dir: Path) -> Stack | None:
    """Return what was started in `run_dir`, or None; raises StackError when another version started it."""
    return read(run_dir / "stack.json", Stack)


def report(replica_dir: Path, phase: Phase, *, error: str = "") -> None:
    """Record the launcher's progress for `start`, `status` and the watchdog."""
    write(replica_dir / "state.json", ReplicaState(phase=phase, since=time.time(), pid=os.getpid(), error=error))
