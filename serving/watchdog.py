"""Replaces replicas that are alive but not ready: supervisord sees a frozen JVM, or one without workers, as running.

`decide` is pure: it turns what was observed about one replica into what to do. `run` observes, acts and records.
"""

import http.client
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Literal, NamedTuple

from serving import haproxy, rundir, torchserve
from serving.errors import StackError
from serving.rundir import ReplicaState, Stack, WatchState
from serving.supervisor import Process, Supervisor
from serving.topology import Replica, Watch

FREE_INTERVAL_S = 0.25
Action = Literal["none", "restart", "hold", "start"]


class Observation(NamedTuple):
    """One look at one replica at `now` (seconds since the epoch)."""

    now: float
    pid: int  # of the launcher, 0 when it is down
    started_at: float
    ready: bool
    was_ready: bool = False  # this launcher has reached readiness: the start-up limit no longer applies
    given_up: bool = False  # supervisord does not start it any more


def decide(seen: Observation, memory: WatchState, *, watch: Watch, startup_s: float) -> tuple[Action, WatchState]:
    """Return what to do about a replica, and the new memory.

    `restart` kills the process group (supervisord starts it again), `hold` stops it because it used up its restarts,
    `start` ends a hold once the window allows another try.
    """
    starts = tuple(at for at in memory.starts if seen.now - at < watch.window_s)
    memory = memory.model_copy(update={"starts": starts})
    if memory.held:
        free = len(starts) < watch.max_restarts
        return ("start" if free else "none"), memory.model_copy(update={"held": not free})
    memory = _count_start(seen, memory)
    if seen.given_up:
        return "hold", memory.model_copy(update={"held": True, "starts": (seen.now,) * watch.max_restarts})
    if len(memory.starts) > watch.max_restarts and not seen.ready:
        # The start beyond the budget gets no chance: forget it, so that the hold ends with the window.
        return "hold", memory.model_copy(update={"held": True, "starts": memory.starts[:-1]})
    if seen.ready:
        return "none", memory.model_copy(update={"last_ready": seen.now})
    return ("restart" if _overdue(seen, memory, watch=watch, startup_s=startup_s) else "none"), memory


def _count_start(seen: Observation, memory: WatchState) -> WatchState:
    if seen.pid in (0, memory.pid):
        return memory
    if memory.pid == 0:  # the first start of the stack
        return memory.model_copy(update={"pid": seen.pid})
    return memory.model_copy(
        update={"pid": seen.pid, "starts": (*memory.starts, seen.now), "restarts": memory.restarts + 1}
    )


def _overdue(seen: Observation, memory: WatchState, *, watch: Watch, startup_s: float) -> bool:
    # registration itself is bounded by the start-up limit and ends with an error of its own: be the last to give up
    patience_s = watch.not_ready_s if seen.was_ready else startup_s + watch.not_ready_s
    return seen.pid != 0 and seen.now - max(memory.last_ready, seen.started_at) > patience_s


def observe(stack: Stack, replica: Replica, process: Process) -> Observation:
    """Look at one replica through its management socket."""
    state = rundir.read(replica.directory / "state.json", ReplicaState)
    description = torchserve.describe(replica, stack.model.name, timeout_s=stack.topology.watch.check_s)
    return Observation(
        now=time.time(),
        pid=process.pid,
        started_at=process.started_at,
        ready=torchserve.is_ready(description),
        was_ready=state is not None and state.phase == "ready" and state.pid == process.pid,
        given_up=process.state == "FATAL",
    )


def act(action: Action, *, replica: Replica, seen: Observation, supervisor: Supervisor) -> None:
    """Carry out a decision and log it."""
    if action == "none":
        return
    print(f"{replica.name}: {action} (pid {seen.pid}); {torchserve.last_error(replica)}", flush=True)
    if action == "restart":
        with suppress(ProcessLookupError):
            os.killpg(seen.pid, signal.SIGKILL)
    elif action == "hold":
        supervisor.stop(replica.name, wait=False)
    else:
        supervisor.start(replica.name)


Memories = dict[str, WatchState]


def recall(stack: Stack) -> Memories:
    """Return what an earlier watchdog remembered. Time in which nobody looked is nobody's fault."""
    return {
        replica.name: (rundir.read(replica.directory / "watch.json", WatchState) or WatchState()).model_copy(
            update={"last_ready": time.time()}
        )
        for replica in stack.topology.replicas
    }


def watch_replicas(stack: Stack, supervisor: Supervisor, memories: Memories) -> None:
    """Look at every replica once, at the same time; act, and record what changed."""
    processes = supervisor.processes()
    replicas = stack.topology.replicas
    with ThreadPoolExecutor(len(replicas)) as pool:
        looks = list(pool.map(lambda replica: observe(stack, replica, processes[replica.name]), replicas))
    for replica, seen in zip(replicas, looks, strict=True):
        before = memories[replica.name]
        action, after = decide(seen, before, watch=stack.topology.watch, startup_s=stack.topology.timeouts.startup_s)
        memories[replica.name] = after
        if after.model_copy(update={"last_ready": before.last_ready}) != before:
            rundir.write(replica.directory / "watch.json", after)
        act(action, replica=replica, seen=seen, supervisor=supervisor)


def balancer_answers(stack: Stack) -> bool:
    """Tell whether the balancer answers /healthz."""
    connection = http.client.HTTPConnection("127.0.0.1", stack.topology.port, timeout=2)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def free_requests(stack: Stack) -> None:
    """Take back, for as long as the process lives, the requests that a replica holds although it is down.

    Twice in a row: a request that is just being sent elsewhere must not be cut off.
    """
    down: set[str] = set()
    while True:
        time.sleep(FREE_INTERVAL_S)
        with suppress(StackError):
            servers = haproxy.servers(stack.topology).values()
            stuck = {server.name for server in servers if server.status == "DOWN" and server.current > 0}
            for name in stuck & down:
                haproxy.release(stack.topology, name)
            down = stuck


def run(stack: Stack) -> None:
    """Watch the stack until this process is stopped."""
    supervisor = Supervisor(stack.topology, timeout_s=10)
    memories = recall(stack)
    threading.Thread(target=free_requests, args=(stack,), daemon=True).start()
    balancer_seen = time.monotonic()
    while True:
        try:
            watch_replicas(stack, supervisor, memories)
            if balancer_answers(stack):
                balancer_seen = time.monotonic()
            elif time.monotonic() - balancer_seen > stack.topology.watch.not_ready_s:
                balancer_seen = time.monotonic()
                replace_balancer(supervisor)
        except StackError as error:
            print(f"watchdog: {error}", file=sys.stderr, flush=True)
        time.sleep(stack.topology.watch.interval_s)


def replace_balancer(supervisor: Supervisor) -> None:
    """Kill a balancer that is alive and does not answer; supervisord starts it again."""
    pid = supervisor.processes()["haproxy"].pid
    if pid:
        print(f"haproxy: restart (pid {pid} does not answer)", flush=True)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
