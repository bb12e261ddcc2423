"""A run as one page of HTML: what happened, what was lost, and what a restart would find.

`read_report` takes the facts from a catalog, `page` makes the page, `to_json` the same as plain values.
"""

from ray_ckpt.analysis.report.facts import Event, RunReport, read_report, to_json
from ray_ckpt.analysis.report.page import page

__all__ = ["Event", "RunReport", "page", "read_report", "to_json"]
