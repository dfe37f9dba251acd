"""The place for code."""

from __future__ import annotations

from html import escape

from agentgym_rl.envs.webarena.sites.data import Data, Issue, Project
from agentgym_rl.envs.webarena.sites.pages import (
    Answer,
    Request,
    Site,
    choice,
    form,
    link,
    log_in_first,
    not_found,
    paragraph,
    table,
    text_area,
    text_field,
)

CODE = Site(
    "GITLAB",
    "GitLab",
    {"Projects": "/", "Starred": "/starred", "Issues assigned to me": "/assigned"},
    passwords={"liam": "liam-password"},
)

ROLES = ("Guest", "Reporter", "Developer", "Maintainer")
LABELS = ("bug", "feature", "docs")


def _listed(projects: list[Project]) -> str:
    return table(
        ("Project", "Description", "Stars"),
        [(link(f"/{p.path}", p.path), escape(p.about), str(p.stars)) for p in projects],
    )


@CODE.get("/")
def home(data: Data, request: Request) -> Answer:
    return Answer("Projects", _listed(list(data.projects.values())))


@CODE.get("/starred")
def starred(data: Data, request: Request) -> Answer:
    return Answer("Starred projects", _listed([project for project in data.projects.values() if project.starred]))


@CODE.get("/assigned")
def assigned(data: Data, request: Request) -> Answer:
    rows = [
        (link(f"/{project.path}/-/issues/{issue.number}", issue.title), escape(project.path))
        for project in data.projects.values()
        for issue in project.issues
        if issue.assignee == request.user and not issue.closed
    ]
    return Answer("Issues assigned to me", table(("Issue", "Project"), rows))


@CODE.get(r"/(\w+/[\w-]+)")
def project_page(data: Data, request: Request, path: str) -> Answer:
    project = data.projects.get(path)
    if project is None:
        return not_found(request.path)
    files = "".join(f"<li>{link(f'/{path}/-/blob/{name}', name)}</li>" for name in project.files)
    parts = " ".join(
        link(f"/{path}/-/{part}", text) for part, text in (("issues", "Issues"), ("project_members", "Members"))
    )
    return Answer(
        path,
        paragraph(project.about)
        + f"<p>{parts}</p><p>{project.stars} stars</p>"
        + form(f"/{path}/-/star", "", "Unstar" if project.starred else "Star")
        + f"<h2>Files</h2><ul>{files}</ul>",
    )


@CODE.post(r"/(\w+/[\w-]+)/-/star")
def star(data: Data, request: Request, path: str) -> Answer:
    project = data.projects.get(path)
    if project is None:
        return not_found(request.path)
    if request.user is None:
        return log_in_first()
    project.starred = not project.starred
    project.stars += 1 if project.starred else -1
    return Answer(location=f"/{path}")


@CODE.get(r"/(\w+/[\w-]+)/-/blob/([\w.]+)")
def file_page(data: Data, request: Request, path: str, name: str) -> Answer:
    project = data.projects.get(path)
    if project is None or name not in project.files:
        return not_found(request.path)
    return Answer(name, f"<pre id='content-body'>{escape(project.files[name])}</pre>")


@CODE.get(r"/(\w+/[\w-]+)/-/issues")
def issues(data: Data, request: Request, path: str) -> Answer:
    project = data.projects.get(path)
    if project is None:
        return not_found(request.path)
    label, state = request.query.get("label", "all"), request.query.get("state", "open")
    shown = [
        issue
        for issue in project.issues
        if label in ("all", issue.label) and state in ("all", "closed" if issue.closed else "open")
    ]
    chosen = choice("label", "Label", ("all", *LABELS), label) + choice(
        "state", "State", ("open", "closed", "all"), state
    )
    rows = [(link(f"/{path}/-/issues/{issue.number}", issue.title), issue.label) for issue in shown]
    return Answer(
        f"Issues of {path}",
        form(f"/{path}/-/issues", chosen, "Filter", method="get")
        + table(("Issue", "Label"), rows)
        + link(f"/{path}/-/issues/new", "New issue"),
    )


