"""Which layers int8 hurts: the error that each causes alone, and how few have to stay float32."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Loss:
    """What one layer alone in int8 does to the answers: the mean absolute error of an answer."""

    layer: str
    error: float


def give_back(losses: Sequence[Loss], *, holds: Callable[[Collection[str]], bool]) -> tuple[Loss, ...]:
    """Return the fewest layers, worst first, without which the budget `holds`; all of them if it never does.

    The count doubles until it holds and is then bisected, so a network of n layers takes 2 log n trials.
    """
    worst = sorted(losses, key=lambda loss: -loss.error)

    def enough(count: int) -> bool:
        return count == len(worst) or holds({loss.layer for loss in worst[:count]})

    low, high = 0, min(1, len(worst))
    while not enough(high):
        low, high = high, min(2 * high, len(worst))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return tuple(worst[:high])
