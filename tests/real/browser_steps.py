"""Use the page of runs as a person does, in Debian's Chromium.

It is run with the Python of an environment that has Playwright. The first argument names the step and the second is
JSON; what was seen is printed as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
PATIENCE = 20_000


class Watched:
    """A page, with a record of its errors and requests."""

    def __init__(self, context: BrowserContext) -> None:
        self.page: Page = context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.requests: list[str] = []
        self.wrong: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.wrong.append(f"console: {message.text}"))
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("dialog", self._dialog)
        self.page.on("popup", lambda popup: self.wrong.append(f"popup: {popup.url}"))

    def _dialog(self, dialog: Any) -> None:
        self.wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def done(self, origin: str) -> dict[str, Any]:
        return {
            "wrong": [*self.wrong],
            "outside": [url for url in self.requests if not url.startswith((origin, "data:"))],
        }


@contextmanager
def browser(program: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=OPTIONS.split())
        try:
            yield found
        finally:
            found.close()


def shown(page: Page) -> None:
    """Wait until a page is drawn."""
    expect(page.locator("#title")).not_to_have_text("hermes-rl")
    expect(page.locator("main")).not_to_have_text("Reading …")


def view(page: Page, name: str) -> None:
    """Open a view of the page by its tab."""
    page.locator("#tabs a").filter(has_text=name).click()
    expect(page.locator("#tabs a[aria-current]")).to_contain_text(name)


def open_all(page: Page) -> None:
    folded = page.locator("main details:not([open]) > summary")
    while folded.count():
        folded.first.click()


def complaints(page: Page, axe: str) -> list[str]:
    """Return the findings of axe-core, and one if the page is wider than the window."""
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    told = [f"{one['id']}: {[node['target'] for node in one['nodes']][:3]}" for one in found["violations"]]
    if page.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
        told.append("wider than the window")
    return told


def walk(program: str, url: str, origin: str, folder: str, axe: str, scheme: str, width: int, shots: str) -> Any:
    """Visit the list, the views of a run and of a rollout, a link opened directly, and a comparison of two runs."""
    script, found = Path(axe).read_text("utf-8"), dict[str, Any]()
    with browser(program) as chromium:
        # axe is no script of the page, and so it takes a window that lets it in.
        context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 1000}, bypass_csp=True)
        watched = Watched(context)
        page = watched.page

        def look(name: str) -> None:
            if shots:
                page.screenshot(path=f"{shots}/{name}-{scheme}-{width}.png")
            found[name] = complaints(page, script)

        page.goto(url)
        expect(page.locator("tbody tr").first).to_be_visible()
        found["address"] = page.url
        look("list")
        page.get_by_role("link", name=folder, exact=True).click()
        views_of_run(page, found, look)
        views_of_rollout(page, found, look)
        sent = page.url
        found["sent"] = opened_afresh(context.new_page(), sent)
        found["compared"] = compared(page)
        look("compare")
        strange = chromium.new_context().new_page()
        strange.goto(sent)
        found["stranger"] = strange.get_by_role("alert").inner_text()
        return {**found, **watched.done(origin)}


def views_of_run(page: Page, found: dict[str, Any], look: Callable[[str], None]) -> None:
    """Visit the views of a run, and filter and sort its rollouts."""
    expect(page.get_by_role("heading", name="What went wrong")).to_be_visible()
    found["summary"] = page.locator("main").inner_text()
    look("run")
    view(page, "Rows")
    expect(page.locator(".squares a").first).to_be_visible()
    found["squares"] = page.locator(".squares a").count()
    look("rows")
    view(page, "Spec")
    look("spec")
    view(page, "Rollouts")
    rows = page.get_by_role("region", name="Rollouts").locator("tbody tr")
    expect(rows.first).to_be_visible()
    look("rollouts")
    page.get_by_text("+ Filter and sort").click()
    page.get_by_label("Value of").select_option("file_matches")
    expect(page.locator("#filters")).to_contain_text("value of file_matches")
    page.get_by_label("from", exact=True).fill("1")
    page.get_by_label("from", exact=True).press("Tab")
    expect(page.locator("#filters")).to_contain_text("from 1")
    page.get_by_label("Sort by").select_option("tokens")
    expect(page.locator("th[aria-sort]")).to_have_count(1)
    page.get_by_label("descending").check()
    expect(page.locator("th[aria-sort=descending]")).to_have_count(1)
    look("filters")
    page.get_by_text("+ Filter and sort").click()
    found["scores"] = [row.locator(".tile").inner_text() for row in rows.all()]
    found["sorted"] = page.locator("th[aria-sort]").text_content()
    look("filtered")
    rows.first.get_by_role("link").first.click()


def views_of_rollout(page: Page, found: dict[str, Any], look: Callable[[str], None]) -> None:
    """Visit the views of a rollout; the last one is its group."""
    expect(page.get_by_role("heading", name="Conversation")).to_be_visible()
    open_all(page)
    found["why"] = page.locator("main").inner_text()
    look("rollout")
    view(page, "Tokens")
    expect(page.locator(".tokens[tabindex] .t").first).to_be_visible()
    found["trained"] = "".join(page.locator(".tokens[tabindex] .t").all_inner_texts())
    page.locator(".tokens[tabindex] .t").first.hover()
    found["told"] = page.get_by_role("status").filter(has_text="token").last.inner_text()
    open_all(page)
    found["prompt"] = page.locator("details pre").filter(has_text="<|im_start|>").first.inner_text()
    look("tokens")
    view(page, "record")
    expect(page.get_by_role("heading", name="Row", exact=True)).to_be_visible()
    look("record")
    view(page, "Group")
    members = page.locator(".members thead th[scope=col]")
    expect(members.first).to_be_visible()
    found["members"] = members.count()
    look("group")


def opened_afresh(page: Page, url: str) -> str:
    """Open the link of a rollout's group directly, and return its title."""
    page.goto(url)
    expect(page.locator(".members thead th[scope=col]").first).to_be_visible()
    return page.locator("#title").inner_text()


