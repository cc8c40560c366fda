"""The exit status that each kind of error ends a command with."""

import pytest

from serving.errors import ServingError, StackError, UserError


@pytest.mark.parametrize(("kind", "status"), [(UserError, 2), (StackError, 1)])
def test_each_error_has_its_exit_status(kind: type[ServingError], status: int) -> None:
    assert kind("why").status == status
