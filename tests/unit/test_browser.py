"""Tests pages in a browser: every chart has its size, no element sticks out or covers its neighbour, and dark is dark.

The page stays unchanged, policy included: an outer page holds it in frames of several widths and measures them.
"""

import html
import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.run_directory import write_run

from ulysses_cli.report import run_summary
from ulysses_cli.report.page import drawing, run_page
from ulysses_cli.report.page.charts import Mark, Series, draw_bars, draw_lines, draw_stack
from ulysses_cli.report.page.page import Chart, PageSection, make_page

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium: apt-get install chromium")
WIDTHS = (340, 768, 1280)
LIMIT_SECONDS = 90
MEASURE = """
addEventListener('load', () => {
  const frames = [...document.querySelectorAll('iframe')].map(frame => {
    const page = frame.contentDocument, view = frame.contentWindow, width = page.documentElement.clientWidth;
    for (const details of page.querySelectorAll('details')) details.open = true;
    const name = e => e.tagName + ' ' + e.textContent.slice(0, 40);
    const isFree = e => !e.closest('.scroll, pre, svg');
    const wide = [...page.body.querySelectorAll('*')]
      .filter(e => isFree(e) && (e.getBoundingClientRect().right > width + 1 || e.getBoundingClientRect().left < 0));
    const charts = [...page.querySelectorAll('svg')].map(svg => {
      const box = svg.getBoundingClientRect();
      const texts = [...svg.querySelectorAll('text')].map(e => [e, e.getBoundingClientRect()]);
      const outside = texts.filter(([e, r]) =>
        r.left < box.left - 1 || r.right > box.right + 1 || r.top < box.top - 1 || r.bottom > box.bottom + 1);
      const level = texts.filter(([e]) => !e.hasAttribute('transform'));
      const covered = level.flatMap(([a, r], i) => level.slice(i + 1).filter(([b, s]) =>
        Math.min(r.right, s.right) - Math.max(r.left, s.left) > 1 &&
        Math.min(r.bottom, s.bottom) - Math.max(r.top, s.top) > r.height * 0.35)
        .map(([b]) => name(a) + ' / ' + name(b)));
      return {width: box.width, height: box.height, title: svg.querySelector('title').textContent,
        outside: outside.map(([e]) => name(e)), covered, text: view.getComputedStyle(texts[0][0]).fontSize};
    });
    return {width, scroll: page.documentElement.scrollWidth, wide: wide.map(name), charts,
      paper: view.getComputedStyle(page.body).backgroundColor, ink: view.getComputedStyle(page.body).color,
      series: view.getComputedStyle(page.querySelector('svg .s0')).color,
      scripts: page.scripts.length, title: page.title};
  });
  document.body.textContent = JSON.stringify(frames);
});
"""


def browse(folder: Path, file: Path, *flags: str, is_dark: bool = False) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    common = ["--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    common += ["--disable-component-update", "--disable-sync", "--hide-scrollbars", "--enable-logging=stderr"]
    common += ["--no-sandbox"] if os.geteuid() == 0 else []
    common += ["--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=2000"]
    dark = [f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"]
    command = [BROWSER, *common, *dark, *flags, file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True)


def measure(folder: Path, page: str, *, is_dark: bool = False) -> list[dict[str, Any]]:
    source = html.escape(page)
    frames = "".join(
        f'<iframe srcdoc="{source}" style="width:{width}px;height:900px;border:0"></iframe>' for width in WIDTHS
    )
    file = folder / "frames.html"
    file.write_text(f'<!doctype html><meta charset="utf-8"><script>{MEASURE}</script><body>{frames}</body>')
    dump = browse(folder, file, "--dump-dom", is_dark=is_dark).stdout
    plan_results = re.search(r"<body>(\[.*\])</body>", dump, re.S)
    assert plan_results, dump[-2000:]
    measured: list[dict[str, Any]] = json.loads(html.unescape(plan_results[1]))
    return measured


def read_colour(text: str) -> str:
    return "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", text)[:3])