def compared(page: Page) -> str:
    """Return to the list, select its two runs, and compare them in both orders."""
    page.locator("#crumbs").get_by_role("link", name="Runs").click()
    boxes = page.get_by_role("checkbox")
    expect(boxes).to_have_count(2)
    boxes.nth(0).check()
    boxes.nth(1).check()
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("main")).to_contain_text("Which reward explains it")
    first = page.locator("main .big").inner_text()
    page.get_by_role("link", name="Swap").click()
    expect(page.locator("main .big")).not_to_have_text(first)
    page.locator("table.compared button").first.click()
    expect(page.locator("table.compared .sides").first).to_be_visible()
    return page.locator("main").inner_text()


def refused(program: str, url: str, origin: str) -> Any:
    """Compare two runs without a common row, a run with its copy, and a run with itself."""
    with browser(program) as chromium:
        page = chromium.new_page()
        page.set_default_timeout(PATIENCE)

        def choose(*names: str) -> None:
            for name in names:
                page.get_by_role("checkbox", name=f"Compare {name}", exact=True).check()
            page.get_by_role("button", name="Compare").click()

        page.goto(url)
        boxes = page.get_by_role("checkbox")
        expect(boxes).to_have_count(3)
        found: dict[str, Any] = {"choices": [box.get_attribute("aria-label") for box in boxes.all()]}
        choose("one/run", "two/run")
        found["why"] = page.get_by_role("alert").inner_text()
        found["heading"] = page.locator("#title").inner_text()
        found["links"] = page.locator("main p a.mono").count()
        address = page.locator("main p a.mono").first.get_attribute("href")
        page.get_by_role("link", name="choose other runs").click()
        expect(boxes).to_have_count(3)
        found["back"] = page.locator("#title").inner_text()
        page.get_by_role("button", name="Clear").click()
        choose("one/run", "three/run")
        expect(page.locator("main")).to_contain_text("What it costs")
        found["copy"] = page.locator("main").inner_text()
        assert address is not None
        page.goto(f"{origin}#compare/{address[1:]}/{address[1:]}")
        found["itself"] = page.get_by_role("alert").inner_text()
        return found


