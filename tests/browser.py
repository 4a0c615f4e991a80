"""A headless Chromium for tests. It reaches this machine only, so that a page that needs the network fails."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
SECONDS = 60  # the most that a page may take
PHONE = 390  # CSS pixels


def what_is_missing() -> str:
    """What a test in a browser lacks here, in a line; "" if nothing."""
    if importlib.util.find_spec("selenium") is None:
        return "selenium isn't installed: pip install -r requirements-site.txt"
    if not CHROMIUM or not DRIVER:
        return "no Chromium with its driver: apt-get install chromium chromium-driver"
    return ""


@contextlib.contextmanager
def chromium(width: int = 1280, height: int = 1000) -> Iterator[Any]:
    """selenium's driver of a browser with an empty profile, which ends with the block."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in (
        "--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        f"--window-size={width},{height}",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1",
        *(["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []),
    ):  # fmt: skip
        options.add_argument(argument)
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    try:
        driver.set_page_load_timeout(SECONDS)
        driver.set_script_timeout(SECONDS)
        yield driver
    finally:
        driver.quit()


def as_phone(driver: Any) -> None:
    """From now on pages are as wide as a phone."""
    metrics = {"width": PHONE, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def errors(driver: Any) -> list[str]:
    """What the console has said since the last call, if it is an error."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
