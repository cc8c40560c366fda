"""What the machine offers, and what happens when more is asked of it."""

import pytest

from pipeline import machine
from pipeline.errors import PipelineError


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(machine, "gpu_names", lambda: ["H200"] * count)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["A", "B"]),
        ("1", ["B"]),
        ("1,0", ["B", "A"]),
        ("-1", []),
        ("", []),
        ("0,7,1", ["A"]),
        ("GPU-b", ["B"]),
    ],
)
def test_visible_gpus_are_read_as_cuda_reads_them(visible: str | None, names: list[str]) -> None:
    assert machine.visible_names([("GPU-aa", "A"), ("GPU-bb", "B")], visible) == names


def test_cpu_has_a_name_and_only_known_flags() -> None:
    facts = machine.cpu_facts()
    assert facts["name"]
    assert set(facts["flags"]) <= set(machine.SPEED_FLAGS)


@pytest.mark.parametrize(("asked", "gpus", "processes"), [(0, 4, 4), (2, 4, 2), (0, 1, 1)])
def test_one_process_for_each_gpu_unless_fewer_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: int, gpus: int, processes: int
) -> None:
    with_gpus(monkeypatch, gpus)
    assert machine.training_processes(asked, "cuda") == processes


def test_cpu_machine_trains_with_two_processes_unless_told_otherwise() -> None:
    assert [machine.training_processes(asked, "cpu") for asked in (0, 1, 3)] == [2, 1, 3]


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 2)
    with pytest.raises(PipelineError, match=r"train\.nproc = 4, but this machine has 2 GPU\(s\)"):
        machine.training_processes(4, "cuda")


def test_device_follows_the_machine_and_cuda_is_never_faked(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 1)
    assert machine.training_device("auto") == "cuda"
    with_gpus(monkeypatch, 0)
    assert machine.training_device("auto") == "cpu"
    with pytest.raises(PipelineError, match=r"train\.device = 'cuda', but there is no NVIDIA GPU"):
        machine.training_device("cuda")


def test_versions_name_what_a_result_depends_on() -> None:
    assert machine.library_versions()["torch"].startswith("2.")