def keyboard(program: str, url: str, origin: str, folder: str) -> Any:
    """Move from the list to the arguments of a tool call without a mouse; the focus is visible at each step."""
    with browser(program) as chromium:
        watched = Watched(chromium.new_context(viewport={"width": 1200, "height": 900}))
        page, pressed = watched.page, 0
        unseen: list[str] = []

        def until(done: str, key: str = "Tab", most: int = 400) -> None:
            nonlocal pressed
            for _ in range(most):
                page.keyboard.press(key)
                pressed += 1
                told = page.evaluate(
                    "(() => { const e = document.activeElement, s = getComputedStyle(e);"
                    " return [e.tagName, e.textContent, e.id, s.outlineStyle, parseFloat(s.outlineWidth)]; })()"
                )
                if told[0] not in ("BODY", "MAIN", "HTML") and (told[3] == "none" or told[4] < 1):
                    unseen.append(f"{told[0]} {told[1][:40]}")
                if page.evaluate(f"(() => {{ const e = document.activeElement; return Boolean({done}); }})()"):
                    return
            raise AssertionError(f"{done} was not reached in {most} steps")

        page.goto(url)
        expect(page.locator("tbody tr").first).to_be_visible()
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "skip"
        page.keyboard.press("Enter")
        until(f"e.tagName === 'A' && e.textContent === {json.dumps(folder)}")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="What went wrong")).to_be_visible()
        page.keyboard.press("2")
        expect(page.locator("tr[data-rollout]").first).to_be_visible()
        until("e.id === 'by-text'")
        page.keyboard.type("squares")
        page.keyboard.press(
            "Enter"
        )  # at once: it must not open a rollout of the list that the text has not changed yet
        expect(page.locator("#filters")).to_contain_text("text squares")
        expect(page.locator("#shown")).to_contain_text("found on this page")
        until("e.dataset.entry !== undefined && e.closest('[aria-label=Rollouts]')")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Conversation")).to_be_visible()
        until("e.tagName === 'SUMMARY'")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Arguments")).to_be_visible()
        page.keyboard.press("t")
        expect(page.locator(".tokens .t").first).to_be_visible()
        until("e.className === 'tokens'")
        until("e.querySelector('.current.t')", "ArrowRight")
        told = page.get_by_role("status").filter(has_text="log-probability").last.inner_text()
        page.keyboard.press("u")
        expect(page.locator("#filters")).to_contain_text("text squares")
        return {"pressed": pressed, "unseen": unseen, "told": told, **watched.done(origin)}


def moved(page: Page, before: str) -> str:
    """Wait until another rollout is shown, and return its address. The page's policy allows no injected code for
    waiting.
    """
    deadline = time.monotonic() + PATIENCE / 1000
    while page.evaluate("location.hash") == before:
        assert time.monotonic() < deadline, before
        page.wait_for_timeout(50)
    expect(page.get_by_role("heading", name="Conversation")).to_be_visible()
    return str(page.evaluate("location.hash"))


def searched(page: Page, press: Callable[..., None]) -> tuple[list[str], list[str]]:
    """Search for a text and visit the matches forwards and backwards; return the list, and the visited rollouts."""
    press("search", "/")
    page.keyboard.type("squares")
    expect(page.locator("#shown")).to_contain_text("found on this page")
    matches = page.eval_on_selector_all("[aria-label=Rollouts] tbody a", "all => all.map(a => a.hash)")
    listed = str(page.evaluate("location.hash"))
    press("search", "Enter")
    press("next match", "Enter")
    followed = [moved(page, listed)]
    for _ in matches[1:]:
        press("next match", "j")
        followed.append(moved(page, followed[-1]))
    press("end", "j")
    expect(page.locator("#live")).to_have_text("The list ends here.")
    page.go_back()
    expect(page.locator("#filters")).to_contain_text("text squares")
    expect(page.locator("a[data-entry]:focus")).to_have_attribute("href", followed[-1])
    return matches, followed


