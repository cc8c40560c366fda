"""The command line: each mistake is one line and an exit status."""

import ast
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import serving
from serving.__main__ import main
from tests.colour import colour_archive
from tests.stacks import free_port, private_run_dir


@pytest.fixture(autouse=True)
def base() -> Iterator[Path]:
    with private_run_dir() as folder:
        yield folder


def complaint(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Run a command that must fail; return its status and the one line that it printed."""
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    return status, lines[0]


def test_missing_archive_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, line = complaint(capsys, "start", "--mar", tmp_path / "x.mar")
    assert status == 2
    assert line.startswith(f"serving start: no archive at {tmp_path}/x.mar")


@pytest.mark.parametrize("damage", ["no zip at all", "truncated"])
def test_corrupt_archive_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x.mar"
    whole = colour_archive(tmp_path).read_bytes() if damage == "truncated" else b""
    path.write_bytes(whole[:-100] if whole else b"no zip")
    status, line = complaint(capsys, "start", "--mar", path)
    assert status == 2
    assert f"{path} is not a readable archive" in line


def test_port_in_use_is_one_line_that_names_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, line = complaint(capsys, "start", "--mar", colour_archive(tmp_path), "--port", port)
    assert status == 2
    assert f"port {port} is in use" in line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["start", "--mar", "x", "--replicas", "0"], "--replicas: '0' is not a whole number of at least 1"),
        (["start", "--mar", "x", "--replicas", "two"], "--replicas: 'two' is not"),
        (["start", "--mar", "x", "--workers", "1.5"], "--workers: '1.5' is not"),
        (["start", "--mar", "x", "--port", "70000"], "--port: '70000' is not a port"),
        (["start"], "required: --mar"),
        (["serve"], "invalid choice: 'serve'"),
        ([], "required: COMMAND"),
    ],
)
def test_wrong_option_is_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    status, line = complaint(capsys, *arguments)
    assert status == 2
    assert named in line


def test_demo_image_that_is_missing_is_found_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, line = complaint(capsys, "start", "--mar", colour_archive(tmp_path), "--image", tmp_path / "x.png")
    assert (status, line) == (2, f"serving start: no image at {tmp_path}/x.png")


@pytest.mark.parametrize("command", ["status", "logs", "predict"])
def test_asking_a_stack_that_is_not_there_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    (tmp_path / "x.png").touch()
    port = free_port()
    image = ["--image", tmp_path / "x.png"] if command == "predict" else []
    status, line = complaint(capsys, command, "--port", port, *image)
    assert (status, f"nothing runs on port {port}" in line) == (1, True)


def test_stack_of_another_version_is_one_line_and_its_logs_can_be_read(
    capsys: pytest.CaptureFixture[str], base: Path
) -> None:
    port = free_port()
    (base / str(port) / "logs").mkdir(parents=True)
    (base / str(port) / "stack.json").write_text("{}")
    (base / str(port) / "logs" / "replica-0.log").write_text("its last words\n")
    status, line = complaint(capsys, "status", "--port", port)
    assert (status, line.startswith(f"serving status: {base}/{port}/stack.json is of another version")) == (1, True)
    assert main(["logs", "--port", str(port)]) == 0
    assert capsys.readouterr().out == "==> logs/replica-0.log <==\nits last words\n"


def test_run_directory_with_a_space_is_one_line(
    capsys: pytest.CaptureFixture[str], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUARTET_RUN_DIR", f"{base}/my runs")
    status, line = complaint(capsys, "start", "--mar", colour_archive(tmp_path), "--port", free_port())
    assert (status, f"run directory '{base}/my runs/" in line) == (2, True)


def test_help_says_where_the_options_are_and_names_every_variable_that_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "python -m serving COMMAND --help" in shown
    sources = "".join(path.read_text() for path in Path(serving.__file__).parent.glob("*.py"))
    read = set(re.findall(r'os\.environ\.get\("(QUARTET_\w+)"', sources))
    assert read == {"QUARTET_RUN_DIR", "QUARTET_JAVA", "QUARTET_HAPROXY"}
    assert {name for name in read if name not in shown} == set()


def test_stopping_nothing_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert main(["stop", "--port", str(port)]) == 0
    assert capsys.readouterr().out == f"nothing runs on port {port}\n"


def test_serving_needs_neither_the_pipeline_nor_torch() -> None:
    imported: set[str] = set()
    for path in Path(serving.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.split(".")[0])
    assert not imported & {"pipeline", "torch", "torchvision", "tests"}


def test_command_line_starts_without_loading_torch() -> None:
    code = "import sys, serving.__main__; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
