"""What make's targets run."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline import make
from pipeline.make import Values, main, read_values, run_target

NOTHING = Values(recipe="", nproc="", replicas="", port="", image="", args=())
PIPELINE = [sys.executable, "-m", "pipeline"]
SERVING = [sys.executable, "-m", "serving"]


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


def test_predict_without_an_image_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("IMAGE", raising=False)
    monkeypatch.delenv("ARGS", raising=False)
    assert main("predict") == 2
    assert capsys.readouterr().err == "which image? make predict IMAGE=path\n"


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


def test_exit_status_of_the_command_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "pipeline_command", lambda stage, values: [sys.executable, "-c", "raise SystemExit(3)"])
    monkeypatch.delenv("ARGS", raising=False)
    assert main("train") == 3
