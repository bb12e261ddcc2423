"""Elements of HTML and SVG in which all text is escaped unless it is markup already.

The output is also well-formed XML, without the characters that XML refuses.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

VOID = frozenset({"meta", "link"})  # elements of HTML that have no end tag


class Html(str):
    """Markup, as opposed to text."""

    __slots__ = ()


def el(name: str, /, *content: str | Html, **attributes: str | float | None) -> Html:
    """Return an element; attribute `class_` is `class`, any other `_` is `-`, and None omits an attribute."""
    names = (
        f' {key.rstrip("_").replace("_", "-")}="{escape(_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    start = f"<{name}{''.join(names)}"
    return Html(f"{start}/>" if name in VOID else f"{start}>{join(content)}</{name}>")


def join(parts: Iterable[str | Html]) -> Html:
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def _value(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")
