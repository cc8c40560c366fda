"""Reading the logs of a stack."""

from pathlib import Path

import pytest

from serving import logs


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "logs" / "replica-0").mkdir(parents=True)
    (tmp_path / "logs" / "haproxy.log").write_text("one\ntwo\nthree\n")
    (tmp_path / "logs" / "replica-0" / "model.log").write_text("loaded\n")
    (tmp_path / "logs" / "replica-0" / "model.1.log").write_text("rotated\n")
    return tmp_path


def test_current_logs_are_shown_and_rotated_ones_are_not(run_dir: Path) -> None:
    assert [path.name for path in logs.log_files(run_dir)] == ["haproxy.log", "model.log"]


def test_last_lines_of_each_log_stand_under_its_name(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs.show(run_dir, lines=2, follow=False)
    assert capsys.readouterr().out == "==> logs/haproxy.log <==\ntwo\nthree\n==> logs/replica-0/model.log <==\nloaded\n"


def test_following_prints_what_is_added_and_starts_over_after_a_rotation(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = run_dir / "logs" / "haproxy.log"
    contents = iter(["one\ntwo\nthree\nfour\n", "five\n"])

    def pass_time(_: float) -> None:
        content = next(contents, None)
        if content is None:
            raise KeyboardInterrupt
        log.write_text(content)

    monkeypatch.setattr("time.sleep", pass_time)
    with pytest.raises(KeyboardInterrupt):
        logs.show(run_dir, lines=1, follow=True)
    assert capsys.readouterr().out.splitlines()[-2:] == ["logs/haproxy.log: four", "logs/haproxy.log: five"]


def test_bytes_that_are_no_text_do_not_stop_the_reader(run_dir: Path) -> None:
    (run_dir / "logs" / "haproxy.log").write_bytes(b"\xff\xfe\nlast\n")
    assert logs.tail(run_dir / "logs" / "haproxy.log", lines=1) == ["last"]
