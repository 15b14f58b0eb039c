"""Write pictures of all states of the page: `python tests/explorer/pictures.py FOLDER`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from explorer_pages import CHROMIUM, OPTIONS, STATES, Explorer, State
from serving import running

from roller_svc.service.app import create_app
from roller_svc.settings import Settings

SETTLE_MS = 1500  # for the other devices and the editor
WIDTHS = {"light": (390, 1280, 1920), "dark": (1280,)}


def main() -> None:
    from playwright.sync_api import sync_playwright  # not in the processes of the service, which import this module

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--state", help="this one only")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        app = create_app(Settings(store=Path(folder) / "store", workers=1), ready=True)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(OPTIONS))
        with running(app) as (_, port):
            explorer = Explorer(browser, f"http://127.0.0.1:{port}")
            for state in STATES:
                if arguments.state in (None, state.name):
                    picture(explorer, state, arguments.folder)
        browser.close()
    for fault in explorer.faults:
        print(fault)


def picture(explorer: Explorer, state: State, folder: Path) -> None:
    for theme, widths in WIDTHS.items():
        for width in widths:
            page = state.open(explorer, width, theme)
            page.wait_for_timeout(SETTLE_MS)
            page.screenshot(path=folder / f"{state.name}-{width}-{theme}.png", full_page=width == 390)
            page.context.close()


if __name__ == "__main__":
    main()
