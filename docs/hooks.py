"""Hooks of `mkdocs build`: generate parts of pages, and add the documents that lie beside the code."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from docs import generate  # noqa: E402

INCLUDED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "ARCHITECTURE.md": "internals/architecture.md",
    "ray_ckpt/core/PROTOCOL.md": "internals/protocol.md",
    "ray_ckpt/format/FORMAT.md": "internals/format.md",
    "jobs/bench/README.md": "internals/bench.md",
    "jobs/bench/RESULTS.md": "internals/bench-results.md",
}
"""The page of each document outside of docs/."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)


def on_files(files: Any, *, config: Any) -> Any:
    for path in sorted((ROOT / "ray_ckpt/design").glob("[0-9]*.md")):
        INCLUDED[path.relative_to(ROOT).as_posix()] = f"internals/decisions/{path.name}"
    there = {file.src_uri for file in files}
    for source, page in INCLUDED.items():
        if page not in there:
            files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    source = {uri: source for source, uri in INCLUDED.items()}.get(page.file.src_uri)
    here = ROOT / (source if source and page.file.abs_src_path is None else f"docs/{page.file.src_uri}")
    return rewrite_links(_expanded(markdown, here), here, page.file.src_uri)


def _expanded(markdown: str, here: Path) -> str:
    """Return the page with its directives replaced; links of an included document are as if it stood here."""

    def replace(match: re.Match[str]) -> str:
        text = generate.expand(match[0])
        if match[1] == "include":
            return _LINK.sub(lambda link: _moved(link, ROOT / match[2], here), text)
        return text

    return generate.DIRECTIVE.sub(replace, markdown)


def _moved(link: re.Match[str], source: Path, here: Path) -> str:
    if not link[3] or "://" in link[3]:
        return link[0]
    target = generate.relative((source.parent / link[3]).resolve(), here)
    return f"{link[1]}[{link[2]}]({target}{link[4] or ''})"


def rewrite_links(markdown: str, here: Path, uri: str) -> str:
    """Let links to documents lead to their pages, and show other files of the repository by their paths."""

    def replace(match: re.Match[str]) -> str:
        bang, text, target, anchor = match.groups()
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = (here.parent / target).resolve()
        if path.is_relative_to(ROOT / "docs") and (path.suffix != ".py"):
            to = path.relative_to(ROOT / "docs").as_posix()
        else:
            name = path.relative_to(ROOT).as_posix()
            if name not in INCLUDED:
                return f"{text} (`{name}`)" if text.strip("`") not in name else f"`{name}`"
            to = INCLUDED[name]
        link = generate.relative(Path("/", to), Path("/", uri))
        return f"{bang}[{text}]({link}{anchor or ''})"

    parts, at = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(replace, markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, _LINK.sub(replace, markdown[at:])])
