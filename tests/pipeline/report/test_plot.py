"""Labels stay apart however close the candidates are, and the frontier is what nothing beats."""

from itertools import combinations

import numpy as np
import pytest

from pipeline.report.plot import Box, Point, draw, frontier, place_labels, radius, ticks

NAMES = ("fp32", "pruned", "dynamic", "static", "pruned-dynamic", "pruned-static")


def point(name: str, cost_ms: float, top1: float) -> Point:
    return Point(name, cost_ms, cost_ms * 0.98, cost_ms * 1.02, top1, 1000, chosen=name == "pruned")


@pytest.mark.parametrize("size", [(808, 358), (288, 318)])
@pytest.mark.parametrize("spread", [0.0, 6.0, 30.0])
def test_six_labels_close_together_touch_nothing(size: tuple[int, int], spread: float) -> None:
    frame = Box(56, 16, *size)
    for seed in range(5):
        centre = np.array([frame.x + frame.width / 2, frame.y + frame.height / 2])
        places = centre + np.random.default_rng(seed).uniform(-spread, spread, (6, 2))
        markers = [(float(x), float(y), r) for (x, y), r in zip(places, (18, 10, 18, 9, 10, 5), strict=True)]
        line = Box(frame.x, markers[0][1] - 1, frame.width, 2)
        boxes = place_labels(markers, NAMES, frame=frame, obstacles=[line])
        for one, other in combinations(boxes, 2):
            assert one.overlap(other) == 0
        for box in boxes:
            assert box.overlap(frame) == pytest.approx(box.width * box.height)
            assert box.overlap(line) == 0
            assert all(box.overlap(Box(x - r, y - r, 2 * r, 2 * r)) == 0 for x, y, r in markers)


def test_label_at_the_edge_turns_inwards() -> None:
    frame = Box(0, 0, 300, 200)
    (box,) = place_labels([(295, 100, 4)], ["pruned-dynamic"], frame=frame)
    assert box.x + box.width < 295


def test_frontier_is_what_no_other_beats_in_both() -> None:
    points = [point("fp32", 4, 90), point("pruned", 2, 89), point("static", 3, 88), point("dynamic", 2, 88.5)]
    assert [p.name for p in frontier(points)] == ["pruned", "fp32"]


def test_area_of_a_marker_goes_with_the_bytes() -> None:
    assert radius(250, largest=1000) == pytest.approx(radius(1000, largest=1000) / 2)
    assert radius(1, largest=1000) == 4  # still to be seen


def test_ticks_are_round_numbers_in_the_range() -> None:
    assert ticks(0, 0.42, count=5) == [0, 0.1, 0.2, 0.3, 0.4]
    assert ticks(95.7, 99.4, count=5) == [96, 97, 98, 99]
    assert ticks(99.95, 100.02, count=5) == [99.96, 99.98, 100, 100.02]


def test_every_candidate_is_drawn_and_the_chosen_one_stands_out() -> None:
    points = [point(name, 1 + i / 100, 90.0) for i, name in enumerate(NAMES)]
    picture = draw(points, floor_top1=89.5, width=360, height=380)
    assert picture.count("<circle") == 6
    assert picture.count('class="marker chosen"') == 1
    for name in NAMES:
        assert f">{name}</text>" in picture
    assert 'viewBox="0 0 360 380"' in picture
