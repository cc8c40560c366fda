"""The plot of accuracy against cost, as SVG that takes its colours and fonts from the page around it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, cos, floor, hypot, log10, pi, sin, sqrt

CHARACTER = 8.0  # width of a character of a label, in pixels; a little more than the widest fonts need
LINE = 16  # height of a label
LARGEST, SMALLEST = 22.0, 4.0  # radius of a marker
DISTANCES = (5, 12, 24, 38, 54, 72, 92, 116)  # of a label from its marker
DIRECTIONS = 24
TICKS = 5
BUDGET = "accuracy budget"
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 16, 46


@dataclass(frozen=True)
class Point:
    """One candidate."""

    name: str
    cost_ms: float
    cost_low_ms: float  # 95 % interval
    cost_high_ms: float
    top1: float  # percent
    size_bytes: int
    chosen: bool


@dataclass(frozen=True)
class Box:
    """A rectangle on the page, in pixels."""

    x: float
    y: float
    width: float
    height: float

    def overlap(self, other: "Box") -> float:
        """Return the area that both cover."""
        wide = min(self.x + self.width, other.x + other.width) - max(self.x, other.x)
        high = min(self.y + self.height, other.y + other.height) - max(self.y, other.y)
        return max(0.0, wide) * max(0.0, high)


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in cost and accuracy at once, the cheapest first."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.cost_ms, -p.top1)):
        if not kept or point.top1 > kept[-1].top1:
            kept.append(point)
    return kept


def ticks(low: float, high: float, *, count: int = TICKS) -> list[float]:
    """Return round numbers in [low, high], about `count` of them."""
    rough = (high - low) / count
    power = 10.0 ** floor(log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    return [round(number * step, 10) for number in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def radius(size_bytes: int, *, largest: int) -> float:
    """Return the radius of a marker whose area goes with the bytes."""
    return max(SMALLEST, LARGEST * sqrt(size_bytes / largest))


def place_labels(
    markers: Sequence[tuple[float, float, float]], names: Sequence[str], *, frame: Box, obstacles: Sequence[Box] = ()
) -> list[Box]:
    """Return a box for each name near its marker (x, y, radius), inside the frame and clear of all else.

    The marker in the middle of the others goes first; each name takes the nearest of the places that cover least.
    """
    discs = [Box(x - r, y - r, 2 * r, 2 * r) for x, y, r in markers]
    placed: dict[int, Box] = {}
    crowded = sorted(range(len(markers)), key=lambda i: sum(_apart(markers[i], other) for other in markers))
    for i in crowded:
        width = len(names[i]) * CHARACTER
        options = _around(markers[i], width)
        taken = [*discs, *obstacles, *placed.values()]

        def penalty(place: tuple[float, Box], taken: list[Box] = taken) -> tuple[float, float]:
            distance, box = place
            outside = box.width * box.height - box.overlap(frame)
            return round(outside + sum(box.overlap(other) for other in taken), 3), distance

        placed[i] = min(options, key=penalty)[1]
    return [placed[i] for i in range(len(markers))]


def _apart(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    return hypot(one[0] - other[0], one[1] - other[1])


def _around(marker: tuple[float, float, float], width: float) -> list[tuple[float, Box]]:
    """Return (distance, box) for places to the right, left, above, below and between, near ones first."""
    x, y, r = marker
    places: list[tuple[float, Box]] = []
    for distance in DISTANCES:
        for number in range(DIRECTIONS):
            across, down = cos(2 * pi * number / DIRECTIONS), sin(2 * pi * number / DIRECTIONS)
            middle_x = x + across * (r + distance + width / 2)
            middle_y = y + down * (r + distance + LINE / 2)
            places.append((distance, Box(middle_x - width / 2, middle_y - LINE / 2, width, LINE)))
    return places


def draw(points: Sequence[Point], *, floor_top1: float, width: int, height: int) -> str:
    """Return the plot as an SVG element; `floor_top1` is the accuracy, in percent, that the budget allows."""
    frame = Box(LEFT, TOP, width - LEFT - RIGHT, height - TOP - BOTTOM)
    highest_cost = max(p.cost_high_ms for p in points) * 1.12
    accuracies = [floor_top1, *(p.top1 for p in points)]
    margin = 0.2 + 0.25 * (max(accuracies) - min(accuracies))
    lowest, highest = min(accuracies) - margin, max(accuracies) + margin

    def x(cost_ms: float) -> float:
        return frame.x + cost_ms / highest_cost * frame.width

    def y(top1: float) -> float:
        return frame.y + (highest - top1) / (highest - lowest) * frame.height

    below = y(floor_top1)
    steps = _steps([(x(p.cost_ms), y(p.top1)) for p in frontier(points)], right=frame.x + frame.width)
    budget_name = Box(frame.x + 6, below + 2, len(BUDGET) * CHARACTER, LINE)
    whiskers = [((x(p.cost_low_ms), y(p.top1)), (x(p.cost_high_ms), y(p.top1))) for p in points]
    obstacles = [*(_around_line(*ends) for ends in (*pairwise(steps), *whiskers)), budget_name]
    parts = [
        _axes(frame, ticks(0, highest_cost, count=width // 90), ticks(lowest, min(highest, 100)), x, y),
        _budget(frame, below),
        f'<path class="frontier" d="M{"L".join(f"{at[0]:.1f} {at[1]:.1f}" for at in steps)}"/>',
        _marks(points, x, y, frame=frame, obstacles=obstacles),
    ]
    title = "Accuracy on validation images against CPU time of one image"
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="{title}">'
        + "".join(parts)
        + "</svg>"
    )


Scale = Callable[[float], float]


def _axes(frame: Box, across: Sequence[float], up: Sequence[float], x: Scale, y: Scale) -> str:
    left, right, bottom = frame.x, frame.x + frame.width, frame.y + frame.height
    lines = [f'<path class="grid" d="M{left:.1f} {y(v):.1f}H{right:.1f}"/>' for v in up]
    lines.append(f'<path class="axis" d="M{left:.1f} {bottom:.1f}H{right:.1f}"/>')
    lines += [f'<text class="tick" x="{left - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{v:g}</text>' for v in up]
    lines += [f'<text class="tick" x="{x(v):.1f}" y="{bottom + 18}" text-anchor="middle">{v:g}</text>' for v in across]
    middle = frame.y + frame.height / 2
    lines.append(f'<text class="name" x="{right:.1f}" y="{bottom + 38}" text-anchor="end">CPU ms per image</text>')
    turn = f'transform="rotate(-90 14 {middle:.1f})"'
    lines.append(
        f'<text class="name" x="14" y="{middle:.1f}" text-anchor="middle" {turn}>top-1 on validation, %</text>'
    )
    return "".join(lines)


def _budget(frame: Box, at: float) -> str:
    return (
        f'<path class="budget" d="M{frame.x:.1f} {at:.1f}H{frame.x + frame.width:.1f}"/>'
        f'<text class="budget-name" x="{frame.x + 6:.1f}" y="{at + 14:.1f}">{BUDGET}</text>'
    )


def _steps(corners: Sequence[tuple[float, float]], *, right: float) -> list[tuple[float, float]]:
    """Return the corners of the frontier: from a point on, nothing better costs less than the next one."""
    line = [corners[0]]
    for x, y in corners[1:]:
        line += [(x, line[-1][1]), (x, y)]
    return [*line, (right, line[-1][1])]


def _around_line(start: tuple[float, float], end: tuple[float, float]) -> Box:
    left, top = min(start[0], end[0]), min(start[1], end[1])
    return Box(left - 1, top - 1, abs(start[0] - end[0]) + 2, abs(start[1] - end[1]) + 2)


def _marks(points: Sequence[Point], x: Scale, y: Scale, *, frame: Box, obstacles: Sequence[Box]) -> str:
    largest = max(p.size_bytes for p in points)
    markers = [(x(p.cost_ms), y(p.top1), radius(p.size_bytes, largest=largest)) for p in points]
    labels = place_labels(markers, [p.name for p in points], frame=frame, obstacles=obstacles)
    parts: list[str] = []
    for point, (at_x, at_y, r), box in zip(points, markers, labels, strict=True):
        kind = "chosen" if point.chosen else "other"
        low, high = x(point.cost_low_ms), x(point.cost_high_ms)
        parts.append(f'<path class="whisker {kind}" d="M{low:.1f} {at_y:.1f}H{high:.1f}"/>')
        parts.append(f'<circle class="marker {kind}" cx="{at_x:.1f}" cy="{at_y:.1f}" r="{r:.1f}"/>')
        parts.append(_leader(at_x, at_y, r, box))
        middle_x, base = box.x + box.width / 2, box.y + LINE - 4
        where = f'x="{middle_x:.1f}" y="{base:.1f}" text-anchor="middle"'
        parts.append(f'<text class="label {kind}" {where}>{point.name}</text>')
    return "".join(parts)


def _leader(x: float, y: float, r: float, box: Box) -> str:
    """Draw a line from the marker to a label that is not beside it."""
    near_x = min(max(x, box.x), box.x + box.width)
    near_y = min(max(y, box.y), box.y + box.height)
    away = hypot(near_x - x, near_y - y)
    if away <= r + DISTANCES[1]:
        return ""
    start_x, start_y = x + (near_x - x) * r / away, y + (near_y - y) * r / away
    return f'<path class="leader" d="M{start_x:.1f} {start_y:.1f}L{near_x:.1f} {near_y:.1f}"/>'