def keys(program: str, url: str, origin: str, width: int) -> Any:
    """Use all single-key commands, and count them."""
    with browser(program) as chromium:
        watched = Watched(chromium.new_context(viewport={"width": width, "height": 500}))
        page, used = watched.page, dict[str, int]()
        shows_rollout = page.get_by_role("heading", name="Conversation")
        shows_list = page.locator("tr[data-rollout]").first

        def press(task: str, *pressed: str) -> None:
            for key in pressed:
                page.keyboard.press(key)
            used[task] = used.get(task, 0) + len(pressed)

        page.goto(url)
        expect(page.get_by_role("checkbox")).to_have_count(2)
        press("compare", "j", "x", "j", "x", "c")
        expect(page.locator("main")).to_contain_text("Which reward explains it")
        press("back from compare", "u")
        expect(page.locator("#title")).to_have_text("Runs")
        press("failed", "j", "Enter")  # the later of the two is the first one
        expect(page.get_by_role("heading", name="What went wrong")).to_be_visible()
        press("failed", "2")
        expect(shows_list).to_be_visible()
        listed: list[dict[str, Any]] = page.eval_on_selector_all(
            "tr[data-rollout]",
            "rows => rows.map(row => ({"
            "href: row.querySelector('a').getAttribute('href'), question: row.querySelector('a').textContent, "
            "failed: row.querySelector('a').dataset.entry, right: row.cells[0].getBoundingClientRect().right, "
            "score: row.cells[0].textContent, top: row.getBoundingClientRect().top + scrollY}))",
        )
        failed = [row["href"] for row in listed if row["failed"]]
        press("failed", "n", "n", "n", "Enter")
        expect(shows_rollout).to_be_visible()
        at = str(page.evaluate("location.hash"))
        seen = [at]
        press("next failed", "n")
        seen.append(moved(page, at))
        press("back", "u")
        expect(shows_list).to_be_visible()
        expect(page.locator("a[data-entry]:focus")).to_be_visible()
        returned = {
            "entry": page.evaluate("document.activeElement.getAttribute('href')"),
            "top": page.evaluate("document.activeElement.getBoundingClientRect().top"),
        }
        matches, followed = searched(page, press)
        press("help", "?")
        expect(page.get_by_role("dialog")).to_contain_text("next one that failed")
        press("help", "Escape")
        expect(page.get_by_role("dialog")).not_to_be_visible()
        press("drop the filter", "Escape")
        expect(page.locator("#filters")).to_have_text("")
        page.evaluate("location.hash = '#nowhere'")
        expect(page.locator("#title")).to_have_text("This page cannot be shown")
        crumbs = page.locator("#crumbs").inner_text()
        ours = [text for text in watched.wrong if "404" not in text]  # the browser says it of an address that is wrong
        return {
            "used": used, "listed": listed, "failed": failed, "seen": seen, "returned": returned,
            "matches": matches, "followed": followed, "crumbs": crumbs, **watched.done(origin), "wrong": ours,
        }  # fmt: skip


def paints(program: str, url: str, origin: str, pages: dict[str, list[str]], times: int) -> Any:
    """Open each page repeatedly with an empty cache, and return the seconds until its selector is visible."""
    seconds: dict[str, list[float]] = {}
    with browser(program) as chromium:
        for name, (address, selector) in pages.items():
            for _ in range(times):
                context = chromium.new_context(viewport={"width": 1400, "height": 900})
                watched = Watched(context)
                watched.page.goto(url)  # for the cookie
                watched.page.goto("about:blank")
                started = time.monotonic()
                watched.page.goto(f"{origin}{address}")
                watched.page.wait_for_selector(selector)
                seconds.setdefault(name, []).append(time.monotonic() - started)
                context.close()
    return seconds


