"""The description of a stack: shares, limits, time-outs, socket paths."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from serving.errors import UserError
from serving.topology import Limits, Timeouts, Topology, plan, split_workers


def a_plan(*, replicas: int = 2, workers: int = 4, run_dir: Path = Path("/tmp/q/1")) -> Topology:
    return plan(run_dir=run_dir, port=8080, replicas=replicas, workers=workers)


@pytest.mark.parametrize(
    ("total", "replicas", "shares"),
    [(4, 2, [2, 2]), (5, 2, [3, 2]), (1, 3, [1, 1, 1]), (2, 2, [1, 1]), (64, 3, [22, 21, 21])],
)
def test_workers_are_dealt_evenly_and_every_replica_gets_one(total: int, replicas: int, shares: list[int]) -> None:
    assert split_workers(total, replicas=replicas) == shares


def test_workers_times_threads_never_exceed_the_budget() -> None:
    topology = a_plan(replicas=3, workers=8)
    assert topology.workers * topology.intra_op_threads == 8


def test_replicas_share_no_path() -> None:
    first, second = a_plan().replicas
    paths = [
        [r.inference_socket, r.management_socket, r.metrics_socket, r.temp, r.logs, r.store] for r in (first, second)
    ]
    assert not set(paths[0]) & set(paths[1])


def test_balancer_lets_two_batches_per_worker_into_a_replica() -> None:
    topology = a_plan(replicas=1, workers=3)
    assert topology.server_maxconn(topology.replicas[0]) == 3 * topology.limits.batch_size * 2


def test_run_directory_too_long_for_sockets_is_named_with_a_remedy() -> None:
    with pytest.raises(UserError, match=r"/tmp/x+ is too long for unix sockets.*QUARTET_RUN_DIR"):
        a_plan(run_dir=Path("/tmp") / ("x" * 80))


@pytest.mark.parametrize(
    "wrong",
    [
        {"response_s": 25, "balancer_s": 25},  # the balancer must outlast TorchServe
        {"client_s": 29},  # and the client the balancer with its queue
    ],
)
def test_each_layer_must_outlast_the_one_behind_it(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="timeouts must satisfy"):
        Timeouts(**wrong)


def test_default_timeouts_keep_their_order() -> None:
    timeouts = Timeouts()
    assert timeouts.client_s >= timeouts.balancer_s + timeouts.queue_s > timeouts.balancer_s > timeouts.response_s


def test_description_survives_json_unchanged() -> None:
    topology = a_plan()
    assert Topology.model_validate_json(topology.model_dump_json()) == topology


def test_misspelt_field_is_refused() -> None:
    with pytest.raises(ValidationError, match="body_byte"):
        Limits.model_validate({"body_byte": 1})
