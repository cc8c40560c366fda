"""The loop on one process: exact counts, resuming that changes nothing, and a stop on a loss that is not finite."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeline.errors import PipelineError
from pipeline.loader import Images, Sampling
from pipeline.models import Classifier, ModelSpec, build
from pipeline.training.checkpoint import latest_step
from pipeline.training.group import Group, average_buffers
from pipeline.training.loop import LabelObjective, Schedule, evaluate, fit
from pipeline.training.optim import build_optimizer
from pipeline.training.parallel import DataParallel
from tests.pipeline.stripes import SIZE, stripes


@pytest.fixture
def images(tmp_path: Path) -> Images:
    return stripes(40, cache=tmp_path)


def network(dropout: float = 0.0, name: str = "lenet") -> Classifier:
    torch.manual_seed(0)
    return build(
        ModelSpec(
            name=name, num_classes=2, channels=1, height=SIZE, width=SIZE, mean=(0.4,), std=(0.3,), dropout=dropout
        )
    )


def train(
    model: Classifier,
    images: Images,
    group: Group,
    folder: Path,
    *,
    epochs: int = 3,
    accumulate: int = 1,
    checkpoint_steps: int = 2,
    lr: float = 0.05,
    bf16: bool = False,
    optimizer: str = "sgd",
) -> None:
    plan = DataParallel(model, group, LabelObjective(), accumulate=accumulate, bf16=bf16, channels_last=True)
    fit(
        plan,
        build_optimizer(model, name=optimizer, lr=lr, momentum=0.9, weight_decay=0.0),
        images,
        images,
        sampling=Sampling(batch_size=8, seed=0, augment=("crop",), padding=1),
        schedule=Schedule(epochs=epochs, lr=lr, kind="constant", warmup_epochs=0, checkpoint_steps=checkpoint_steps),
        group=group,
        resume=folder / "resume",
        telemetry=folder / "log",
        title="train",
    )


def weights(model: Classifier) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_training_learns_and_is_recorded(images: Images, group: Group, tmp_path: Path) -> None:
    model = network()
    train(model, images, group, tmp_path)
    assert evaluate(model, images, group=group).top1 == 1.0
    lines = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert list((tmp_path / "log").glob("events.out.tfevents.*"))


def test_bf16_rounds_differently_and_learns_the_same(images: Images, group: Group, tmp_path: Path) -> None:
    exact, rounded = network(), network()
    train(exact, images, group, tmp_path / "fp32")
    train(rounded, images, group, tmp_path / "bf16", bf16=True)
    assert not torch.equal(weights(exact), weights(rounded))
    assert rounded.net.state_dict()["fc2.weight"].dtype == torch.float32
    assert evaluate(rounded, images, group=group).top1 == 1.0


@pytest.mark.parametrize(("killed_after", "optimizer"), [(3, "sgd"), (11, "sgd"), (5, "adamw")])
def test_interrupted_training_ends_with_the_weights_of_an_uninterrupted_one(
    images: Images, group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_after: int, optimizer: str
) -> None:
    straight = network(dropout=0.5)
    train(straight, images, group, tmp_path / "straight", lr=0.01, optimizer=optimizer)

    steps = 0
    original = DataParallel.forward_backward

    def dies(self: DataParallel, *arguments: torch.Tensor, global_size: int) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps > killed_after:
            raise KeyboardInterrupt
        return original(self, *arguments, global_size=global_size)

    monkeypatch.setattr(DataParallel, "forward_backward", dies)
    with pytest.raises(KeyboardInterrupt):
        train(network(dropout=0.5), images, group, tmp_path / "killed", lr=0.01, optimizer=optimizer)
    monkeypatch.undo()
    resumed = network(dropout=0.5)
    assert latest_step(tmp_path / "killed" / "resume") == killed_after // 2 * 2
    train(resumed, images, group, tmp_path / "killed", lr=0.01, optimizer=optimizer)
    assert torch.equal(weights(straight), weights(resumed))
    lines = (tmp_path / "killed" / "log" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3]


def test_half_written_checkpoint_is_not_loaded(images: Images, group: Group, tmp_path: Path) -> None:
    (tmp_path / "resume" / "step-8.partial").mkdir(parents=True)
    assert latest_step(tmp_path / "resume") == 0


def test_accumulation_gives_the_gradients_of_the_whole_batch(images: Images, group: Group, tmp_path: Path) -> None:
    whole, parts = network(), network()
    train(whole, images, group, tmp_path / "whole", epochs=1)
    train(parts, images, group, tmp_path / "parts", epochs=1, accumulate=4)
    assert torch.allclose(weights(whole), weights(parts), atol=1e-6)


def test_loss_that_is_not_finite_stops_with_step_and_images(images: Images, group: Group, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"the loss is (nan|inf) at step \d+ \(process 0 had images \[") as caught:
        train(network(), images, group, tmp_path, lr=1e30)
    assert caught.value.exit_status == 1


@pytest.mark.multirank
def test_buffers_become_the_mean_over_processes(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=_average_in_rank, args=(r, str(tmp_path / "store"), str(tmp_path))) for r in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    means = [torch.tensor(json.loads((tmp_path / f"{rank}.json").read_text())) for rank in range(2)]
    assert means[0].tolist() == means[1].tolist() == [1.5] * 4


def _average_in_rank(rank: int, store: str, out: str) -> None:
    """Average a running mean of 1 and one of 2 over two processes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    norm = torch.nn.BatchNorm2d(4)
    assert norm.running_mean is not None
    norm.running_mean.fill_(rank + 1)
    average_buffers(norm, group=Group(rank, 2, torch.device("cpu")))
    (Path(out) / f"{rank}.json").write_text(json.dumps(norm.running_mean.tolist()))
    dist.destroy_process_group()
