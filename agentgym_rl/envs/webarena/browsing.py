"""One session in the browser: its tabs, what they show, and how actions are carried out there."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urldefrag

from playwright.async_api import Error
from playwright.async_api import TimeoutError as PlaywrightTimeout

from agentgym_rl.envs.webarena.actions import Action, Kind
from agentgym_rl.envs.webarena.addresses import BLANK, Addresses
from agentgym_rl.envs.webarena.browser import SharedBrowser
from agentgym_rl.envs.webarena.tree import HEIGHT, WIDTH, Element, Numbering, Tree, boxes_of, render_tree
from agentgym_rl.errors import EnvServerError

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, CDPSession, Dialog, Page, Request

_ERROR_PAGE = "chrome-error://"
_ENDLESS = frozenset({"eventsource", "websocket", "media"})
"""Kinds of requests that a finished page may keep open."""
_SETTLE_LIMIT_S = 8.0
"""So long an action's page may go on loading things before it is looked at."""
_POLL_S = 0.02
_MAX_KEYS = 500
_AWAIT_LOAD_S = 2.0
"""A page that was asked for begins to load within this time, or never: a download."""
_OVERLOADED = (408, 429)
"""Of the statuses 4xx, those that are the site's trouble and not the asker's."""
_NOT_THE_SITES_FAULT = {
    "net::ERR_TOO_MANY_REDIRECTS": "leads round in a circle",
    "net::ERR_UNSAFE_REDIRECT": "leads to what is no page of a site",
    "net::ERR_CACHE_MISS": "was the answer to a form, which is not sent a second time",
}
"""Why a page does not come although its site is well."""
_CHOOSE_OPTION = """function() {
    const list = this.closest('select');
    if (!list) return false;
    this.selected = true;
    list.dispatchEvent(new Event('input', {bubbles: true}));
    list.dispatchEvent(new Event('change', {bubbles: true}));
    return true;
}"""


class Refused(Exception):
    """An action that has no effect; says why, for the agent."""


class SiteDown(EnvServerError):
    """A configured site does not answer: a fault, never a reward."""


@dataclass(frozen=True)
class Timing:
    """How long a session waits."""

    navigation_s: float
    """For a page."""
    quiet_s: float
    """Without network traffic after an action until its page is looked at."""


@dataclass(eq=False)
class _Tab:
    page: Page
    cdp: CDPSession
    numbering: Numbering = field(default_factory=Numbering)
    frame: str = ""
    """Chromium's name of the page's main frame."""
    in_flight: set[Request] = field(default_factory=set)
    """Requests that have not ended. Those of a page that is left end with it."""
    active_at: float = 0.0
    """When the last request began or ended, by the monotonic clock."""
    loading: bool = False
    """True from the begin of a page's load to its end."""
    awaited_until: float = 0.0
    """A page that a click or form asks for may begin to load until then."""


@dataclass(frozen=True)
class _Place:
    """Where a session was before an action."""

    tabs: tuple[_Tab, ...]
    tab: _Tab
    url: str
    step: int
    """The page's place in the tab's history."""


@dataclass(frozen=True)
class _Failure:
    """Of a page that did not come."""

    reason: str
    """Chromium's word, such as ``net::ERR_NAME_NOT_RESOLVED``."""
    status: int | None
    """What the site answered, if it did."""


@dataclass(frozen=True)
class View:
    """What the agent sees."""

    text: str
    url: str
    """Real address of the current tab."""
    elements: Mapping[int, Element]