def make_gallery() -> str:
    """Makes charts at their limits: many series, long names, many bars, values that are no numbers."""
    steps, lengths = range(1, 4001), [2**power for power in range(13, 21)]
    phases, parts = ["load", "forward", "backward", "optimizer step", "save"], [f"part {i} of them" for i in range(10)]
    kernels = ["sdpa", "flash_attention_2", "flash_attention_3", "flex"]
    times = {"forward": [1.2, 0.5, 0.3, None], "backward": [3, 1.4, 0.9, 2]}
    noise = Series("a", steps, [1 + (step * 7919 % 101) / 50 if step % 1500 else math.nan for step in steps])
    flat = Series("b", steps, [2.0] * 4000)
    peaks = [
        Series(f"variant {i}, a long name", lengths, [1e9 + n * 9e4 / (i + 1) for n in lengths]) for i in range(14)
    ]
    resumed = [Mark(step, "resumed", "x") for step in (1000, 1100, 3990)]
    capacity = [Mark(80 * 2**30, "80 GiB card")]
    amount, tiny = "memory (bytes)", Series("a", [1, 2, 3], [1.0000001, 1.0000002, 1.0000003])
    charts = [
        draw_lines("Noise " * 15, [noise, flat], "step", "loss", marks=resumed),
        draw_lines("Peaks", peaks, "row (tokens)", amount, x_log=True, marks=capacity),
        draw_bars("Lengths", [f"{2**i}Ki" for i in range(12)], [12_345.0 * i for i in range(12)], "documents"),
        draw_bars("Kernels", kernels, times, "time (seconds)"),
        draw_bars("Many", [str(i) for i in range(500)], [float(i % 37) for i in range(500)], "rows"),
        draw_bars("Signs", ["a", "b", "c"], [-3.0, 1e-5, 2.0], "difference"),
        draw_stack("Ledger", phases, {part: [8e9] * 5 for part in parts}, amount),
        draw_lines("Nothing", [Series("a", [], [])], "step", "loss"),
        draw_lines("One", [Series("a", [3], [2.0])], "step", "loss"),
        draw_lines("Tiny differences", [tiny], "step", "loss"),
    ]
    return make_page("Gallery", [PageSection("Charts", [Chart(svg) for svg in charts])])


@pytest.fixture(scope="module", autouse=True)
def find_working_browser(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("first")
    (folder / "empty.html").write_text("<!doctype html><p>hello</p>")
    try:
        assert "hello" in browse(folder, folder / "empty.html", "--dump-dom").stdout
    except (subprocess.SubprocessError, AssertionError) as error:
        pytest.skip(f"chromium does not start here: {error}")


@pytest.fixture(scope="module")
def run_html(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = run_summary.load_run(write_run(tmp_path_factory.mktemp("runs") / "qwen3-8b-128k"))
    return run_page.make_run_page(run, run_summary.summarize_run(run))


def check(frames: list[dict[str, Any]], num_charts: int) -> None:
    assert [frame["width"] for frame in frames] == list(WIDTHS)
    for frame in frames:
        assert frame["scroll"] <= frame["width"], frame["wide"]
        assert not frame["wide"]
        assert not frame["scripts"]
        assert len(frame["charts"]) == num_charts
        for chart in frame["charts"]:
            assert chart["width"] > 250, chart
            assert chart["height"] > 150, chart
            assert not chart["outside"], (frame["width"], chart)
            assert not chart["covered"], (frame["width"], chart)


@pytest.mark.check
def test_a_run_and_a_gallery_fit_every_width_and_dark_is_dark(run_html: str, tmp_path: Path) -> None:
    light, dark = measure(tmp_path, run_html), measure(tmp_path, make_gallery(), is_dark=True)
    check(light, 11)
    check(dark, 10)
    looks = [[read_colour(frames[0][name]) for name in ("paper", "ink", "series")] for frames in (light, dark)]
    assert looks == [
        ["#f5f6f8", drawing.LIGHT["ink"], drawing.LIGHT_SERIES[0]],
        ["#0f1114", drawing.DARK["ink"], drawing.DARK_SERIES[0]],
    ]


@pytest.mark.check
@pytest.mark.parametrize("is_dark", [False, True])
def test_the_page_is_shown_without_a_console_message(run_html: str, tmp_path: Path, is_dark: bool) -> None:
    """A message would be seen: one that the page's policy refuses."""
    page = tmp_path / "report.html"
    page.write_text(run_html)
    done = browse(tmp_path, page, "--dump-dom", is_dark=is_dark)
    assert "CONSOLE" not in done.stderr, done.stderr
    page.write_text(run_html.replace("<main>", "<main><script>alert(1)</script>"))
    assert "CONSOLE" in browse(tmp_path, page, "--dump-dom", is_dark=is_dark).stderr
