"""The cheapest candidate within the budget ships, never one that is slower than fp32; test images only confirm."""

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import pipeline.choose
import pipeline.loader
from pipeline.artifact import Artifact, StageResult, publish
from pipeline.choose import choose, decide
from pipeline.config import Recipe
from pipeline.data import Arrays, DataSet, Split
from pipeline.errors import PipelineError
from pipeline.evaluate import Candidate
from pipeline.measure import measure_interleaved
from pipeline.report.table import table_of
from pipeline.stage import Context
from serving.worker.contents import PROVIDERS
from tests.pipeline.rows import DENSE, SIX, TEST, report, row

SIDE = 8
HEAVY = 40  # matrix products of the dense graph that change nothing


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        ([row("pruned", 0.986, 2.0), row("dynamic", 0.989, 1.25)], "pruned"),
        ([row("pruned", 0.984, 2.0), row("dynamic", 0.989, 1.25)], "dynamic"),  # 0.6 points is over the budget
        ([row("pruned", 0.985, 2.0)], "pruned"),  # exactly the budget
        ([row("dynamic", 0.999, 0.9)], "fp32"),  # slower, however accurate
        ([row("dynamic", 0.990, 1.04, low=0.99)], "fp32"),  # not proven faster
        ([row("pruned", 0.988, 2.00), row("pruned-dynamic", 0.989, 1.96)], "pruned-dynamic"),  # equal cost: accuracy
        ([row("pruned", 0.988, 2.00), row("pruned-dynamic", 0.989, 1.90)], "pruned"),  # 5 % apart: cost
        ([row("pruned", 0.988, 2.0, size_bytes=9), row("pruned-dynamic", 0.988, 1.96, size_bytes=3)], "pruned-dynamic"),
        ([], "fp32"),
    ],
)
def test_choice_follows_the_rule(others: list[Candidate], chosen: str) -> None:
    assert decide([DENSE, *others], budget=0.5, force=None).name == chosen


def test_costs_are_compared_by_speed_ups_because_those_are_paired() -> None:
    noisy = replace(row("pruned", 0.988, 2.0), cost_ms=0.1)  # its median comes from rounds on a quiet machine
    assert decide([DENSE, noisy, row("static", 0.988, 2.2)], budget=0.5, force=None).name == "static"


def test_reason_is_one_line_with_what_was_gained_and_lost() -> None:
    reason = decide([DENSE, row("pruned", 0.988, 2.0, low=1.9, high=2.1)], budget=0.5, force=None).reason
    assert reason == "pruned is the cheapest within 0.5 points of fp32: 2.00x (1.90-2.10), 0.20 points lost"
    assert decide([DENSE, row("pruned", 0.995, 2.0)], budget=0.5, force=None).reason.endswith("0.50 points gained")
    assert decide([DENSE, row("pruned", 0.990, 2.0)], budget=0.5, force=None).reason.endswith("no point lost")


def test_keeping_fp32_says_why_the_others_were_not_taken() -> None:
    reason = decide([DENSE, row("dynamic", 0.990, 0.91), row("pruned", 0.9, 2.0)], budget=0.5, force=None).reason
    assert reason == "kept fp32: dynamic was 0.91x, pruned lost 9.00 points"
    assert decide([DENSE], budget=0.5, force=None).reason == "kept fp32: there is no other candidate"


def test_every_candidate_has_a_verdict() -> None:
    verdicts = {
        r["name"]: r["verdict"] for r in report(*SIX, row("other", 0.99, 1.1, low=0.98, high=1.2))["candidates"]
    }
    assert verdicts == {
        "fp32": "the baseline",
        "dynamic": "slower than fp32",
        "static": "dearer than pruned-dynamic",
        "pruned": "costs the same as pruned-dynamic",
        "pruned-dynamic": "ships",
        "pruned-static": "loses more than 0.5 points",
        "other": "not proven faster than fp32",
    }


def test_forced_candidate_that_is_slower_ships_and_says_so_loudly() -> None:
    made = report(DENSE, row("dynamic", 0.5, 0.4), force="dynamic")
    assert made["choice"] == {"name": "dynamic", "reason": "dynamic was asked for with choose.force"}
    assert made["notes"] == [
        "warning: dynamic is SLOWER than fp32: 0.40x, and ships only because it was asked for",
        "warning: dynamic LOSES 49.00 points on validation images, more than 0.5",
    ]
    assert report(*SIX)["notes"] == []