class BrowsingSession:
    """A context of the shared browser. Every coroutine runs on the browser's loop, one at a time."""

    def __init__(self, browser: SharedBrowser, addresses: Addresses, timing: Timing) -> None:
        self._browser, self._addresses, self._timing = browser, addresses, timing
        self._context: BrowserContext | None = None
        self._tabs: list[_Tab] = []
        self._current = 0
        self._opening: list[asyncio.Task[None]] = []
        self._making_page = False
        self._num_awaited = 0
        """Tabs that a page has asked for and that are told of only when their pages have come."""
        self._said: list[str] = []
        self._elements: Mapping[int, Element] = {}
        self._failures: dict[str, _Failure] = {}

    # -------------------------------------------------------------------------------------------------- begin and end

    async def begin(
        self,
        urls: list[str],
        *,
        storage_state: Path | None,
        geolocation: Mapping[str, float] | None,
        cookies: list[dict[str, str]],
    ) -> None:
        """Open a fresh context with a tab for each url; raises Playwright's time-out, `SiteDown`."""
        await self.end()
        options: dict[str, Any] = {"viewport": {"width": WIDTH, "height": HEIGHT}, "locale": "en-US"}
        if geolocation is not None:
            options |= {"geolocation": dict(geolocation), "permissions": ["geolocation"]}
        if storage_state is not None:
            options["storage_state"] = storage_state
        self._context = await self._browser.open_context(timezone_id="UTC", accept_downloads=False, **options)
        self._context.set_default_timeout(1000 * self._timing.navigation_s)
        self._context.on("requestfailed", self._page_failed)
        if cookies:
            await self._context.add_cookies(cookies)  # type: ignore[arg-type]  # plain dicts serve as well
        for url in urls:
            await self._open_tab(url)
        self._current = 0
        self._context.on("page", self._popped_up)
        await self._tab.page.bring_to_front()

    async def end(self) -> None:
        """Close the context, as far as there is one."""
        context, self._context, self._tabs = self._context, None, []
        self._elements, self._said, self._failures, self._num_awaited = {}, [], {}, 0
        if context is not None:
            with contextlib.suppress(Error):  # with its browser it has ended already
                await context.close()

    @property
    def _tab(self) -> _Tab:
        if not self._tabs:
            raise EnvServerError("the browser of this session has died")
        return self._tabs[self._current]

    @property
    def url(self) -> str:
        """Real address of the current tab."""
        return self._tab.page.url

    @property
    def page(self) -> Page:
        """The current tab's page."""
        return self._tab.page

    async def _open_tab(self, url: str) -> None:
        self._current = self._tabs.index(await self._adopt(await self._new_page()))
        if url != BLANK:
            await self._load(url)

    async def _new_page(self) -> Page:
        """A page of our own, which no link has opened."""
        assert self._context is not None
        self._making_page = True
        try:
            return await self._context.new_page()
        finally:
            self._making_page = False

    async def _adopt(self, page: Page) -> _Tab:
        """Make a tab of a page and watch its traffic."""
        assert self._context is not None
        tab = _Tab(page, await self._context.new_cdp_session(page), active_at=time.monotonic())
        page.on("request", lambda request: self._began(tab, request))
        page.on("requestfinished", lambda request: self._ended(tab, request))
        page.on("requestfailed", lambda request: self._ended(tab, request))
        page.on("close", lambda _: self._closed(tab))
        page.on("dialog", lambda dialog: asyncio.ensure_future(self._accept(dialog)))
        await self._watch_loading(tab)
        await tab.cdp.send("DOM.enable")
        await tab.cdp.send("Accessibility.enable")
        self._tabs.append(tab)
        return tab

    async def _watch_loading(self, tab: _Tab) -> None:
        """What the page itself reports comes before any request that it makes."""

        def on(event: str, change: Callable[[], None]) -> None:
            tab.cdp.on(event, lambda told: change() if told["frameId"] == tab.frame else None)

        tab.frame = (await tab.cdp.send("Page.getFrameTree"))["frameTree"]["frame"]["id"]
        on("Page.frameRequestedNavigation", lambda: setattr(tab, "awaited_until", time.monotonic() + _AWAIT_LOAD_S))
        on("Page.frameStartedLoading", lambda: setattr(tab, "loading", True))
        on("Page.frameStoppedLoading", lambda: self._loaded(tab))
        tab.cdp.on("Page.windowOpen", lambda _: self._asked_for_tab())
        await tab.cdp.send("Page.enable")

    def _asked_for_tab(self) -> None:
        self._num_awaited += 1

    def _popped_up(self, page: Page) -> None:
        """A link opened a tab of its own: it becomes the current one."""
        if not self._making_page:
            self._num_awaited = max(0, self._num_awaited - 1)
            self._opening.append(asyncio.ensure_future(self._adopt_popup(page)))

    async def _adopt_popup(self, page: Page) -> None:
        with contextlib.suppress(Error):  # closed again at once
            self._current = self._tabs.index(await self._adopt(page))

    def _closed(self, tab: _Tab) -> None:
        if tab in self._tabs:
            self._tabs.remove(tab)
            self._current = min(self._current, max(0, len(self._tabs) - 1))

    async def _accept(self, dialog: Dialog) -> None:
        """Questions of a page are answered with yes, and shown."""
        if dialog.message:
            self._said.append(f"The page said: {dialog.message}")
        with contextlib.suppress(Error):
            await dialog.accept()

    # ------------------------------------------------------------------------------------------------------- traffic

    def _began(self, tab: _Tab, request: Request) -> None:
        tab.active_at = time.monotonic()
        if request.resource_type not in _ENDLESS:
            tab.in_flight.add(request)

    def _ended(self, tab: _Tab, request: Request) -> None:
        tab.active_at = time.monotonic()
        tab.in_flight.discard(request)

    def _page_failed(self, request: Request) -> None:
        """In any tab, for a tab that a link opens is known only after its page has failed."""
        if request.is_navigation_request():
            answer = request.existing_response
            failure = _Failure(request.failure or "", None if answer is None else answer.status)
            self._failures[_plain(request.url)] = failure

    def _loaded(self, tab: _Tab) -> None:
        tab.loading, tab.awaited_until, tab.active_at = False, 0.0, time.monotonic()

    async def _settle(self) -> None:
        """Wait until the current tab's page has loaded and asks for nothing more."""
        began = time.monotonic()
        end = began + _SETTLE_LIMIT_S
        while self._tabs and time.monotonic() < end:
            await self._finish_opening()
            if self._tabs and self._is_quiet(self._tab, began) and await self._is_complete(self._tab):
                return
            await asyncio.sleep(_POLL_S)
        self._num_awaited = 0

    async def _finish_opening(self) -> None:
        """Tabs that links have opened."""
        opening, self._opening = self._opening, []
        await asyncio.gather(*opening)

    def _is_quiet(self, tab: _Tab, began: float) -> bool:
        now = time.monotonic()
        if tab.loading or tab.in_flight or self._opening or self._num_awaited or now < tab.awaited_until:
            return False
        return now - max(tab.active_at, began) >= self._timing.quiet_s

    async def _is_complete(self, tab: _Tab) -> bool:
        """Whether the page says so, having done all that was asked of it before, and nothing has begun meanwhile."""
        try:
            state = await tab.page.evaluate("document.readyState")
        except Error:
            if not self._browser.is_connected:
                raise
            return not self._tabs  # another page is coming, or the tab has been closed
        return bool(state == "complete") and not tab.loading and time.monotonic() >= tab.awaited_until

    async def _load(self, url: str) -> None:
        """Raises Playwright's time-out, and `SiteDown` when nobody answers."""
        try:
            await self.page.goto(url, wait_until="load")
        except PlaywrightTimeout:
            raise
        except Error as error:
            if "ERR_ABORTED" not in str(error):  # a download, which is not taken
                raise self._trouble(url, error) from error
        await self._settle()

    def _trouble(self, url: str, error: Error) -> Exception:
        """A site that does not answer, or a browser that has died."""
        return SiteDown(f"{url}: {_first_line(error)}") if "net::" in str(error) else error

    # ---------------------------------------------------------------------------------------------------------- view

    async def view(self) -> View:
        """The visible part of the current tab, after the titles of all tabs."""
        tree = await self._stable_tree()
        self._elements = tree.elements
        said, self._said = self._said, []
        text = "\n".join([*said, await self._tab_line(), "", tree.text])
        return View(self._addresses.canonical(text), self.url, tree.elements)

    async def _stable_tree(self) -> Tree:
        """A page that navigates while it is looked at is looked at again."""
        for attempt in range(3):
            try:
                return await self._tree()
            except Error:
                if attempt == 2 or not self._browser.is_connected or not self._tabs:
                    raise
                await self._settle()
        raise AssertionError("unreachable")

    async def _tree(self) -> Tree:
        tab = self._tab
        frames, snapshot, nodes = await asyncio.gather(
            tab.cdp.send("Page.getFrameTree"),
            tab.cdp.send("DOMSnapshot.captureSnapshot", {"computedStyles": []}),
            tab.cdp.send("Accessibility.getFullAXTree"),
        )
        tab.numbering.begin(frames["frameTree"]["frame"]["loaderId"])
        return render_tree(nodes["nodes"], boxes_of(snapshot), tab.numbering)

    async def _tab_line(self) -> str:
        titles = [
            f"Tab {number}{' (current)' if number == self._current else ''}: {await tab.page.title()}"
            for number, tab in enumerate(self._tabs)
        ]
        return " | ".join(titles)

    async def screenshot(self) -> str:
        """The viewport as ``data:image/png;base64,...``."""
        image = await self.page.screenshot(type="png")
        return "data:image/png;base64," + base64.b64encode(image).decode()

    # ------------------------------------------------------------------------------------------------------- actions

    async def act(self, action: Action) -> None:
        """Carry out any action but ``stop``; raises `Refused` when it has no effect, `SiteDown`."""
        try:
            before = await self._place()
            await self._try(action)
            if not self._tabs:
                await self._open_tab(BLANK)
            await self._stay_inside(before)
        except PlaywrightTimeout as error:
            raise SiteDown(f"{self.url}: {action.kind}: {_first_line(error)}") from error

    async def _place(self) -> _Place:
        tab = self._tab
        history = await tab.cdp.send("Page.getNavigationHistory")
        return _Place(tuple(self._tabs), tab, tab.page.url, history["currentIndex"])

    async def _try(self, action: Action) -> None:
        """Carry it out and wait for its page; one outside the sites may hang."""
        try:
            await self._do(action)
            await self._settle()
        except PlaywrightTimeout:
            if not self._tabs or self._is_inside(self._awaited_page(self._tab) or self.url):
                raise

    async def _do(self, action: Action) -> None:
        match action.kind:
            case Kind.CLICK:
                await self._click(self._element(action))
            case Kind.HOVER:
                await self.page.mouse.move(*await self._center(self._element(action)))
            case Kind.TYPE:
                await self._click(self._element(action))
                await self._type(action.text)
                if action.enter:
                    await self.page.keyboard.press("Enter")
            case Kind.PRESS:
                await self._press(action.text)
            case Kind.SCROLL:
                await self.page.evaluate(f"window.scrollBy(0, {action.number} * window.innerHeight)")
            case Kind.GOTO:
                await self._goto(action.text)
            case Kind.NEW_TAB:
                await self._open_tab(BLANK)
            case Kind.TAB_FOCUS:
                await self._focus(action.number)
            case Kind.CLOSE_TAB:
                await self.page.close()
            case Kind.GO_BACK:
                await self._move("back")
            case Kind.GO_FORWARD:
                await self._move("forward")
            case Kind.STOP:
                raise AssertionError("stop is no action in the browser")

    def _element(self, action: Action) -> Element:
        element = self._elements.get(action.element)
        if element is None or not element.backend_id:
            raise Refused(f"no element [{action.element}] is in view")
        return element

    async def _click(self, element: Element) -> None:
        if element.role == "option" and await self._choose(element):
            return
        await self.page.mouse.click(*await self._center(element))

    async def _choose(self, element: Element) -> bool:
        """Choose an option of a drop-down list; False when it is another kind of option."""
        cdp = self._tab.cdp
        try:
            node = await cdp.send("DOM.resolveNode", {"backendNodeId": element.backend_id})
            called = {"objectId": node["object"]["objectId"], "functionDeclaration": _CHOOSE_OPTION}
            answer = await cdp.send("Runtime.callFunctionOn", called | {"returnByValue": True})
        except Error as error:
            raise self._gone(element, error) from error
        return bool(answer["result"].get("value"))

    async def _center(self, element: Element) -> tuple[float, float]:
        """The middle of the element's first box in the viewport, once it is scrolled into view."""
        cdp, node = self._tab.cdp, {"backendNodeId": element.backend_id}
        try:
            await cdp.send("DOM.scrollIntoViewIfNeeded", node)
            quads = (await cdp.send("DOM.getContentQuads", node))["quads"]
        except Error as error:
            raise self._gone(element, error) from error
        if not quads:
            raise Refused(f"element [{element.number}] has no place on the page")
        return sum(quads[0][0::2]) / 4, sum(quads[0][1::2]) / 4

    def _gone(self, element: Element, error: Error) -> Exception:
        if not self._browser.is_connected or not self._tabs:
            return error
        return Refused(f"element [{element.number}] is not there any more")

    async def _type(self, text: str) -> None:
        """Key by key, as pages expect of people; a long text at once, for it would take seconds."""
        keyboard = self.page.keyboard
        await (keyboard.type(text) if len(text) <= _MAX_KEYS else keyboard.insert_text(text))

    async def _press(self, keys: str) -> None:
        try:
            await self.page.keyboard.press(keys)
        except Error as error:
            if "Unknown key" not in str(error):
                raise
            raise Refused(f"there is no key {keys!r}") from None

    async def _goto(self, text: str) -> None:
        url = self._addresses.local(text)
        if not self._addresses.contains(url):
            sites = ", ".join(self._addresses.canonical(address) for address in self._addresses.real.values())
            raise Refused(f"{text[:200]} is not on the sites of this task; they are {sites}")
        await self._attempt(self._load(url))

    async def _focus(self, number: int) -> None:
        if not 0 <= number < len(self._tabs):
            raise Refused(f"there is no tab {number}; tabs are 0..{len(self._tabs) - 1}")
        self._current = number
        await self.page.bring_to_front()

    async def _move(self, direction: str) -> None:
        """Go through the tab's history; where there is no further page, nothing happens."""
        history = await self._tab.cdp.send("Page.getNavigationHistory")
        target = history["currentIndex"] + (-1 if direction == "back" else 1)
        # Tabs are blank before their first page; that is none of the agent's.
        if not 0 <= target < len(history["entries"]) or history["entries"][target]["url"] == BLANK:
            raise Refused(f"there is no page to go {direction} to")
        await self._attempt(self._step(direction))

    async def _step(self, direction: str) -> None:
        """One page through the history; raises as `_load`."""
        try:
            await (self.page.go_back() if direction == "back" else self.page.go_forward())
        except PlaywrightTimeout:
            raise
        except Error as error:
            if "ERR_ABORTED" not in str(error):
                raise self._trouble(f"going {direction}", error) from error

    async def _attempt(self, loading: Awaitable[None]) -> None:
        """Load a page. Of one that did not come and that the browser shows its own for, `_stay_inside` tells why."""
        try:
            await loading
        except SiteDown:
            await self._settle()
            if not self.url.startswith(_ERROR_PAGE):
                raise

    # ---------------------------------------------------------------------------------------------- within the sites

    def _is_inside(self, url: str) -> bool:
        return url == BLANK or self._addresses.contains(url)

    def _awaited_page(self, tab: _Tab) -> str:
        """Address of the page that the tab waits for; empty when it waits for none."""
        asked = (request for request in tab.in_flight if request.is_navigation_request())
        return next((request.url for request in asked if request.frame == tab.page.main_frame), "")

    async def _stay_inside(self, before: _Place) -> None:
        """Leave again a page outside the sites, or one that only says that the site has no such page, and raise
        `Refused`; raise `SiteDown` where a page of a site did not come.
        """
        tab = self._tab
        url = self._awaited_page(tab)
        if url and not self._is_inside(url):
            await tab.cdp.send("Page.stopLoading")
            await self._settle()
        elif tab.page.url.startswith(_ERROR_PAGE):
            url = await self._missing_page(tab)
        elif self._is_inside(tab.page.url):
            return
        else:
            url = tab.page.url
        objection = self._objection(url)
        await self._leave(before)
        raise Refused(objection)

    async def _missing_page(self, tab: _Tab) -> str:
        """The address whose page did not come, so that the browser shows its own."""
        tree = await tab.cdp.send("Page.getFrameTree")
        return _plain(tree["frameTree"]["frame"].get("unreachableUrl", ""))

    def _objection(self, url: str) -> str:
        """Why the agent cannot have that page, which did not come or is outside; raises `SiteDown` when it could."""
        if url and not self._is_inside(url):
            return f"this leads to {url[:200]}, which is not on the sites of this task"
        failure = self._failures.get(url, _Failure("did not answer", None))
        shown = self._addresses.canonical(url)[:200]
        if failure.reason in _NOT_THE_SITES_FAULT:
            return f"{shown} {_NOT_THE_SITES_FAULT[failure.reason]}"
        if failure.status is not None and 400 <= failure.status < 500 and failure.status not in _OVERLOADED:
            return f"{shown} is no page: the site answers with status {failure.status}"
        raise SiteDown(f"{url or self.url}: {failure.reason}")

    async def _leave(self, before: _Place) -> None:
        """Show again what was shown before the action."""
        tab = self._tab
        if tab not in before.tabs and len(self._tabs) > 1:
            await tab.page.close()
            self._closed(tab)
            await self._focus(self._tabs.index(before.tab) if before.tab in self._tabs else self._current)
        elif not self._is_inside(tab.page.url):
            await self._return(tab, before)
        await self._settle()

    async def _return(self, tab: _Tab, before: _Place) -> None:
        """To the page before by a step through the tab's history, else by loading it anew; to an earlier one where that
        page has gone meanwhile. Raises `SiteDown`.
        """
        history = await tab.cdp.send("Page.getNavigationHistory")
        is_same = tab is before.tab
        steps, home = (before.step - history["currentIndex"], before.url) if is_same else (-1, BLANK)
        ways: list[Callable[[], Awaitable[None]]] = [
            lambda: self._step("forward" if steps > 0 else "back"),
            lambda: self._load(home),
            lambda: self._step("back"),
            lambda: self._load(BLANK),
        ]
        for way in ways if steps else ways[1:]:
            await self._attempt(way())
            await self._settle()
            if self._is_inside(tab.page.url):
                return
            if tab.page.url.startswith(_ERROR_PAGE):
                self._objection(await self._missing_page(tab))

    # -------------------------------------------------------------------------------------------------------- judging

    async def page_at(self, url: str) -> Page:
        """A page beside the agent's tabs, for looking at what the agent left; the caller closes it."""
        page = await self._new_page()
        try:
            await page.goto(url, wait_until="load")
            with contextlib.suppress(PlaywrightTimeout):
                await page.wait_for_load_state("networkidle", timeout=1000 * _SETTLE_LIMIT_S)
        except PlaywrightTimeout:
            raise
        except Error as error:
            raise self._trouble(url, error) from error
        return page


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _plain(url: str) -> str:
    """Without the place on the page."""
    return urldefrag(url).url
