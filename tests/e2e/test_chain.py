"""The chain as people run it: `python -m pipeline`, in real processes, on real digits."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import onnx
import pytest
import torch
from safetensors.torch import load_file

from pipeline.artifact import load_artifact
from pipeline.compression.bits import weight_bits
from pipeline.machine import cpu_facts
from tests.chains import FAST, kill_after, made, pipeline_command, run_pipeline, wait_until_gone

pytestmark = [pytest.mark.e2e, pytest.mark.multirank]

STAGES = ("train", "compress", "export", "choose", "package")
# Instants at which each stage is killed. `make test-kill` asks for 20.
KILLS = int(os.environ.get("QUARTET_KILLS", "2"))
# What the choice rests on is measured, so a run that must repeat exactly leaves nothing to the clock.
EXACT = (*FAST, "--choose.force=pruned-dynamic")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("finished")
    made(folder, "package", *EXACT)
    return folder


def artifact_of(folder: Path, stage: str) -> Path:
    (path,) = (folder / "artifacts" / stage).glob("*/manifest.json")
    return path.parent


def test_archive_and_a_held_out_image_are_made(finished: Path) -> None:
    names = sorted(path.name for path in artifact_of(finished, "package").iterdir())
    assert names == ["digits.mar", "held-out-0.png", "manifest.json", "report.json"]


def test_each_stage_records_the_key_of_the_one_before(finished: Path) -> None:
    manifests = [load_artifact(artifact_of(finished, stage)).manifest for stage in STAGES]
    assert [m.parent for m in manifests] == [None, *(m.key for m in manifests[:-1])]


def test_graph_says_what_it_was_made_from(finished: Path) -> None:
    compress, export = (load_artifact(artifact_of(finished, stage)) for stage in ("compress", "export"))
    graph = onnx.load(export.file("pruned-dynamic.onnx"))
    metadata = {entry.key: entry.value for entry in graph.metadata_props}
    assert json.loads(metadata["labels"]) == list("0123456789")
    assert metadata["weights_sha256"] == compress.manifest.files["pruned-dynamic.safetensors"]
    assert (metadata["train_key"], metadata["compress_key"]) == (compress.manifest.parent, compress.manifest.key)
    assert metadata["weight_bits"] == str(weight_bits("auto"))
    assert metadata["cpu"] == cpu_facts()["name"]


def test_second_run_does_nothing_and_says_so(finished: Path) -> None:
    before = (artifact_of(finished, "package") / "digits.mar").stat().st_mtime_ns
    done = run_pipeline(finished, "package", *EXACT)
    done_already = [line.split(", ")[0] for line in done.stderr.splitlines() if "already done" in line]
    assert done_already == [f"{stage}: already done" for stage in STAGES]
    assert "running" not in done.stderr
    assert (artifact_of(finished, "package") / "digits.mar").stat().st_mtime_ns == before


def test_change_of_a_late_section_keeps_the_early_stages(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "artifacts", tmp_path / "artifacts")
    done = run_pipeline(tmp_path, "package", *EXACT, "--package.version=2.0")
    assert "choose: already done" in done.stderr
    assert "package: running" in done.stderr


def test_force_replaces_the_artifact(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "artifacts", tmp_path / "artifacts")
    before = load_artifact(artifact_of(tmp_path, "package")).digest
    done = run_pipeline(tmp_path, "package", *EXACT, "--force")
    assert "package: running" in done.stderr
    assert load_artifact(artifact_of(tmp_path, "package")).digest == before


@pytest.mark.parametrize("stage", STAGES)
def test_stage_killed_at_any_instant_ends_in_the_same_bytes(finished: Path, tmp_path: Path, stage: str) -> None:
    expected = load_artifact(artifact_of(finished, stage)).digest
    before = STAGES[: STAGES.index(stage)]
    generator = random.Random(stage)
    duration_s = measured_duration(finished, tmp_path / "timed", before, stage)
    for number in range(KILLS):
        folder = tmp_path / str(number)
        start_from(finished, folder, before)
        kill_after(folder, generator.uniform(0.0, duration_s), stage, *EXACT)
        assert wait_until_gone(folder) == []
        path = made(folder, stage, *EXACT)
        assert load_artifact(path if path.is_dir() else path.parent).digest == expected
        assert list((folder / "artifacts" / stage).glob("*.partial")) == []
        assert list((folder / "artifacts" / stage).glob("*.resume")) == []


@pytest.mark.parametrize(
    ("stage", "sign", "number", "longer"),
    [("train", "process(es)", "SIGINT", ["--train.epochs=1000"]), ("export", "run", "SIGTERM", [])],
)
def test_interrupted_run_says_one_line_and_leaves_nothing(
    finished: Path, tmp_path: Path, stage: str, sign: str, number: str, longer: list[str]
) -> None:
    start_from(finished, tmp_path, STAGES[: STAGES.index(stage)])
    command = pipeline_command(stage, *EXACT, *longer)
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stderr
        while not (line := process.stderr.readline()).startswith(f"{stage}: ") or sign not in line:
            assert line, "it ended"
        time.sleep(1)  # into the work, so far as it goes
        os.killpg(process.pid, signal.Signals[number])  # as a terminal sends it: to the group
        told = [line for line in process.stderr.read().splitlines() if not line.startswith(f"{stage}: epoch")]
    assert told == ["quartet: interrupted; the same command continues"]
    assert wait_until_gone(tmp_path) == []
    assert list((tmp_path / "artifacts" / stage).glob("*.partial*")) == []


def start_from(finished: Path, folder: Path, stages: tuple[str, ...]) -> None:
    """Lay out in `folder` what the given stages made."""
    (folder / "artifacts").mkdir(parents=True)
    for stage in (*stages, "cache"):
        shutil.copytree(finished / "artifacts" / stage, folder / "artifacts" / stage)


def measured_duration(finished: Path, folder: Path, before: tuple[str, ...], stage: str) -> float:
    start_from(finished, folder, before)
    started = time.monotonic()
    made(folder, stage, *EXACT)
    return time.monotonic() - started


def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    short = (*FAST, "--train.epochs=1", "--train.lr=0.01")
    one, two = (load_file(made(tmp_path, "train", *short, "--nproc", n) / "dense.safetensors") for n in "12")
    assert any(not torch.equal(one[name], two[name]) for name in one)  # sums are taken in another order
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)


def test_loss_that_explodes_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    done = run_pipeline(tmp_path, "train", *FAST, "--train.lr=1e30")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("quartet: the loss is ")
    assert wait_until_gone(tmp_path) == []
    assert list((tmp_path / "artifacts").glob("train/*/manifest.json")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--recipe", "nothing"], "quartet: recipe 'nothing' not found"),
        (["train", "--nproc", "many"], "quartet: train.nproc = 'many'"),
        (["train", "--train.epochs", "0"], "quartet: train.epochs = '0'"),
        (["train", "--model.name", "resnet1"], "quartet: model.name = 'resnet1' is neither"),
        (["choose", *EXACT, "--choose.force", "best"], "quartet: choose.force = 'best' is no candidate"),
    ],
)
def test_wrong_value_is_one_line_with_status_2(
    finished: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    shutil.copytree(finished / "artifacts", tmp_path / "artifacts")
    done = run_pipeline(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(message)
    assert "Traceback" not in done.stderr


def test_candidate_in_which_no_layer_gains_is_left_out_and_says_so(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "artifacts", tmp_path / "artifacts")
    plain = (*FAST, "--compress.quantize.min_gain=1000", "--static.enabled=false")
    done = run_pipeline(tmp_path, "choose", *plain, "--choose.force=dynamic")
    *_, refused = lines = done.stderr.splitlines()
    assert refused == "quartet: choose.force = 'dynamic' is no candidate; use one of fp32, pruned"
    assert [line.split(":")[1] for line in lines if "no candidate" in line][:2] == [
        " no candidate dynamic",
        " no candidate pruned-dynamic",
    ]


def test_metrics_of_the_run_are_kept_beside_the_artifacts(finished: Path) -> None:
    (lines,) = (finished / "artifacts" / "runs").glob("train-*/metrics.jsonl")
    assert [json.loads(line)["epoch"] for line in lines.read_text().splitlines()] == [1, 2, 3]


def test_own_folders_and_own_network_train(tmp_path: Path) -> None:
    """A two-class folder of one's own, through to the archive: training, metrics and top-k with few classes."""
    from PIL import Image

    for name, colour in {"crow": (10, 10, 10), "swan": (240, 240, 240)}.items():
        (tmp_path / "birds" / "train" / name).mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (20, 30), colour).save(tmp_path / "birds" / "train" / name / f"{number}.jpg")
    own = ["--data.root=birds", "--data.height=16", "--data.width=16", "--data.resize=16", "--model.name=lenet"]
    own += ["--train.epochs=2", "--train.batch_size=8", "--compress.recover.epochs=1", "--compress.prune.round_to=8"]
    archive = made(tmp_path, "package", "--recipe", "imagefolder", *own, "--choose.rounds=3")
    assert archive.name == "images.mar"
    labels = load_artifact(archive.parent).manifest.data["labels"]
    assert labels == ["crow", "swan"]
