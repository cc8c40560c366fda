"""The rule for names that become part of a file name, of a URL and of TorchServe's registry."""

import re

from pipeline.errors import PipelineError

MAX_CHARACTERS = 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def validate_name(value: str, *, field: str) -> str:
    """Return `value` if it may name or number a model; `PipelineError` names `field`, the value and the rule."""
    if not _NAME.fullmatch(value) or len(value) > MAX_CHARACTERS:
        raise PipelineError(
            f"{field} = {value!r} cannot be used; use A-Z, a-z, 0-9, '_', '.' and '-', "
            f"beginning with a letter or a digit, at most {MAX_CHARACTERS} characters"
        )
    return value
