"""Writes the dashboard for Grafana: `python -m jobs.dashboards --out jobs/dashboards/grafana.json`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from jobs.dashboards.panels import checkpoint_dashboard

OUT = Path(__file__).parent / "grafana.json"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jobs.dashboards", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="default: beside this program")
    parser.parse_args(arguments).out.write_text(text(), encoding="utf-8")


def text() -> str:
    return json.dumps(checkpoint_dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    main()
