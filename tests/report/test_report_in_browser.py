"""The page as a person sees it: headless Chromium, light and dark, a desk and a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_runs import write

DESK, PHONE = 1280, 390
LEAST_CONTRAST = 4.5
"""WCAG AA for text of ordinary size."""

VISIBLE_CHARTS = """
return [...document.querySelectorAll("svg.chart")].filter(chart => chart.checkVisibility())
  .map(chart => { const box = chart.getBoundingClientRect(); return [box.width, box.height, box.left, box.right]; });
"""
FIGURES_WITHOUT_A_PICTURE = """
return [...document.querySelectorAll("figure")].filter(figure => figure.checkVisibility())
  .filter(figure => ![...figure.querySelectorAll("svg[role=img]")].some(svg => svg.checkVisibility()))
  .map(figure => figure.querySelector("h3").textContent);
"""
LOW_CONTRAST = """
const [least] = arguments;
const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
const rgba = colour => {
  canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
};
const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
const ground = element => {
  const layers = [];
  for (let e = element; e; e = e.parentElement) {
    const colour = rgba(getComputedStyle(e).backgroundColor);
    if (colour[3] > 0) layers.push(colour);
    if (colour[3] === 1) break;
  }
  return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
};
const light = c => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
const luminance = c => 0.2126 * light(c[0]) + 0.7152 * light(c[1]) + 0.0722 * light(c[2]);
const found = [];
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  if (!own || !element.checkVisibility() || ["SCRIPT", "STYLE", "title"].includes(element.tagName)) continue;
  if (element.classList.contains("unseen") || element.classList.contains("skip")) continue;
  const style = getComputedStyle(element);
  const back = ground(element.closest("svg") ? element.closest("svg").parentElement : element);
  const ink = over(rgba(element.closest("svg") ? style.fill : style.color), back);
  const [high, low] = [luminance(ink), luminance(back)].sort((x, y) => y - x);
  const ratio = (high + 0.05) / (low + 0.05);
  if (ratio < least) found.push([element.tagName, element.className.baseVal ?? element.className, ratio]);
}
return found;
"""


@pytest.fixture(scope="module")
def pages(single: Path, several: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    return {
        "single": write(single, folder / "single.html"),
        "several": write(several, folder / "several.html"),
    }


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
@pytest.mark.parametrize("which", ["single", "several"])
def test_the_page_fits_shows_its_figures_and_complains_of_nothing(browser, pages, which, width, scheme):
    look(browser, pages[which], width, scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    charts = browser.execute_script(VISIBLE_CHARTS)
    assert len(charts) >= 4
    for chart_width, height, left, right in charts:
        assert chart_width > 200
        assert height > 80
        assert left >= 0
        assert right <= width
    assert browser.execute_script(FIGURES_WITHOUT_A_PICTURE) == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("which", ["single", "several"])
def test_every_text_stands_out_from_its_ground(browser, pages, which, scheme):
    look(browser, pages[which], DESK, scheme)
    browser.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert browser.execute_script(LOW_CONTRAST, LEAST_CONTRAST) == []


def test_the_contrast_test_can_fail(browser, pages):
    look(browser, pages["single"], DESK, "light")
    browser.execute_script("document.body.style.setProperty('--soft', '#999')")
    browser.execute_script("document.documentElement.style.setProperty('--soft', '#999')")
    assert len(browser.execute_script(LOW_CONTRAST, LEAST_CONTRAST)) > 5


def test_light_and_dark_follow_the_system_and_the_button_overrules_it(browser, pages):
    look(browser, pages["single"], DESK, "dark")
    browser.execute_script("localStorage.clear()")
    look(browser, pages["single"], DESK, "dark")
    dark = background(browser)
    look(browser, pages["single"], DESK, "light")
    light = background(browser)
    assert dark != light
    button = browser.find_element("id", "theme")
    seen = []
    for _ in range(3):
        button.click()
        seen.append((button.text, background(browser)))
    assert seen == [("Theme: light", light), ("Theme: dark", dark), ("Theme: auto", light)]
    button.click()
    button.click()
    look(browser, pages["single"], DESK, "light")
    assert background(browser) == dark
    browser.execute_script("localStorage.clear()")


def test_the_keyboard_reaches_content_theme_and_numbers(browser, pages):
    look(browser, pages["single"], DESK, "light")
    from selenium.webdriver.common.keys import Keys

    reached = []
    for _ in range(12):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(browser.execute_script("return document.activeElement.outerHTML.slice(0, 60)"))
    assert 'class="skip"' in reached[0]
    assert 'id="theme"' in reached[1]
    assert any("<summary" in element for element in reached)
    summary = next(s for s in browser.find_elements("css selector", "summary"))
    summary.send_keys(Keys.ENTER)
    assert summary.find_element("xpath", "..").get_attribute("open") is not None


def test_the_printed_page_has_its_charts_and_no_buttons(browser, pages):
    look(browser, pages["single"], DESK, "dark")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": []})
    assert background(browser) == "rgb(255, 255, 255)"
    assert len(browser.execute_script(VISIBLE_CHARTS)) >= 4
    assert not browser.find_element("id", "theme").is_displayed()
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


def test_without_scripts_nothing_but_the_button_is_missing(browser, pages):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        look(browser, pages["single"], DESK, "light")
        assert not browser.find_element("id", "theme").is_displayed()
        assert len(browser.find_elements("css selector", "figure")) >= 5
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
