"""The page stands alone: nothing is fetched, every figure is in it, and it fits a telephone."""

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.report.page import render, write_page
from tests.pipeline.rows import DENSE, SIX, report, row

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def text_of(page: str) -> str:
    """Return what a reader sees, spaces made one."""
    return " ".join(re.sub(r"<[^>]+>", " ", re.sub(r"<style>.*?</style>", "", page, flags=re.S)).split())


def test_nothing_is_fetched_and_nothing_is_run() -> None:
    page = render(report(*SIX), title="digits")
    for word in ("http:", "https:", "src=", "url(", "@import", "<script", "<link", "<img"):
        assert word not in page


def test_page_has_two_plots_and_both_colour_schemes() -> None:
    page = render(report(*SIX), title="digits")
    assert page.count("<svg") == 2
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


def test_every_candidate_has_its_figures_and_verdict() -> None:
    text = text_of(render(report(*SIX), title="digits"))
    assert "pruned-dynamic ships" in text
    assert "dynamic slower than fp32 99.00% 1.099 ± 0.010 0.91× 0.90–0.92 1.0 250 240 1.500" in text
    assert "pruned-static loses more than 0.5 points" in text
    assert "200 test images: pruned-dynamic 97.00%, fp32 98.00%" in text
    assert "no candidate other: no layer gains" in text
    assert "Right only by pruned-dynamic: 1; right only by fp32: 3." in text


def test_layers_operators_and_what_stayed_float_are_told() -> None:
    text = text_of(render(report(*SIX), title="digits"))
    assert "conv 0.6 0.3 10.0 5.0 sum 0.6 0.3 10 5" in text
    assert "QLinearConv – 2" in text
    assert "1 layer: it is too small. fc" in text
    assert "Everything: pruned has no int8 layers." in text_of(
        render(report(DENSE, row("pruned", 0.99, 2.0)) | {"float_layers": []}, title="digits")
    )


def test_conditions_are_complete() -> None:
    made = report(*SIX)
    text = text_of(render(made, title="digits"))
    where = made["conditions"]
    for word in (where["date"], where["cpu"]["name"], *where["cpu"]["flags"], *where["versions"].values()):
        assert word in text
    assert "1 thread, 1 image per call" in text
    assert "50 of each candidate; 99.9 % of bootstrap draws give the same choice" in text
    assert "100 validation, 200 test" in text


def test_page_of_a_dense_choice_says_that_fp32_was_kept() -> None:
    text = text_of(render(report(DENSE, row("dynamic", 0.99, 0.91)), title="digits"))
    assert "Kept fp32 kept fp32: dynamic was 0.91x." in text
    assert "200 test images: fp32 97.00%." in text


def test_warning_stands_at_the_top() -> None:
    page = render(report(DENSE, row("dynamic", 0.99, 0.4), force="dynamic"), title="digits")
    assert page.index('class="alarm">warning: dynamic is SLOWER') < page.index("<svg")


def test_title_is_escaped(tmp_path: Path) -> None:
    write_page(report(*SIX), tmp_path / "report" / "report.html", title="<b>")
    assert "&lt;b&gt;: pruned-dynamic ships" in (tmp_path / "report" / "report.html").read_text()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None and "CI" not in os.environ, reason="needs Chromium")
@pytest.mark.parametrize("width", [500, 1200])  # Chromium's windows are at least 500 wide; the frame below is not
def test_page_is_never_wider_than_the_window(tmp_path: Path, width: int) -> None:
    made = report(*(replace(c, size_bytes=123_456_789, parameters=30_000_000) for c in SIX))
    (tmp_path / "page.html").write_text(render(made, title="a-name-" * 4))
    inner = min(width, 400) if width < 1000 else width
    measure = "d=this.contentDocument.documentElement;document.title=[d.scrollWidth,d.clientWidth]"
    frame = f'<iframe src="page.html" style="width:{inner}px;height:900px;border:0" onload="{measure}"></iframe>'
    (tmp_path / "frame.html").write_text(f"<title>-</title><body style='margin:0'>{frame}")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += [f"--window-size={width},900", "--dump-dom", (tmp_path / "frame.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r"<title>(\d+),(\d+)</title>", shown)
    assert found is not None, shown
    assert int(found[1]) <= int(found[2]) <= inner
