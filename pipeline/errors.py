"""The one exception that people are meant to see."""


class PipelineError(Exception):
    """A user's mistake or a failed check: the message names the field, the value and the remedy, on one line.

    Printed without a trace by `python -m pipeline`, which then exits with `exit_status`: 2 for a value that the
    user must change, 1 for a check that failed on good input.
    """

    def __init__(self, message: str, *, exit_status: int = 2) -> None:
        super().__init__(message)
        self.exit_status = exit_status
