"""Writes report.html: a run, or all runs of a folder, as one page for a browser, complete in one file, without a server or a
network.

`python -m grpo.report outputs/wordmath/grpo/RUN` writes it again.
"""

import base64
import hashlib
import html
import json
import math
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from grpo.extras.report.folder import folder_data
from grpo.extras.report.run import run_data
from grpo.runs.run import Run
from grpo.system.errors import UserError
from grpo.system.files import write_text
from grpo.system.metrics import GROUPS, TIMES, Metric, about, healthy
from grpo.system.output.console import busy

NEEDS = ("health", "curves")  # warnings; what more compute will give
PROGRAMS = ("plots", "predict")
SAMPLES = 2000


@busy("writing the report")
def write_report(
    folder: str | Path,
    out: str | Path | None = None,
    samples: int = SAMPLES,
    ending: Mapping[str, Any] | None = None,
    live: float | None = None,
) -> Path:
    """Write the page of a run or a folder and return its path. The arguments are those of `document`, and
    out: path of the page; None means FOLDER/report.html."""
    out = Path(out or Path(folder) / "report.html")
    write_text(out, document(Path(folder), out, samples, ending, live))
    return out


def document(
    folder: Path,
    out: Path | None,
    samples: int = SAMPLES,
    ending: Mapping[str, Any] | None = None,
    live: float | None = None,
) -> str:
    """Return the page of a run, or of all runs in a folder, such as a sweep.

    folder: the folder of the run, or with runs; else UserError. out: the place of the page, from which its links start; None: the
    server of the folder. samples: the largest number of samples. ending: entries for a manifest that is not up to date, because
    the run is just ending. live: seconds after which the page of a run that goes on, or of a folder, loads itself again; of a
    folder more if it takes long to make; None: never.
    """
    run, begun = Run(folder), time.monotonic()
    if run.evaluates:
        how = f"its numbers are in metrics.json, and eval.py compare={folder},OTHER compares it"
        raise UserError(f"{folder} is an evaluation, which has no page: {how}")
    run.manifest.update(ending or {})
    data = run_data(run, samples) if run.config else folder_data(folder, samples, out)
    if data["kind"] == "folder":
        data["live"] = live and max(live, 20 * (time.monotonic() - begun))
    else:
        data["live"] = live if data["status"] == "running" else None
    return page(data | dictionary(data["metrics"].get("y", data["metrics"])))


def dictionary(names: Iterable[str]) -> dict[str, Any]:
    """Return the dictionary's entries of these metrics (about), the charts shown at first (groups), the kinds of time (times)."""
    entries = {name: about(name) or Metric(name, "number", "") for name in names}
    return {
        "about": {
            name: {"unit": metric.unit, "words": metric.words, "healthy": healthy(metric)}
            for name, metric in entries.items()
        },
        "groups": [(title, [metric.name for metric in group if metric.charted]) for title, group in GROUPS.items()],
        "times": TIMES,
    }


def page(data: Mapping[str, Any]) -> str:
    """Return the HTML document. Its Content-Security-Policy allows only our script, by its hash, and no loading at all."""
    js = "\n".join(
        part(name) for name in ("charts.js", "timeline.js", "samples.js", "prediction.js", "folder.js", "page.js")
    )
    css = part("page.css")
    content = plain({**data, "written": f"{datetime.now():%Y-%m-%d %H:%M}"})
    return Template(part("page.html")).substitute(
        policy=f"default-src 'none'; img-src data:; script-src {digest(js)}; style-src {digest(css)}",
        title=html.escape(data["name"]),
        css=css,
        # so that no completion can close the script element
        data=json.dumps(content, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
        js=js,
    )


def part(name: str) -> str:
    """Return the text of a file in this folder."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    """Return the hash of a script or style, in the form of a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def plain(value: Any) -> Any:
    """Return a value as JSON types: numbers with six significant digits, null for NaN and infinity."""
    match value:
        case Mapping():
            return {name: plain(part) for name, part in value.items()}
        case list() | tuple() | np.ndarray():
            return [plain(part) for part in value]
        case np.generic():
            return plain(value.item())
        case float():
            return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
