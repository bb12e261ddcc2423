"""A report of a run as one page of HTML: its history, its losses, and what a restart would find.

`read_report` takes the facts from a catalog; `page` makes the page, and `to_json` plain values of the same.
"""

from ray_ckpt.analysis.report.document import to_json
from ray_ckpt.analysis.report.facts import Event, RunReport, read_report
from ray_ckpt.analysis.report.page import page

__all__ = ["Event", "RunReport", "page", "read_report", "to_json"]
