"""The page as a person sees it: headless Chromium, light and dark, a desk and a phone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runs import finished

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
    "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
DESK, PHONE = 1280, 390

VISIBLE_CHARTS = """
return [...document.querySelectorAll("svg.chart")].filter(chart => chart.checkVisibility())
  .map(chart => { const box = chart.getBoundingClientRect(); return [box.width, box.height, box.left, box.right]; });
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Headless Chromium by its driver. Missing, it is a skip on a desk and a failure in CI."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        reason = "no Chromium with its chromedriver here (Debian: apt-get install chromium chromium-driver)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(out=tmp_path_factory.mktemp("page") / "run").report()


def look(browser: Any, page: Path, width: int, scheme: str) -> None:
    """Open a page on a screen of some width, with a taste for light or dark."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": features})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())


def background(browser: Any) -> str:
    return browser.execute_script("return getComputedStyle(document.body).backgroundColor")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [DESK, PHONE])
def test_page_fits_its_screen_shows_its_charts_and_fetches_nothing(browser, page, width, scheme):
    look(browser, page, width, scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    charts = browser.execute_script(VISIBLE_CHARTS)
    assert len(charts) == 2
    for chart_width, height, left, right in charts:
        assert chart_width > 200
        assert height > 80
        assert left >= 0
        assert right <= width
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_page_follows_the_colours_of_the_system_and_prints_on_white(browser, page):
    look(browser, page, DESK, "dark")
    dark = background(browser)
    look(browser, page, DESK, "light")
    assert dark != background(browser)
    look(browser, page, DESK, "dark")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": []})
    assert background(browser) == "rgb(255, 255, 255)"
    assert len(browser.execute_script(VISIBLE_CHARTS)) == 2
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
