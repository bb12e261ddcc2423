"""Links: the pairs of nodes between which a copy failed, as the nodes that sent the copies reported."""

from __future__ import annotations

from collections.abc import Set

SILENT_FOR_S = 5.0  # time for which a failed link is not used; after it, a copy may try the link again


class Links:
    """The failed directed links between live nodes. A link that is not listed works."""

    def __init__(self) -> None:
        self._until_s: dict[tuple[str, str], float] = {}

    def failed(self, source: str, holder: str, now_s: float) -> bool:
        """Note that `holder` did not answer `source`; return True if the link worked before."""
        is_new = (source, holder) not in self._until_s
        self._until_s[source, holder] = now_s + SILENT_FOR_S
        return is_new

    def worked(self, source: str, holder: str) -> None:
        """Note that a copy from `source` has arrived on `holder`."""
        self._until_s.pop((source, holder), None)

    def works(self, source: str, holder: str, now_s: float) -> bool:
        """Return False if the link has failed less than SILENT_FOR_S ago."""
        return self._until_s.get((source, holder), now_s) <= now_s

    def forget(self, nodes: Set[str]) -> None:
        """Forget the links of nodes that are gone."""
        self._until_s = {link: until_s for link, until_s in self._until_s.items() if not nodes & {*link}}