@CODE.get(r"/(\w+/[\w-]+)/-/issues/new")
def new_issue(data: Data, request: Request, path: str) -> Answer:
    project = data.projects.get(path)
    if project is None:
        return not_found(request.path)
    if request.user is None:
        return log_in_first()
    fields = text_field("title", "Title") + text_area("text", "Description") + choice("label", "Label", LABELS)
    assignee = choice("assignee", "Assignee", ("nobody", *project.members))
    return Answer("New issue", form(f"/{path}/-/issues", fields + assignee, "Create issue"))


@CODE.post(r"/(\w+/[\w-]+)/-/issues")
def create_issue(data: Data, request: Request, path: str) -> Answer:
    project = data.projects.get(path)
    if project is None:
        return not_found(request.path)
    if request.user is None:
        return log_in_first()
    number = max((issue.number for issue in project.issues), default=0) + 1
    assignee = request.form.get("assignee", "nobody").replace("nobody", "")
    label = request.form.get("label", LABELS[0])
    title, text = request.form.get("title", ""), request.form.get("text", "")
    project.issues.append(Issue(number, title, text, label, request.user, assignee))
    return Answer(location=f"/{path}/-/issues/{number}")


@CODE.get(r"/(\w+/[\w-]+)/-/issues/(\d+)")
def issue_page(data: Data, request: Request, path: str, number: str) -> Answer:
    project = data.projects.get(path)
    found = [] if project is None else [issue for issue in project.issues if issue.number == int(number)]
    if not found:
        return not_found(request.path)
    issue = found[0]
    return Answer(
        issue.title,
        f"<div data-qa-selector='title_content'>{escape(issue.title)}</div><div class='description'>"
        f"{escape(issue.text)}</div><p>Label: <span class='label'>{escape(issue.label)}</span></p><p>Assignee: "
        f"<span class='assignee'>{escape(issue.assignee or 'nobody')}</span></p><p>By {escape(issue.author)}</p>"
        + paragraph("Closed" if issue.closed else "Open", kind="state")
        + form(f"/{path}/-/issues/{number}/close", "", "Reopen issue" if issue.closed else "Close issue"),
    )


@CODE.post(r"/(\w+/[\w-]+)/-/issues/(\d+)/close")
def close_issue(data: Data, request: Request, path: str, number: str) -> Answer:
    project = data.projects.get(path)
    if request.user is None:
        return log_in_first()
    for issue in [] if project is None else project.issues:
        if issue.number == int(number):
            issue.closed = not issue.closed
    return Answer(location=f"/{path}/-/issues/{number}")


@CODE.get(r"/(\w+/[\w-]+)/-/project_members")
def members(data: Data, request: Request, path: str) -> Answer:
    project = data.projects.get(path)
    if project is None:
        return not_found(request.path)
    rows = "".join(
        f"<tr><td>@{escape(name)}</td><td class='col-max-role'>{escape(role)}</td></tr>"
        for name, role in project.members.items()
    )
    fields = text_field("name", "User name") + choice("role", "Role", ROLES)
    return Answer(
        f"Members of {path}",
        f"<table><tr><th>Account</th><th>Max role</th></tr>{rows}</table><h2>Invite a member</h2>"
        + form(f"/{path}/-/project_members", fields, "Invite"),
    )


@CODE.post(r"/(\w+/[\w-]+)/-/project_members")
def invite(data: Data, request: Request, path: str) -> Answer:
    project, name, role = data.projects.get(path), request.form.get("name", "").strip(), request.form.get("role", "")
    if project is None:
        return not_found(request.path)
    if request.user is None:
        return log_in_first()
    if not name.isalnum() or role not in ROLES:
        return Answer("Invite a member", "<p role='alert'>A member needs a name and a role.</p>", status=422)
    project.members[name] = role
    return Answer(location=f"/{path}/-/project_members")
