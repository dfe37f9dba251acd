"""Hooks of mkdocs that let a page's links lead to the same places in the site as in the repository.

Pages link to sources by their path (``../verl/protocol.py``), which any viewer of the repository follows. A site has
nothing above its own folder, and no address of the repository would be right for every copy and version. So each file
that a page names becomes a page below ``source/``, and texts that are written elsewhere in the repository (``extra:
pages_elsewhere`` of mkdocs.yml) are pages like the others.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments.formatters import HtmlFormatter

_FENCED = re.compile(r"^(```+|~~~+).*?^\1[`~]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s]+)(?=\))")
_MEASURED = ("results.md", "performance.md", "scaling.md", "faults.md")
_LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".toml": "toml", ".json": "json"}
_SOURCE = "source"
_CODE_STYLES = {"light": "default", "dark": "github-dark"}
"""Names of Pygments' styles, by the theme's mode."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave pages of measured figures out of the navigation where there are no such figures."""
    absent = {name for name in _MEASURED if not (Path(config.docs_dir) / name).exists()}
    config.nav = list(_without(config.nav or [], absent))
    return config


def _without(nav: list[Any], absent: set[str]) -> Iterator[Any]:
    for entry in nav:
        ((title, content),) = entry.items()
        if isinstance(content, list):
            kept = list(_without(content, absent))
            if kept:
                yield {title: kept}
        elif content not in absent:
            yield entry


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are written elsewhere, one for each file or folder of the repository that a page names, and
    the colours of code."""
    root = _root(config)
    for mode, style in _CODE_STYLES.items():
        rules = HtmlFormatter(style=style).get_style_defs(".codehilite")
        files.append(File.generated(config, f"assets/code-{mode}.css", content=rules))
    for uri, origin in _elsewhere(config).items():
        text = (root / origin).read_text(encoding="utf-8")
        files.append(File.generated(config, uri, content=text))
    for target in sorted({*_named_sources(files, config)}):
        text = _source_page(root, target)
        files.append(File.generated(config, _source_uri(root, target), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page's text with links to the repository's files leading to their pages."""
    if page.file.src_uri.startswith(f"{_SOURCE}/"):
        return markdown
    return _rewritten(markdown, page.file.src_uri, config)


@event_priority(-100)  # after the search has written its index
def on_post_build(config: MkDocsConfig) -> None:
    """Leave sources out of what is searched: they would bury the pages."""
    path = Path(config.site_dir, "search", "search_index.json")
    index = json.loads(path.read_text(encoding="utf-8"))
    index["docs"] = [entry for entry in index["docs"] if not entry["location"].startswith(f"{_SOURCE}/")]
    path.write_text(json.dumps(index), encoding="utf-8")


def _rewritten(markdown: str, uri: str, config: MkDocsConfig) -> str:
    def rewrite(match: re.Match[str]) -> str:
        place = _place(match["target"], uri, config)
        if place is None:
            return match["target"]
        fragment = urlsplit(match["target"]).fragment
        return posixpath.relpath(place, posixpath.dirname(uri) or ".") + (f"#{fragment}" if fragment else "")

    pieces, end = [], 0
    for fence in _FENCED.finditer(markdown):
        pieces += [_LINK.sub(rewrite, markdown[end : fence.start()]), fence.group()]
        end = fence.end()
    return "".join([*pieces, _LINK.sub(rewrite, markdown[end:])])


def _place(link: str, uri: str, config: MkDocsConfig) -> str | None:
    """The page of the site that a link of page ``uri`` leads to; None for one that is right as it stands."""
    target = _target(link, uri, config)
    if target is None:
        return None
    pages = {origin: page for page, origin in _elsewhere(config).items()}
    docs = Path(config.docs_dir).name
    if target.startswith(f"{docs}/"):
        return target.removeprefix(f"{docs}/")
    return pages.get(target) or _source_uri(_root(config), target)


def _target(link: str, uri: str, config: MkDocsConfig) -> str | None:
    """The path within the repository that a link names; None for other sites, anchors, and what is not there."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc or not parts.path or parts.path.startswith("/"):
        return None
    origin = _elsewhere(config).get(uri, f"{Path(config.docs_dir).name}/{uri}")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), parts.path))
    return target if (_root(config) / target).exists() else None


def _named_sources(files: Files, config: MkDocsConfig) -> Iterator[str]:
    """Paths within the repository that pages link to and that have no page of their own."""
    for file in files.documentation_pages():
        text = _FENCED.sub("", file.content_string)
        for match in _LINK.finditer(text):
            target = _target(match["target"], file.src_uri, config)
            place = _place(match["target"], file.src_uri, config)
            if target is not None and place is not None and place.startswith(f"{_SOURCE}/"):
                yield target


def _source_page(root: Path, target: str) -> str:
    path = root / target
    head = f"# {target}\n\n"
    if path.is_dir():
        inside = sorted(each for each in path.rglob("*") if each.is_file() and "__pycache__" not in each.parts)
        return head + "\n".join(f"* `{each.relative_to(path)}`" for each in inside) + "\n"
    text = path.read_text(encoding="utf-8")
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{head}{fence}{_LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def _source_uri(root: Path, target: str) -> str:
    return f"{_SOURCE}/{target}/index.md" if (root / target).is_dir() else f"{_SOURCE}/{target}.md"


def _elsewhere(config: MkDocsConfig) -> Mapping[str, str]:
    return dict(config.extra["pages_elsewhere"])


def _root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).parent
