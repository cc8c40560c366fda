"""The run directory: who may own it, and the facts shared through it."""

import os
import time
from pathlib import Path

import pytest

from serving import rundir
from serving.errors import StackError, UserError
from serving.rundir import ReplicaState, WatchState


def test_run_directory_is_private_and_belongs_to_user_and_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUARTET_RUN_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_dir = rundir.run_dir_of(8080)
    assert run_dir == tmp_path / f"quartet-{os.getuid()}" / "8080"
    rundir.prepare(run_dir)
    assert run_dir.stat().st_mode & 0o777 == run_dir.parent.stat().st_mode & 0o777 == 0o700


def test_run_directory_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARTET_RUN_DIR", str(tmp_path))
    assert rundir.run_dir_of(1) == tmp_path / "1"


def test_preparing_twice_changes_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "base" / "1"
    rundir.prepare(run_dir)
    (run_dir / "kept").touch()
    rundir.prepare(run_dir)
    assert (run_dir / "kept").exists()


def test_link_in_place_of_the_run_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "base").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"base is a link or belongs to another user"):
        rundir.prepare(tmp_path / "base" / "1")


def test_run_directory_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rundir.prepare(tmp_path / "base" / "1")
    monkeypatch.setattr(os, "getuid", lambda: 424242)
    with pytest.raises(UserError, match="belongs to another user; set QUARTET_RUN_DIR"):
        rundir.prepare(tmp_path / "base" / "1")


def test_open_run_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base").chmod(0o755)
    with pytest.raises(UserError, match="open to other users"):
        rundir.prepare(tmp_path / "base" / "1")


def test_run_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot create run directory .*QUARTET_RUN_DIR"):
        rundir.prepare(tmp_path / "missing" / "base" / "1")


def test_facts_are_read_as_they_were_written_and_no_partial_file_is_left(tmp_path: Path) -> None:
    state = WatchState(pid=3, starts=(1.0, 2.0), restarts=2, held=True)
    rundir.write(tmp_path / "watch.json", state)
    assert rundir.read(tmp_path / "watch.json", WatchState) == state
    assert [path.name for path in tmp_path.iterdir()] == ["watch.json"]


def test_facts_that_were_never_written_are_none(tmp_path: Path) -> None:
    assert rundir.read(tmp_path / "watch.json", WatchState) is None
    assert rundir.read_stack(tmp_path) is None


def test_report_says_who_and_when(tmp_path: Path) -> None:
    rundir.report(tmp_path, "failed", error="no memory")
    state = rundir.read(tmp_path / "state.json", ReplicaState)
    assert state is not None
    assert (state.phase, state.pid, state.error) == ("failed", os.getpid(), "no memory")
    assert abs(state.since - time.time()) < 5


@pytest.mark.parametrize("name", ["my runs", "a+b", "50%", "a,b", "Läufe", "a\nb", "$HOME", "a&b", "a'b"])
def test_run_directory_that_a_configuration_file_would_misread_is_refused_on_one_line(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(UserError, match=r"run directory .* set QUARTET_RUN_DIR to another path") as caught:
        rundir.prepare(tmp_path / name / "1")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("text", ['{"pid": 3, "colour": "red"}', '{"pid": []}', "no json", "\xff"])
def test_facts_of_another_version_are_one_line_that_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "watch.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(StackError, match=r"watch\.json is of another version of this program \(") as caught:
        rundir.read(tmp_path / "watch.json", WatchState)
    assert "\n" not in str(caught.value)
