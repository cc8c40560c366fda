"""What make's targets run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline import make
from pipeline.errors import PipelineError
from pipeline.make import Values, main, read_values, run_target

ROOT = Path(make.__file__).resolve().parent.parent
NOTHING = Values()
PIPELINE = [sys.executable, "-m", "pipeline"]
SERVING = [sys.executable, "-m", "serving"]
# A make target whose every stage is the script that is named first.
TARGET = """
import sys
from pipeline import make
make.pipeline_command = lambda stage, values: [sys.executable, sys.argv[1]]
sys.exit(make.main(sys.argv[2]))
"""
# A command that takes its time to clean up, as one that has replicas to stop.
SLOW = """
import signal, sys, time
from pathlib import Path
def clean(number, frame):
    time.sleep(0.8)
    Path("cleaned").write_text(str(number))
    sys.exit(0)
signal.signal(signal.SIGINT, clean)
signal.signal(signal.SIGTERM, clean)
Path("started").touch()
time.sleep(60)
"""


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Replace running a command by noting it; a stage prints a path."""
    noted: list[list[str]] = []
    (tmp_path / "held-out-7.png").touch()

    def last_line(command: list[str]) -> str:
        noted.append(command)
        return str(tmp_path / "digits.mar")

    monkeypatch.setattr(make, "_run", noted.append)
    monkeypatch.setattr(make, "_last_line_of", last_line)
    return noted


def test_args_are_split_like_words_of_a_shell() -> None:
    values = read_values({"ARGS": "--data.root 'my folder' --train.lr 0.1", "RECIPE": "it's $HOME.toml"})
    assert values.args == ("--data.root", "my folder", "--train.lr", "0.1")
    assert values.recipe == "it's $HOME.toml"


def test_open_quote_in_args_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ARGS", "--data.root 'my folder")
    assert main("train") == 2
    assert capsys.readouterr().err == "ARGS=--data.root 'my folder: no closing quotation; close the quote\n"


