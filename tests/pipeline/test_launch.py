"""What a failing process leaves becomes one error in the calling one."""

import json
from pathlib import Path

from pipeline.launch import ERROR, _failure


def test_message_of_the_failing_process_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / ERROR).write_text(json.dumps({"message": "the loss is nan at step 3", "exit_status": 1}))
    error = _failure(tmp_path, 1)
    assert (str(error), error.exit_status) == ("the loss is nan at step 3", 1)


def test_process_that_died_without_a_word_is_reported_by_its_status(tmp_path: Path) -> None:
    assert str(_failure(tmp_path, -9)) == "the processes ended with status -9; the first error above is the cause"
