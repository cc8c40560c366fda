"""The errors that the serving commands print as one line.

ServingError
  UserError     a mistake of the caller: exit status 2
  StackError    the stack could not do what was asked: exit status 1
"""


class ServingError(Exception):
    """Carry one line for the user; `status` is the exit status of the command."""

    status = 1


class UserError(ServingError):
    """Name the argument, its value and the remedy."""

    status = 2


class StackError(ServingError):
    """Say which part of the stack failed and its last known error."""