def test_verdicts_beside_a_forced_candidate_do_not_call_it_the_best() -> None:
    verdicts = {r["name"]: r["verdict"] for r in report(*SIX, force="static")["candidates"]}
    assert verdicts["pruned"] == "cheaper than static, which was asked for"
    assert verdicts["static"] == "ships"


def test_loss_on_test_images_that_is_proven_over_the_budget_is_a_warning() -> None:
    lost = replace(TEST, difference=-4.0, difference_low=-7.0, difference_high=-1.5)
    assert report(*SIX, test=lost)["notes"] == [
        "warning: pruned-dynamic LOSES 4.00 points (1.50-7.00) on test images, more than 0.5"
    ]


def test_report_holds_rows_conditions_and_the_result_on_test_images() -> None:
    made = report(*SIX)
    assert made["candidates"][0] == asdict(DENSE) | {"verdict": "the baseline"}
    assert made["test"] == asdict(TEST)
    where = made["conditions"]
    assert (where["threads"], where["batch_size"], where["rounds"], where["settled"]) == (1, 1, 50, 0.999)
    assert where["cpu"]["name"]
    assert where["warm_up"] == "the first call is reported apart, 6 more are not counted"


def graph(*, heavy: int, corner: float) -> bytes:
    """Return a classifier of 8x8 pixels: bright at pixel 1 is class 1, unless a bright corner weighs against it."""
    weights = np.zeros((SIDE * SIDE, 2), np.float32)
    weights[1, 1], weights[0, 1] = 1, -corner
    constants = {"net.fc.weight": weights, "bias": np.array([100, 0], np.float32), "flat": np.array([-1, SIDE * SIDE])}
    nodes = [
        helper.make_node("Cast", ["images"], ["cast"], to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["cast", "flat"], ["x0"]),
    ]
    for number in range(heavy):
        constants[f"same{number}"] = np.eye(SIDE * SIDE, dtype=np.float32)
        nodes.append(helper.make_node("MatMul", [f"x{number}", f"same{number}"], [f"x{number + 1}"]))
    nodes += [
        helper.make_node("Gemm", [f"x{heavy}", "net.fc.weight", "bias"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"]),
    ]
    images = helper.make_tensor_value_info("images", TensorProto.UINT8, ["N", SIDE, SIDE, 1])
    answers = helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["N", 2])
    initializers = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    made = helper.make_graph(nodes, "tiny", [images], [answers], initializers)
    opset = helper.make_opsetid("", 20)
    data: bytes = helper.make_model(made, opset_imports=[opset], ir_version=10).SerializeToString()
    assert onnx.load_from_string(data)
    return data


def split(*, corner: int) -> Split:
    """Return 40 images, every second one bright at pixel 1."""
    pixels = np.zeros((40, SIDE, SIDE), np.uint8)
    pixels[1::2, 0, 1] = 200
    pixels[:, 0, 0] = corner
    pixels[:, 7, 7] = np.arange(40)
    return Split(Arrays(pixels), np.arange(40), np.arange(40) % 2, f"corner {corner}")


RECIPE = {
    "data": {"name": "digits", "height": SIDE, "width": SIDE, "channels": 1},
    "model": {"name": "lenet"},
    "train": {"epochs": 1, "batch_size": 8, "lr": 0.1},
    "compress": {"recover": {"epochs": 1, "lr": 0.1}},
    "choose": {"rounds": 5},
    "package": {"name": "tiny"},
}


def exported(folder: Path) -> Artifact:
    """Publish a dense graph and a cheap one that answers alike, except for images with a bright corner."""

    def work(out: Path) -> StageResult:
        (out / "fp32.onnx").write_bytes(graph(heavy=HEAVY, corner=0))
        (out / "pruned.onnx").write_bytes(graph(heavy=0, corner=1000))
        (out / "dynamic.onnx").write_bytes(graph(heavy=2 * HEAVY, corner=0))
        models: dict[str, dict[str, Any]] = {"fp32": {}, "pruned": {}, "dynamic": {}}
        return StageResult(data={}, models=models, report={"notes": ["no candidate static"]})

    facts: dict[str, Any] = {"source": "", "config": {}, "parent": None, "versions": {}, "data": {}}
    return publish(folder, stage="export", facts=facts, work=work)


def chosen(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, test: Split, force: str | None = None, provider: str = "cpu"
) -> StageResult:
    dataset = DataSet(("dark", "bright"), train=split(corner=0), val=split(corner=0), test=test)
    monkeypatch.setattr(pipeline.choose, "open_dataset", lambda _config, *, cache: dataset)
    changed = {"choose": {"rounds": 5, "force": force}, "export": {"provider": provider}}
    recipe = Recipe.model_validate(RECIPE | changed)
    out = folder / "out"
    out.mkdir()
    return choose(Context(recipe, exported(folder), out, folder / "resume", folder / "cache", folder / "telemetry"))


def test_test_images_confirm_the_choice_and_cannot_change_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, corner in (("kind", 0), ("adverse", 255)):
        (tmp_path / name).mkdir()
        result = chosen(tmp_path / name, monkeypatch, test=split(corner=corner))
        assert list(result.models) == ["pruned"]
        assert (tmp_path / name / "out" / "model.onnx").read_bytes() == graph(heavy=0, corner=1000)
        expected = {"kind": (1.0, 1.0, 0.0), "adverse": (1.0, 0.5, -50.0)}[name]
        test = result.report["test"]
        assert (test["dense_top1"], test["top1"], test["difference"]) == expected
    assert [note[:31] for note in result.report["notes"]] == ["warning: pruned LOSES 50.00 poi"]


def test_test_split_is_opened_after_the_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    opened, decided = pipeline.loader.open_images, pipeline.choose.decide

    def open_images(images: Split, *args: object, **options: object) -> object:
        done.append("test" if images.digest == "corner 255" else "validation")
        return opened(images, *args, **options)  # type: ignore[arg-type]

    def decide(*args: object, **options: object) -> object:
        done.append("decide")
        return decided(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(pipeline.choose, "open_images", open_images)
    monkeypatch.setattr(pipeline.choose, "decide", decide)
    chosen(tmp_path, monkeypatch, test=split(corner=255))
    assert list(dict.fromkeys(done)) == ["validation", "decide", "test"]
    assert done[-1] == "test"


def test_stage_publishes_one_model_and_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = chosen(tmp_path, monkeypatch, test=split(corner=0))
    assert result.metrics == {
        "fp32_val_top1": 1.0,
        "pruned_val_top1": 1.0,
        "dynamic_val_top1": 1.0,
        "fp32_test_top1": 1.0,
        "pruned_test_top1": 1.0,
    }
    rows = {r["name"]: r for r in result.report["candidates"]}
    assert rows["pruned"]["speedup"] > 1.5
    assert rows["pruned"]["parameters"] == SIDE * SIDE * 2 + 2
    assert rows["pruned"]["nonzero_parameters"] == 3
    assert rows["fp32"]["size_bytes"] > HEAVY * SIDE**4 * 4
    assert result.report["operators"]["fp32"]["MatMul"] == HEAVY
    assert "MatMul" not in result.report["operators"]["pruned"]
    assert result.report["earlier_notes"] == ["no candidate static"]
    assert "pruned ships" in (tmp_path / "out" / "report" / "report.html").read_text()


def test_forcing_what_is_no_candidate_names_those_that_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PipelineError, match="'int4' is no candidate; use one of fp32, pruned"):
        chosen(tmp_path, monkeypatch, test=split(corner=0), force="int4")


def test_on_a_gpu_what_it_has_no_kernels_for_is_left_out_and_time_is_the_clocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the GPU: the CPU under its name."""
    monkeypatch.setitem(PROVIDERS, "cuda", ())
    clocks: list[object] = []
    measured = measure_interleaved

    def measure(*args: Any, clock: Any, **options: Any) -> Any:
        clocks.append(clock)
        return measured(*args, clock=clock, **options)

    monkeypatch.setattr("pipeline.evaluate.measure_interleaved", measure)
    report = chosen(tmp_path, monkeypatch, test=split(corner=0), provider="cuda").report
    assert {row["name"] for row in report["candidates"]} == {"fp32", "pruned"}
    assert report["earlier_notes"][-1] == "there is no candidate dynamic: cuda has no kernels for it"
    assert report["conditions"]["provider"] == "cuda"
    assert report["conditions"]["clock"].startswith("wall time until the GPU's answer is back; rounds of 20 ms")
    assert set(clocks) == {time.perf_counter}
    assert report["operators"]["fp32"]["MatMul"] == HEAVY
    page = (tmp_path / "out" / "report" / "report.html").read_text()
    assert "GPU time per image" in page
    assert "As they are in the files." in page
    assert "GPU ms/image" in str([column.header for column in table_of(report).columns])


def test_on_the_cpu_every_candidate_is_measured_in_cpu_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = chosen(tmp_path, monkeypatch, test=split(corner=0)).report
    assert {row["name"] for row in report["candidates"]} == {"fp32", "pruned", "dynamic"}
    assert report["conditions"]["clock"].startswith("process CPU time; ")