@pytest.mark.parametrize("target", ["train", "serve"])
@pytest.mark.parametrize(
    ("name", "value", "largest"),
    [("REPLICAS", "abc", 999), ("REPLICAS", "0", 999), ("PORT", "65536", 65535), ("PORT", "80 ", 65535)],
)
def test_number_that_serving_would_refuse_is_refused_before_anything_is_built(
    name: str,
    value: str,
    largest: int,
    target: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    commands: list[list[str]],
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.delenv("ARGS", raising=False)
    assert main(target) == 2
    assert capsys.readouterr().err == f"{name}={value} will not do; use a whole number from 1 to {largest}\n"
    assert commands == []


def test_predict_without_an_image_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("IMAGE", raising=False)
    monkeypatch.delenv("ARGS", raising=False)
    assert main("predict") == 2
    assert capsys.readouterr().err == "which image? make predict IMAGE=path\n"


@pytest.mark.parametrize(
    ("verb", "passed"), [("stop", []), ("status", ["--json"]), ("logs", ["--json"]), ("predict", ["--json"])]
)
def test_stop_leaves_the_arguments_to_the_targets_after_it(
    verb: str, passed: list[str], commands: list[list[str]]
) -> None:
    run_target(verb, replace(NOTHING, image="x.png", args=("--json",)))
    image = ["--image", "x.png"] if verb == "predict" else []
    assert commands == [[*SERVING, verb, *image, *passed]]


def test_only_what_was_given_is_passed_on(commands: list[list[str]]) -> None:
    run_target("train", NOTHING)
    run_target("stop", NOTHING)
    assert commands == [[*PIPELINE, "train"], [*SERVING, "stop"]]


@pytest.mark.parametrize(
    ("target", "stage"), [("train", "train"), ("compress", "choose"), ("package", "package"), ("bench", "bench")]
)
def test_stages_get_recipe_processes_and_overrides(target: str, stage: str, commands: list[list[str]]) -> None:
    run_target(target, Values("a b.toml", nproc="4", replicas="3", port="81", image="", args=("--train.epochs", "1")))
    assert commands == [[*PIPELINE, stage, "--recipe", "a b.toml", "--nproc", "4", "--train.epochs", "1"]]


@pytest.mark.parametrize(("target", "forced"), [("compress", True), ("train", True), ("bench", False)])
def test_force_makes_a_stage_again_and_means_nothing_to_what_only_looks(
    target: str, forced: bool, commands: list[list[str]]
) -> None:
    run_target(target, read_values({"FORCE": "1", "ARGS": "--train.epochs 1"}))
    assert ("--force" in commands[0]) is forced
    assert commands[0][-2:] == ["--train.epochs", "1"]


@pytest.mark.parametrize("value", ["", "0"])
def test_no_force_is_none(value: str) -> None:
    assert not read_values({"FORCE": value}).force


def test_force_that_is_no_switch_is_refused() -> None:
    with pytest.raises(PipelineError, match="FORCE=yes will not do; FORCE=1"):
        read_values({"FORCE": "yes"})


@pytest.mark.parametrize(("target", "stage"), [("compress", "choose"), ("bench", "bench")])
def test_graph_and_images_of_the_users_are_passed_on(target: str, stage: str, commands: list[list[str]]) -> None:
    values = read_values({"ONNX": "my file.onnx", "DATA": "photos", "ARGS": "--onnx.scale 1"})
    run_target(target, values)
    assert commands == [[*PIPELINE, stage, "--onnx", "my file.onnx", "--data", "photos", "--onnx.scale", "1"]]


def test_serve_tries_the_archive_that_package_names_with_the_held_out_image(
    commands: list[list[str]], tmp_path: Path
) -> None:
    run_target("serve", replace(NOTHING, recipe="digits", replicas="3", port="81"))
    package, start = commands
    assert package == [*PIPELINE, "package", "--recipe", "digits"]
    assert start[:5] == [*SERVING, "start", "--mar"]
    assert start[5:7] == [str(tmp_path / "digits.mar"), "--image"]
    assert start[7:] == [str(tmp_path / "held-out-7.png"), "--replicas", "3", "--port", "81"]


def test_serve_tries_the_image_that_the_user_gives(commands: list[list[str]]) -> None:
    run_target("serve", replace(NOTHING, image="x y.png"))
    assert commands[1][-2:] == ["--image", "x y.png"]


def test_verify_serves_first_and_asks_the_same_port(commands: list[list[str]]) -> None:
    run_target("verify", replace(NOTHING, recipe="digits", port="81"))
    assert [command[2:4] for command in commands] == [
        ["pipeline", "package"],
        ["serving", "start"],
        ["pipeline", "verify"],
    ]
    assert commands[-1] == [*PIPELINE, "verify", "--recipe", "digits", "--port", "81"]


def test_predict_sends_the_image_to_the_port(commands: list[list[str]]) -> None:
    run_target("predict", replace(NOTHING, port="81", image="it's.png"))
    assert commands == [[*SERVING, "predict", "--port", "81", "--image", "it's.png"]]


def test_tests_get_the_arguments_alone(commands: list[list[str]]) -> None:
    run_target("test", replace(NOTHING, nproc="2", port="81", args=("-m", "not e2e")))
    assert commands == [[sys.executable, "-m", "pytest", "-m", "not e2e"]]


def test_last_line_of_output_is_the_path_of_what_was_made() -> None:
    assert make._last_line_of([sys.executable, "-c", "print('talk'); print('a/b.mar')"]) == "a/b.mar"


@pytest.mark.parametrize(
    ("code", "status"), [("raise SystemExit(3)", 3), ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137)]
)
def test_exit_status_of_the_command_is_kept(code: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "pipeline_command", lambda stage, values: [sys.executable, "-c", code])
    monkeypatch.delenv("ARGS", raising=False)
    assert main("train") == status


@pytest.fixture(params=["train", "serve"])
def working(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a target in a process group of its own, and wait until its first command is at work."""
    (tmp_path / "slow.py").write_text(SLOW)
    command = [sys.executable, "-c", TARGET, "slow.py", request.param]
    environment = {name: value for name, value in os.environ.items() if name != "ARGS"}
    environment["PYTHONPATH"] = str(ROOT)
    with subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True) as process:
        while not (tmp_path / "started").exists() and process.poll() is None:
            time.sleep(0.02)
        yield process
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_ctrl_c_waits_until_the_command_has_cleaned_up(working: subprocess.Popen[bytes], tmp_path: Path) -> None:
    os.killpg(working.pid, signal.SIGINT)  # a terminal sends it to every process of the group
    assert working.wait(timeout=20) == 130
    assert (tmp_path / "cleaned").read_text() == str(int(signal.SIGINT))


def test_sigterm_is_passed_on_and_waited_for(working: subprocess.Popen[bytes], tmp_path: Path) -> None:
    working.terminate()
    assert working.wait(timeout=20) == 143
    assert (tmp_path / "cleaned").read_text() == str(int(signal.SIGTERM))
