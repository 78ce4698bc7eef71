"""Open a page in Qt's Chromium, offscreen, and print as JSON what became of it.

``python browser.py PAGE PICTURE WIDTH light|dark yes|no [SCRIPT]``: with the page's JavaScript or without. ``SCRIPT``
runs in the page at the end, in a world of its own, and its result is printed as well.
"""

from __future__ import annotations

import json
import os
import sys

PAGE, PICTURE, WIDTH, MODE, SCRIPTS = sys.argv[1:6]
SCRIPT = sys.argv[6] if len(sys.argv) > 6 else "null"
os.environ["QT_QPA_PLATFORM"] = "offscreen"
# Chromium's sandbox refuses to start for root.
os.environ["QTWEBENGINE_DISABLE_SANDBOX"] = "1"
scheme = "--blink-settings=preferredColorScheme=" + ("0" if MODE == "dark" else "1")
os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = f"--disable-gpu {scheme}"

from PyQt6.QtCore import QTimer, QUrl  # noqa: E402
from PyQt6.QtWebEngineCore import (  # noqa: E402
    QWebEnginePage,
    QWebEngineSettings,
    QWebEngineUrlRequestInfo,
    QWebEngineUrlRequestInterceptor,
)
from PyQt6.QtWebEngineWidgets import QWebEngineView  # noqa: E402
from PyQt6.QtWidgets import QApplication  # noqa: E402

FACTS = (
    "({height: document.documentElement.scrollHeight, width: document.documentElement.scrollWidth,"
    " background: getComputedStyle(document.body).backgroundColor,"
    " script: document.documentElement.classList.contains('js'), result: (SCRIPT)})"
).replace("SCRIPT", SCRIPT)
page_facts: dict[str, object] = {"messages": [], "alerts": [], "requests": []}


class Page(QWebEnginePage):
    def javaScriptConsoleMessage(self, level, message, line, source):  # type: ignore[no-untyped-def]
        page_facts["messages"].append(message)  # type: ignore[attr-defined]

    def javaScriptAlert(self, origin, message):  # type: ignore[no-untyped-def]
        page_facts["alerts"].append(message)  # type: ignore[attr-defined]


class Requests(QWebEngineUrlRequestInterceptor):
    def interceptRequest(self, info: QWebEngineUrlRequestInfo) -> None:
        page_facts["requests"].append(info.requestUrl().toString())  # type: ignore[attr-defined]


application = QApplication(sys.argv[:1])
view = QWebEngineView()
page = Page(view)
requests = Requests()
page.setUrlRequestInterceptor(requests)
view.setPage(page)
settings = view.settings()
assert settings is not None
settings.setAttribute(QWebEngineSettings.WebAttribute.JavascriptEnabled, SCRIPTS == "yes")
settings.setAttribute(QWebEngineSettings.WebAttribute.ShowScrollBars, False)
view.resize(int(WIDTH), 900)


def measured(facts: dict[str, object] | None) -> None:
    page_facts.update(facts or {})
    view.resize(int(WIDTH), min(int(str(page_facts["height"])), 4000))
    QTimer.singleShot(3000, end)


def end() -> None:
    view.grab().save(PICTURE)
    print(json.dumps(page_facts))
    application.quit()


page.loadFinished.connect(lambda _: QTimer.singleShot(500, lambda: page.runJavaScript(FACTS, 1, measured)))
view.load(QUrl.fromLocalFile(PAGE))
view.show()
application.exec()
