"""Requests, answers and bits of HTML of the small sites."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from agentgym_rl.envs.webarena.sites.data import Data


@dataclass(frozen=True)
class Request:
    """What a browser asks for."""

    method: str
    path: str
    query: Mapping[str, str]
    form: Mapping[str, str]
    user: str | None
    """Who is logged in on this site."""


@dataclass(frozen=True)
class Answer:
    """A page, or the way to another one."""

    title: str = ""
    body: str = ""
    status: int = 200
    location: str = ""
    """Path to go to; empty for a page."""
    log_in: str | None = None
    """Who is logged in from now on; an empty text logs out."""


Handler = Callable[..., Answer]


@dataclass
class Site:
    """Pages of one site, by method and pattern of the path."""

    name: str
    """The environment variable that would hold its address."""
    title: str
    menu: Mapping[str, str]
    """Text of a link -> its path."""
    path: str = ""
    """Before all paths of the site."""
    needs_login: bool = False
    passwords: Mapping[str, str] = field(default_factory=dict)
    """Who can log in, and with what."""
    routes: list[tuple[str, re.Pattern[str], Handler]] = field(default_factory=list)

    def get(self, pattern: str) -> Callable[[Handler], Handler]:
        """Register what answers ``GET`` on a path, which is called with data, request and the pattern's groups."""
        return self._route("GET", pattern)

    def post(self, pattern: str) -> Callable[[Handler], Handler]:
        """The same for ``POST``."""
        return self._route("POST", pattern)

    def _route(self, method: str, pattern: str) -> Callable[[Handler], Handler]:
        def register(handler: Handler) -> Handler:
            self.routes.append((method, re.compile(pattern), handler))
            return handler

        return register

    def answer(self, data: Data, request: Request) -> Answer:
        """The page for a request."""
        if request.path == "/login":
            return self._log_in(request)
        if request.path == "/logout":
            return Answer(location="/", log_in="")
        if self.needs_login and request.user is None:
            return Answer(location="/login")
        for method, pattern, handler in self.routes:
            match = pattern.fullmatch(request.path)
            if match is not None and method == request.method:
                return handler(data, request, *match.groups())
        return not_found(request.path)

    def _log_in(self, request: Request) -> Answer:
        trouble = ""
        if request.method == "POST":
            name = request.form.get("username", "")
            if self.passwords.get(name) == request.form.get("password"):
                return Answer(location="/", log_in=name)
            trouble = "<p role='alert'>Wrong user name or password.</p>"
        fields = text_field("username", "User name") + text_field("password", "Password", kind="password")
        return Answer("Log in", trouble + form(f"{self.path}/login", fields, "Log in"))

    def document(self, answer: Answer, request: Request) -> str:
        """The whole page."""
        links = list(self.menu.items())
        links.append(("Log out", "/logout") if request.user else ("Log in", "/login"))
        menu = " ".join(f"<a href='{self.path}{path}'>{escape(text)}</a>" for text, path in links)
        greeting = f"<span>Welcome, {escape(request.user)}!</span>" if request.user else ""
        return (
            f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(answer.title)} - "
            f"{escape(self.title)}</title><style>{_STYLE}</style></head><body><nav aria-label='Menu'>{menu} {greeting}"
            f"</nav><main><h1>{escape(answer.title)}</h1>{answer.body}</main></body></html>"
        )


_STYLE = "body{font:16px sans-serif;margin:12px}nav a{margin-right:12px}td,th{padding:2px 8px;text-align:left}"


def not_found(path: str) -> Answer:
    return Answer("Not found", f"<p>There is nothing at {escape(path)}.</p>", status=404)


def log_in_first() -> Answer:
    return Answer(location="/login")


def form(action: str, fields: str, button: str, *, method: str = "post") -> str:
    return f"<form action='{escape(action)}' method='{method}'>{fields} <button>{escape(button)}</button></form>"


def text_field(name: str, label: str, value: str = "", *, kind: str = "text") -> str:
    return (
        f"<p><label>{escape(label)} <input name='{name}' type='{kind}' value='{escape(value)}' "
        "autocomplete='off'></label></p>"
    )


def text_area(name: str, label: str, value: str = "") -> str:
    return (
        f"<p><label>{escape(label)} <textarea name='{name}' rows='3' cols='60'>{escape(value)}</textarea></label></p>"
    )


def choice(name: str, label: str, options: Iterable[str], chosen: str = "") -> str:
    listed = "".join(
        f"<option{' selected' if option == chosen else ''}>{escape(option)}</option>" for option in options
    )
    return f"<p><label>{escape(label)} <select name='{name}'>{listed}</select></label></p>"


def link(path: str, text: str) -> str:
    return f"<a href='{escape(path)}'>{escape(text)}</a>"


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Cells are HTML."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def paragraph(text: Any, *, kind: str = "") -> str:
    return f"<p class='{kind}'>{escape(str(text))}</p>" if kind else f"<p>{escape(str(text))}</p>"
