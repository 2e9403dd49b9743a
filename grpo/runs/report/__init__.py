"""Report.html: what a run or a sweep left, as one file for a browser; no server, no network, nothing beside it.

python -m grpo.report outputs/wordmath/grpo/RUN
"""

import base64
import hashlib
import html
import json
import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from grpo.runs.report.run import run_data
from grpo.runs.report.sweep import sweep_data
from grpo.runs.runs import load
from grpo.system.files import write_text
from grpo.system.metrics import GROUPS, TIMES, Metric, about

SAMPLES = 2000


def write_report(
    folder: str | Path, out: str | Path | None = None, samples: int = SAMPLES, ending: Mapping[str, Any] | None = None
) -> Path:
    """Returns where the page is: `out`, or FOLDER/report.html. folder: of a run or of a sweep.

    samples: how many of a run's are in the page at most. ending: what the manifest of a run that is just ending does not say yet.
    Raises UserError where there is neither a run nor a sweep.
    """
    folder = Path(folder)
    out = Path(out or folder / "report.html")
    runs = load(folder)
    if runs[0].folder == folder:
        runs[0].manifest.update(ending or {})
        data = run_data(runs[0], samples)
    else:
        data = sweep_data(runs, folder, out)
    data |= dictionary(data["metrics"].get("y", data["metrics"]))
    write_text(out, page(data))
    return out


def dictionary(names: Iterable[str]) -> dict[str, Any]:
    """about: unit and words of each metric by name; groups: the charts drawn unasked; times: the parts of a run's time."""
    known = {name: about(name) or Metric(name, "number", "") for name in names}
    return {
        "about": {name: {"unit": metric.unit, "words": metric.words} for name, metric in known.items()},
        "groups": [(title, [metric.name for metric in group if metric.charted]) for title, group in GROUPS.items()],
        "times": TIMES,
    }


def page(data: Mapping[str, Any]) -> str:
    """The whole document. A policy of content lets our one script run, by its hash, and nothing load anything."""
    js = "\n".join(part(name) for name in ("charts.js", "samples.js", "page.js"))
    css = part("page.css")
    content = plain({**data, "written": f"{datetime.now():%Y-%m-%d %H:%M}"})
    return Template(part("page.html")).substitute(
        policy=f"default-src 'none'; img-src data:; script-src {digest(js)}; style-src {digest(css)}",
        title=html.escape(data["name"]),
        css=css,
        # no completion ends the element it is in
        data=json.dumps(content, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
        js=js,
    )


def part(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def plain(value: Any) -> Any:
    """The same for JSON: six digits of a number, null for NaN and for infinity."""
    match value:
        case Mapping():
            return {name: plain(one) for name, one in value.items()}
        case list() | tuple() | np.ndarray():
            return [plain(one) for one in value]
        case np.generic():
            return plain(value.item())
        case float():
            return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
