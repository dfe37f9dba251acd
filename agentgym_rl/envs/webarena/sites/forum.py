"""The forum."""

from __future__ import annotations

from html import escape

from agentgym_rl.envs.webarena.sites.data import Comment, Data, Post
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
    text_area,
    text_field,
)

FORUM = Site(
    "REDDIT",
    "Postmill",
    {"Home": "/", "Forums": "/forums", "Submit": "/submit", "My account": "/user/nora"},
    passwords={"nora": "nora-password"},
)

_ORDERINGS = {"new": lambda post: -post.number, "top": lambda post: -post.votes}


def _listed(posts: list[Post]) -> str:
    return "".join(
        f"<article><h2>{link(_path(post), post.title)}</h2><p>{post.votes} points, by "
        f"{link(f'/user/{post.author}', post.author)} in {link(f'/f/{post.forum}', post.forum)}, "
        f"{len(post.comments)} comments</p></article>"
        for post in posts
    )


def _path(post: Post) -> str:
    words = "".join(letter if letter.isalnum() else " " for letter in post.title.lower()).split()
    return f"/f/{post.forum}/{post.number}/{'-'.join(words) or 'post'}"


def _find(data: Data, forum: str, number: str) -> Post | None:
    return next((post for post in data.posts if post.forum == forum and post.number == int(number)), None)


@FORUM.get("/")
def home(data: Data, request: Request) -> Answer:
    return Answer("All posts", _listed(sorted(data.posts, key=_ORDERINGS["top"])))


@FORUM.get("/forums")
def forums(data: Data, request: Request) -> Answer:
    rows = "".join(f"<li>{link(f'/f/{name}', name)}: {escape(about)}</li>" for name, about in data.forums.items())
    return Answer("Forums", f"<ul>{rows}</ul>")


@FORUM.get(r"/f/(\w+)(?:/(new|top))?")
def forum(data: Data, request: Request, name: str, order: str | None) -> Answer:
    if name not in data.forums:
        return not_found(request.path)
    orders = " ".join(link(f"/f/{name}/{each}", each.capitalize()) for each in _ORDERINGS)
    posts = sorted((post for post in data.posts if post.forum == name), key=_ORDERINGS[order or "new"])
    return Answer(name, paragraph(data.forums[name]) + f"<p>Sort by: {orders}</p>" + _listed(posts))


@FORUM.get(r"/f/(\w+)/(\d+)(?:/[a-z0-9-]*)?")
def post_page(data: Data, request: Request, forum: str, number: str) -> Answer:
    post = _find(data, forum, number)
    if post is None:
        return not_found(request.path)
    comments = "".join(
        f"<div class='comment'><p>{escape(comment.author)} wrote:</p><p>{escape(comment.text)}</p></div>"
        for comment in post.comments
    )
    vote = "Retract upvote" if post.voted else "Upvote"
    return Answer(
        post.title,
        f"<div class='submission__inner'><p>{escape(post.title)}</p><p class='submission__body'>{escape(post.text)}</p>"
        f"<p>by {link(f'/user/{post.author}', post.author)}</p></div><div class='submission__vote'>{post.votes} points"
        + form(f"/f/{forum}/{number}/vote", "", vote)
        + f"</div><h2>Comments</h2><div class='comments'>{comments}</div>"
        + form(f"/f/{forum}/{number}/comment", text_area("text", "Comment"), "Post"),
    )


@FORUM.post(r"/f/(\w+)/(\d+)/(vote|comment)")
def react(data: Data, request: Request, forum: str, number: str, what: str) -> Answer:
    post = _find(data, forum, number)
    if post is None:
        return not_found(request.path)
    if request.user is None:
        return log_in_first()
    if what == "vote":
        post.voted = not post.voted
        post.votes += 1 if post.voted else -1
    elif request.form.get("text", "").strip():
        post.comments.append(Comment(request.user, request.form["text"]))
    return Answer(location=_path(post))


@FORUM.get("/submit")
def write(data: Data, request: Request) -> Answer:
    if request.user is None:
        return log_in_first()
    fields = text_field("title", "Title") + text_area("text", "Body") + choice("forum", "Forum", data.forums)
    return Answer("Create a post", form("/submit", fields, "Create post"))


@FORUM.post("/submit")
def submit(data: Data, request: Request) -> Answer:
    title, name = request.form.get("title", "").strip(), request.form.get("forum", "")
    if request.user is None:
        return log_in_first()
    if not title or name not in data.forums:
        return Answer("Create a post", "<p role='alert'>A post needs a title and a forum.</p>", status=422)
    number = max(post.number for post in data.posts) + 1
    post = Post(number, name, request.user, title, request.form.get("text", ""), votes=1, voted=True)
    data.posts.append(post)
    return Answer(location=_path(post))


@FORUM.get(r"/user/(\w+)")
def user(data: Data, request: Request, name: str) -> Answer:
    posts = [post for post in data.posts if post.author == name]
    if not posts and name not in data.bios:
        return not_found(request.path)
    bio = f"<div class='user-bio__biography'>{escape(data.bios.get(name, ''))}</div>"
    edit = link("/user/nora/edit", "Edit biography") if name == request.user else ""
    return Answer(name, bio + edit + "<h2>Posts</h2>" + _listed(posts))


@FORUM.get(r"/user/(\w+)/edit")
def edit(data: Data, request: Request, name: str) -> Answer:
    if request.user != name:
        return log_in_first()
    fields = text_area("bio", "Biography", data.bios.get(name, ""))
    return Answer("Edit biography", form(f"/user/{name}/edit", fields, "Save"))


@FORUM.post(r"/user/(\w+)/edit")
def save(data: Data, request: Request, name: str) -> Answer:
    if request.user != name:
        return log_in_first()
    data.bios[name] = request.form.get("bio", "")
    return Answer(location=f"/user/{name}")