def hostile(program: str, pages: list[str], origin: str) -> Any:
    """Visit all views of rollouts whose texts try to run code."""
    seen = []
    with browser(program) as chromium:
        context = chromium.new_context()
        watched = Watched(context)
        page = watched.page
        for address in pages:
            page.goto("about:blank")
            page.goto(address)
            shown(page)
            page.wait_for_timeout(300)
            open_all(page)
            for target in page.locator("main th a, main td a").all()[:60]:
                target.hover(timeout=1000, force=True)
            page.wait_for_timeout(300)
            seen.append(
                {
                    "text": page.locator("main").inner_text(),
                    "hacked": page.evaluate("window.hacked ?? null"),
                    "elements": page.evaluate(
                        "[...new Set([...document.querySelectorAll('main *')].map(e => e.localName))]"
                    ),
                    "links": page.evaluate("[...document.querySelectorAll('a')].map(a => a.getAttribute('href'))"),
                    "handlers": page.evaluate(
                        "[...document.querySelectorAll('main *')].flatMap(e => e.getAttributeNames())"
                        ".filter(n => n.startsWith('on') || n === 'src' || n === 'srcdoc')"
                    ),
                }
            )
        done = watched.done(origin)
        # The policy holds even where a script of ours would try.
        attempt = "try { document.body.innerHTML = '<b>x</b>'; return false; } catch { return true; }"
        refused = page.evaluate(f"(() => {{ {attempt} }})()")
        return {"seen": seen, "refused": refused, "cookie": page.evaluate("document.cookie"), **done}


def growing(program: str, url: str, origin: str, folder: str, file: str, line: str) -> Any:
    """Watch a run while rollouts are added to it."""
    with browser(program) as chromium:
        watched = Watched(chromium.new_context())
        page, rows = watched.page, watched.page.locator("tr[data-rollout]")
        page.goto(url)
        page.get_by_role("link", name=folder, exact=True).click()
        expect(page.locator("#tabs")).to_contain_text("Rollouts 2")
        view(page, "Rollouts")
        expect(rows).to_have_count(2)
        with Path(file).open("a", encoding="utf-8") as target:
            target.write(line * 3)
        page.get_by_role("button", name="Show them").click()
        expect(rows).to_have_count(5)
        focus = page.evaluate("document.activeElement.tagName")
        expect(page.locator("#tabs")).to_contain_text("Rollouts 5")
        return {"focus": focus, **watched.done(origin)}


def unread(program: str, url: str, origin: str) -> Any:
    """Look at the list of runs while the server has read none of them, then when it has."""
    with browser(program) as chromium:
        watched = Watched(chromium.new_context())
        page = watched.page

        def forget(route: Route) -> None:
            runs = [{"run": run["run"], "path": run["path"], "read": 0.0} for run in route.fetch().json()["runs"]]
            route.fulfill(json={"runs": runs, "reading": True, "more": 0})

        page.route("**/api/runs", forget)
        page.goto(url)
        rows = page.locator("table.runs tr", has=page.locator("th[scope=row]"))
        expect(rows.filter(has_text="reading …")).to_have_count(12)
        page.unroute("**/api/runs")
        expect(rows.filter(has_text="1.00")).to_have_count(12)
        return {"left": rows.filter(has_text="reading …").count(), **watched.done(origin)}


def large(program: str, url: str, origin: str, run: str) -> Any:
    """Open the first page of a run that is not indexed yet, and many pages after it."""
    with browser(program) as chromium:
        watched = Watched(chromium.new_context())
        page, rows = watched.page, watched.page.locator("tr[data-rollout]")
        page.goto(url)  # for the cookie
        page.goto("about:blank")
        started = time.monotonic()
        page.goto(f"{origin}#{run}/rollouts")
        expect(rows).to_have_count(50)
        first = time.monotonic() - started
        expect(page.locator("#tabs")).to_contain_text("100,000", timeout=60_000)
        expect(page.locator("#facts")).not_to_contain_text("read so far", timeout=60_000)
        whole = time.monotonic() - started
        page.get_by_role("button", name="Show them").click()
        elements = []
        for _ in range(20):
            before = rows.first.get_attribute("data-rollout")
            page.get_by_role("button", name="Next page").click()
            expect(rows.first).not_to_have_attribute("data-rollout", str(before))
            elements.append(page.evaluate("document.querySelectorAll('*').length"))
        return {"first": first, "whole": whole, "elements": elements, **watched.done(origin)}


STEPS: dict[str, Callable[..., Any]] = {
    one.__name__: one for one in (walk, refused, keyboard, keys, hostile, growing, unread, large, paints)
}

if __name__ == "__main__":
    print(json.dumps(STEPS[sys.argv[1]](**json.loads(sys.argv[2]))))
