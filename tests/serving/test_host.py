"""What is found on this machine: CPUs, tools, ports, processes of a stack."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from serving import host
from serving.errors import UserError


def tool(folder: Path, says: str) -> str:
    path = folder / "tool"
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o700)
    return str(path)


def quota(tmp_path: Path, membership: str, files: dict[str, str]) -> float | None:
    (tmp_path / "cgroup").write_text(membership)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return host.cgroup_quota(cgroup_of_this_process=tmp_path / "cgroup", root=tmp_path / "sys")


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/a/b\n", {"sys/a/b/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"sys/a/b/cpu.max": "max 100000\n", "sys/a/cpu.max": "50000 100000\n"}, 0.5),  # inherited
        ("0::/host/path\n", {"sys/cpu.max": "200000 100000\n"}, 2.0),  # the path of the host, seen in a container
        ("0::/a\n", {"sys/a/cpu.max": "max 100000\n"}, None),
        ("3:cpu,cpuacct:/a\n", {"sys/cpu/a/cpu.cfs_quota_us": "300000", "sys/cpu/a/cpu.cfs_period_us": "100000"}, 3.0),
        ("3:memory:/a\n", {"sys/cpu/a/cpu.cfs_quota_us": "300000", "sys/cpu/a/cpu.cfs_period_us": "100000"}, None),
        ("0::/\n", {}, None),
    ],
)
def test_cpu_quota_is_the_tightest_of_every_level(
    tmp_path: Path, membership: str, files: dict[str, str], cores: float | None
) -> None:
    assert quota(tmp_path, membership, files) == cores


def test_cpus_respect_the_affinity_of_this_process() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    code += "; from serving import host; print(host.available_cpus())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


@pytest.mark.parametrize(("quota_cores", "cpus"), [(None, 4), (1.5, 2), (0.2, 1), (16.0, 4)])
def test_cpus_are_the_affinity_or_the_quota_whichever_is_less(
    monkeypatch: pytest.MonkeyPatch, quota_cores: float | None, cpus: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(host, "cgroup_quota", lambda **_: quota_cores)
    assert host.available_cpus() == cpus


@pytest.mark.parametrize(("cpus", "free_gib", "replicas", "workers"), [(8, 64, 2, 8), (64, 10, 2, 10), (1, 64, 3, 3)])
def test_workers_follow_cpus_and_memory_but_each_replica_has_one(
    monkeypatch: pytest.MonkeyPatch, cpus: int, free_gib: int, replicas: int, workers: int
) -> None:
    class Memory:
        available = free_gib * 1024**3

    monkeypatch.setattr(host, "available_cpus", lambda: cpus)
    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    assert host.default_workers(replicas=replicas) == workers


def test_java_and_haproxy_come_with_the_dependencies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUARTET_JAVA", raising=False)
    monkeypatch.delenv("QUARTET_HAPROXY", raising=False)
    java, major = host.find_java()
    assert java.is_file()
    assert major >= host.MIN_JAVA
    assert host.find_haproxy().is_file()


@pytest.mark.parametrize("says", ['java version "1.8.0_392"', 'openjdk version "11.0.2"', "no java at all"])
def test_old_java_is_refused_with_the_version_that_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    monkeypatch.setenv("QUARTET_JAVA", tool(tmp_path, says))
    with pytest.raises(UserError, match="java 17 or newer is needed"):
        host.find_java()


def test_missing_java_is_one_line_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARTET_JAVA", str(tmp_path / "nothing"))
    with pytest.raises(UserError, match=r"cannot run .*nothing \(FileNotFoundError\); .*QUARTET_JAVA"):
        host.find_java()


def test_old_haproxy_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARTET_HAPROXY", tool(tmp_path, "HAProxy version 2.2.9 2021"))
    with pytest.raises(UserError, match=r"haproxy 2\.8 or newer is needed"):
        host.find_haproxy()


def test_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is in use by another program"):
            host.require_free_port(port)
    host.require_free_port(port)


def test_sweep_ends_the_marked_processes_and_no_others(tmp_path: Path) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    ours = subprocess.Popen(sleep, env=host.clean_environment(tmp_path))
    other = subprocess.Popen(sleep, env=host.clean_environment(tmp_path / "other"))
    try:
        assert host.sweep(tmp_path) == 1
        assert not psutil.pid_exists(ours.pid)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        ours.wait()


def test_foreign_settings_do_not_reach_the_stack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TS_CONFIG_FILE", "PYTHONPATH", "JAVA_TOOL_OPTIONS", "LOG_LOCATION", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "/foreign")
    environment = host.clean_environment(tmp_path, TMPDIR="/mine")
    assert "/foreign" not in environment.values()
    assert environment["TMPDIR"] == "/mine"
    assert environment["HOME"] == os.environ["HOME"]


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [(None, ("0", "1")), ("1", ("1",)), ("GPU-5a, GPU-7b", ("GPU-5a", "GPU-7b")), ("-1", None), ("", None)],
)
def test_gpus_are_those_that_cuda_would_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, gpus: tuple[str, ...] | None
) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if gpus:
        assert host.require_gpus("cuda", driver=tmp_path) == gpus
    else:
        with pytest.raises(UserError, match=r"made for cuda, but no NVIDIA GPU is visible here; .*--export\.provider"):
            host.require_gpus("cuda", driver=tmp_path)


def test_archive_for_a_gpu_is_refused_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="made for tensorrt"):
        host.require_gpus("tensorrt", driver=tmp_path / "nothing")
