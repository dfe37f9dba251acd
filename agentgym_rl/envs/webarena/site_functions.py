"""What tasks ask of a site by name: ``func:shopping_get_latest_order_url()`` as an address or as a value to look at.

The shop is asked over Magento's REST interface, as the administrator; GitLab by the page that is open.
"""

from __future__ import annotations

import ast
import asyncio
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import requests

from agentgym_rl.errors import ConfigError, EnvServerError

if TYPE_CHECKING:
    from playwright.async_api import Page

PREFIX = "func:"
_TIMEOUT_S = 30.0
_MEMBER_ROLE = """account => {
    const row = [...document.querySelectorAll('tr')].find(row => row.textContent.includes('@' + account));
    const cell = row && row.querySelector('[data-label="Max role"], .col-max-role');
    return cell ? cell.innerText.trim() : '';
}"""


def parse_call(text: str) -> tuple[str, list[str]]:
    """Name and text arguments of ``func:name('argument')``; ``__page__`` stands for the page and is left out.

    Raises `ConfigError` for anything but a call of a known function with constants.
    """
    try:
        call = ast.parse(text.removeprefix(PREFIX), mode="eval").body
    except SyntaxError as error:
        raise ConfigError(f"{text!r}: {error.msg}") from error
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in _KNOWN:
        raise ConfigError(f"{text!r}: known functions are {', '.join(_KNOWN)}")
    given = [argument for argument in call.args if not (isinstance(argument, ast.Name) and argument.id == "__page__")]
    if call.keywords or not all(isinstance(argument, ast.Constant) for argument in given):
        raise ConfigError(f"{text!r}: arguments must be constants")
    return call.func.id, [str(argument.value) for argument in given if isinstance(argument, ast.Constant)]


async def call_function(text: str, page: Page, sites: Mapping[str, str]) -> str:
    """The value of ``func:...``; raises `EnvServerError` when the site does not tell."""
    name, arguments = parse_call(text)
    if name in _ASKED_OF_PAGE:
        return str(await page.evaluate(_ASKED_OF_PAGE[name], *arguments))
    return str(await asyncio.to_thread(_ASKED_OF_SITE[name], sites, *arguments))


def _post_url(sites: Mapping[str, str], url: str) -> str:
    """Where a forum post stands, without its title and without a comment's number."""
    parts = urlsplit(url).path.split("/")
    return f"{sites['REDDIT']}/f/{parts[2]}/{parts[3]}/" if len(parts) > 3 and parts[1] == "f" else url


def _latest_order_url(sites: Mapping[str, str]) -> str:
    """Where the shop shows the order that was placed last."""
    newest_first = {
        "searchCriteria[sortOrders][0][field]": "created_at",
        "searchCriteria[sortOrders][0][direction]": "DESC",
        "searchCriteria[pageSize]": "1",
    }
    orders = _ask_shop(sites, "orders", newest_first)["items"]
    if not orders:
        raise EnvServerError(f"{sites['SHOPPING']}: has no orders")
    return f"{sites['SHOPPING']}/sales/order/view/order_id/{int(orders[0]['increment_id'])}/"


def _latest_review(sites: Mapping[str, str], sku: str) -> Mapping[str, Any]:
    reviews = _ask_shop(sites, f"products/{quote(sku, safe='')}/reviews", {})
    return reviews[-1] if reviews else {}


def _latest_review_author(sites: Mapping[str, str], sku: str) -> str:
    return str(_latest_review(sites, sku).get("nickname", ""))


def _latest_review_rating(sites: Mapping[str, str], sku: str) -> str:
    """In percent."""
    ratings = _latest_review(sites, sku).get("ratings", [])
    return str(ratings[0]["percent"]) if ratings else ""


def _ask_shop(sites: Mapping[str, str], path: str, query: Mapping[str, str]) -> Any:
    base = f"{sites['SHOPPING']}/rest/default/V1"
    login = {
        "username": os.environ.get("SHOPPING_ADMIN_USER", "admin"),
        "password": os.environ.get("SHOPPING_ADMIN_PASSWORD", "admin1234"),
    }
    try:
        token = requests.post(f"{base}/integration/admin/token", json=login, timeout=_TIMEOUT_S)
        token.raise_for_status()
        headers = {"Authorization": f"Bearer {token.json()}"}
        answer = requests.get(f"{base}/{path}", params=query, headers=headers, timeout=_TIMEOUT_S)
        answer.raise_for_status()
        return answer.json()
    except (requests.RequestException, ValueError) as error:
        raise EnvServerError(f"the shop's interface: {error}") from error


_ASKED_OF_SITE: Mapping[str, Callable[..., str]] = {
    "reddit_get_post_url": _post_url,
    "shopping_get_latest_order_url": _latest_order_url,
    "shopping_get_sku_latest_review_author": _latest_review_author,
    "shopping_get_sku_latest_review_rating": _latest_review_rating,
}
_ASKED_OF_PAGE: Mapping[str, str] = {"gitlab_get_project_memeber_role": _MEMBER_ROLE}  # spelled so in task files
_KNOWN = (*_ASKED_OF_SITE, *_ASKED_OF_PAGE)
