"""Commands that look at what the stages made."""

from collections.abc import Callable

COMMANDS: dict[str, Callable[..., int]] = {}
