"""Whether a task is done when the agent stops: the product of its checks, each 0 or 1.

Comparisons of texts ignore case, white space around them and quotes that enclose the whole.
"""

from __future__ import annotations

import contextlib
import html
import re
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from playwright.async_api import Error
from playwright.async_api import TimeoutError as PlaywrightTimeout

from agentgym_rl.envs.webarena.addresses import Addresses
from agentgym_rl.envs.webarena.browsing import BrowsingSession, SiteDown
from agentgym_rl.envs.webarena.judge import Judge
from agentgym_rl.envs.webarena.site_functions import PREFIX, call_function
from agentgym_rl.envs.webarena.tasks import ALTERNATIVES, Check, Evaluation, PageTarget, Task

if TYPE_CHECKING:
    from playwright.async_api import Page

_LAST_PAGE = "last"
_LAST_URL = "__last_url__"
_QUOTES = ("'", '"')
_DASHES = r"\-\u2212\u2013"
"""Hyphen, minus and the dash of ranges; two hyphens are a dash between words."""
_WORD_BEGINS = rf"(?<![\w./:])(?<!(?<!-)[{_DASHES}])(?<!\d,)"
_WORD_ENDS = rf"(?!\w|[./:{_DASHES}]\w|,\d)"


# ------------------------------------------------------------------------------------------------------------- answers


def clean(text: str) -> str:
    """``text`` as it is compared."""
    text = text.strip()
    for quote in _QUOTES:
        if len(text) > 1 and text.startswith(quote) and text.endswith(quote):
            text = text[1:-1]
            break
    return text.lower()


def includes(reference: str, answer: str, *, whole_word: bool) -> bool:
    """Whether ``answer`` contains ``reference``. A single character may have to be a word of its own: 5 is not in 15,
    0.5, -5 or 15/5/2023.
    """
    reference, answer = clean(reference), clean(answer)
    if whole_word and len(reference) == 1:
        return re.search(f"{_WORD_BEGINS}{re.escape(reference)}{_WORD_ENDS}", answer) is not None
    return reference in answer


def score_answer(task: Task, answer: str, judge: Judge | None) -> bool:
    """Whether the agent's answer has all that the task wants; the judge is asked only when the rest holds."""
    wanted = task.evaluation
    if wanted.exact_match is not None and clean(wanted.exact_match) != clean(answer):
        return False
    alone = len(wanted.must_include) == 1
    if not all(includes(reference, answer, whole_word=alone) for reference in wanted.must_include):
        return False
    return not wanted.needs_judge or _ask_judge(task, answer, judge)


def _ask_judge(task: Task, answer: str, judge: Judge | None) -> bool:
    assert judge is not None, "a task that needs a judge is refused at reset without one"
    wanted = task.evaluation
    if wanted.unachievable:
        if clean(answer) == "n/a":
            return True
        return judge.says_impossible(question=task.intent, reason=wanted.reason, answer=answer)
    return all(
        clean(reference) == clean(answer)
        or judge.same_meaning(question=task.intent, reference=reference, answer=answer)
        for reference in wanted.fuzzy_match
    )


# ----------------------------------------------------------------------------------------------------------- addresses


def matches_url(reference: str, url: str) -> bool:
    """Whether ``url`` is on the path of one of the alternatives, with their query values."""
    seen_base, seen_query = _split(url)
    alternatives = [_split(each) for each in reference.split(ALTERNATIVES)]
    if not any(base in seen_base for base, _ in alternatives):
        return False
    wanted: dict[str, set[str]] = {}
    for _, query in alternatives:
        for name, values in query.items():
            wanted.setdefault(name, set()).update(values)
    return all(values & set(seen_query.get(name, [])) for name, values in wanted.items())


def _split(url: str) -> tuple[str, dict[str, list[str]]]:
    """Host and path, and the values of the query."""
    parts = urlsplit(url.strip().rstrip("/"))
    return (parts.netloc + parts.path).rstrip("/"), parse_qs(parts.query)


# --------------------------------------------------------------------------------------------------------------- pages


class PageChecks:
    """Looks at pages of a session, on the browser's loop."""

    def __init__(self, session: BrowsingSession, addresses: Addresses) -> None:
        self._session, self._addresses = session, addresses

    async def hold(self, evaluation: Evaluation) -> bool:
        """Whether address and pages are as the task wants them; raises `SiteDown` when a page does not come."""
        if Check.URL in evaluation.checks and not matches_url(
            self._addresses.filled(evaluation.url), self._session.url
        ):
            return False
        if Check.PAGE in evaluation.checks:
            for target in evaluation.targets:
                if not await self._holds(target):
                    return False
        return True

    async def _holds(self, target: PageTarget) -> bool:
        try:
            content = await self._content(target)
        except PlaywrightTimeout as error:
            raise SiteDown(f"{target.url}: {str(error).partition(chr(10))[0]}") from error
        if target.exact_match is not None and clean(self._addresses.filled(target.exact_match)) != clean(content):
            return False
        return all(self._contains(content, wanted) for wanted in target.must_include)

    def _contains(self, content: str, wanted: str) -> bool:
        alternatives = self._addresses.filled(wanted).split(ALTERNATIVES)
        return any(includes(alternative, content, whole_word=False) for alternative in alternatives)

    async def _content(self, target: PageTarget) -> str:
        """What the page shows at the target's place."""
        if target.url == _LAST_PAGE:
            return await self._read(self._session.page, target)
        page = await self._session.page_at(await self._address(target))
        try:
            return await self._read(page, target)
        finally:
            await page.close()

    async def _address(self, target: PageTarget) -> str:
        url = target.url.replace(_LAST_URL, self._session.url)
        if url.startswith(PREFIX):
            return await call_function(url, self._session.page, self._addresses.real)
        return self._addresses.filled(url)

    async def _read(self, page: Page, target: PageTarget) -> str:
        locator = target.locator.strip()
        if not locator:
            return html.unescape(await page.content())
        if locator.startswith(PREFIX):
            return await call_function(locator, page, self._addresses.real)
        for script in target.prep_actions:
            with contextlib.suppress(Error):  # nothing to unfold
                await page.evaluate(f"() => {{ {script} }}")
        try:
            value = await page.evaluate(f"() => {locator}")
        except PlaywrightTimeout:
            raise
        except Error as error:
            if page.is_closed():
                raise
            if "SyntaxError" in str(error):
                raise ValueError(f"locator {locator!r}: {str(error).partition(chr(10))[0]}") from error
            return ""  # the page has no such place
        return html.unescape("" if value is None else str(value))
