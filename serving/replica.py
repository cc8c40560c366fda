"""The launcher that supervisord runs for one replica.

It owns the JVM: whatever ends the JVM ends everything below it, and a restarted JVM gets the model registered again
with the same effective values, which no configuration file of TorchServe can promise.
"""

import http.client
import shutil
import signal
import subprocess
import sys
from types import FrameType

from serving import host, rundir, torchserve
from serving.errors import StackError
from serving.rundir import Stack
from serving.topology import Replica


def launch(stack: Stack, index: int) -> int:
    """Run replica `index` until its JVM ends; return 0 only when we were asked to stop."""
    replica = stack.topology.replicas[index]
    rundir.report(replica.directory, "starting")
    host.sweep(stack.topology.run_dir, replica=str(index))  # what a killed launcher left behind
    prepare(stack, replica)
    jvm = start_jvm(stack, replica)
    asked_to_stop = False

    def stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True
        jvm.terminate()

    signal.signal(signal.SIGTERM, stop)
    error = serve(stack, replica, jvm)
    if not asked_to_stop:
        rundir.report(replica.directory, "failed", error=error)
        print(f"{replica.name}: {error}", file=sys.stderr, flush=True)
        jvm.kill()
    jvm.wait()
    host.sweep(stack.topology.run_dir, replica=str(index))
    return 0 if asked_to_stop else 1


def serve(stack: Stack, replica: Replica, jvm: subprocess.Popen[bytes]) -> str:
    """Register the model, wait for the end of `jvm` and return the reason of that end."""
    try:
        torchserve.wait_for_management(replica, jvm, timeout_s=stack.topology.timeouts.startup_s)
        rundir.report(replica.directory, "loading")
        torchserve.register(stack.topology, replica, stack.model)
    except (StackError, OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    rundir.report(replica.directory, "ready")
    return f"the JVM ended with status {jvm.wait()}"


def prepare(stack: Stack, replica: Replica) -> None:
    """Give the replica fresh temporary files, its own link to the archive and its rendered configuration."""
    # TorchServe never removes what it unpacked: start over, or restarts fill the disk.
    shutil.rmtree(replica.temp, ignore_errors=True)
    shutil.rmtree(replica.store, ignore_errors=True)
    for folder in (replica.temp, replica.logs, replica.store):
        folder.mkdir(mode=0o700, exist_ok=True)
    (replica.store / stack.model.archive.name).hardlink_to(stack.model.archive)
    for log in (replica.logs / "model.log", replica.logs / "ts.log"):
        if log.exists():
            log.replace(log.with_suffix(".previous"))
    (replica.directory / "config.properties").write_text(torchserve.config_properties(stack.topology, replica))
    (replica.directory / "log4j2.xml").write_text(torchserve.render("log4j2.xml.j2", logs=replica.logs))


def start_jvm(stack: Stack, replica: Replica) -> subprocess.Popen[bytes]:
    """Start the JVM in the replica's own directory and process group of the launcher."""
    threads, gpus = str(stack.topology.intra_op_threads), stack.model.gpus
    environment = host.clean_environment(
        stack.topology.run_dir,
        QUARTET_REPLICA=str(replica.index),
        TMPDIR=str(replica.temp),
        TEMP=str(replica.temp),
        OMP_NUM_THREADS=threads,
        MKL_NUM_THREADS=threads,
        OPENBLAS_NUM_THREADS=threads,
        **({"CUDA_VISIBLE_DEVICES": gpus[replica.index % len(gpus)]} if gpus else {}),
    )
    command = torchserve.java_command(stack.java, replica, java_major=stack.java_major)
    return subprocess.Popen(command, cwd=replica.directory, env=environment, stdin=subprocess.DEVNULL)
