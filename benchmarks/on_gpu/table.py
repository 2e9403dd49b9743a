"""The columns of each part, and the results as tables."""

from collections.abc import Sequence

COLUMNS = {  # of each part: a value's name, its heading, its form
    "update": [
        ("tokens_per_s", "tokens/s", ",.0f"),
        ("mfu", "MFU", ".1%"),
        ("mfu_6n", "6N", ".1%"),
        ("step_s", "step s", ".3f"),
        ("peak_gb", "peak GB", ".2f"),
        ("reserved_gb", "reserved", ".2f"),
        ("forecast_gb", "forecast", ".2f"),
        ("warm_up_s", "warm-up s", ".1f"),
        ("compile_s", "compile s", ".1f"),
        ("graphs", "graphs", "d"),
        ("waits", "waits", "d"),
        ("busy", "busy", ".0%"),
        ("kernel", "kernel", "s"),
    ],
    "rollout": [
        ("tokens_per_s", "tokens/s", ",.0f"),
        ("rollout_s", "rollout s", ".2f"),
        ("step_ms", "token step ms", ".2f"),
        ("sync_s", "sync s", ".3f"),
        ("peak_gb", "peak GB", ".2f"),
        ("reserved_gb", "reserved", ".2f"),
        ("forecast_gb", "forecast", ".2f"),
        ("warm_up_s", "warm-up s", ".1f"),
    ],
    "preflight": [
        ("preflight_s", "checks s", ".1f"),
        ("command_s", "command s", ".1f"),
        ("slowest", "slowest check", "s"),
        ("failed", "failed", "s"),
    ],
}
COLUMNS["trl"] = COLUMNS["update"]


def completed(result: dict) -> dict:
    """Return a result that has every value of its part; None for one that was not measured."""
    return result | {"values": {key: None for key, _, _ in COLUMNS[result["part"]]} | result["values"]}


def cell(value, form: str) -> str:
    """Return a value as text: a reason as it is, and a dash for none."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else format(value, form)


def line(result: dict) -> str:
    """Return a result in one line, with the values that were measured."""
    head = f"{result['part']} {result['variant']} {result['shape']}".replace("  ", " ")
    shown = [(heading, result["values"].get(key), form) for key, heading, form in COLUMNS[result["part"]]]
    values = [f"{heading} {cell(value, form)}" for heading, value, form in shown if value is not None]
    why = [f"{result['status']}: {result['why']}"] if result["why"] else []
    return f"{head}: {', '.join([*why, *values])}"


def table(results: Sequence[dict]) -> str:
    """Return a table for each part, with a line for each result; the reason stands below one that failed or was skipped."""
    lines: list[str] = []
    for columns in (COLUMNS["update"], COLUMNS["rollout"], COLUMNS["preflight"]):
        mine = [result for result in results if COLUMNS[result["part"]] is columns]
        rows = [["shape", "part", *(heading for _, heading, _ in columns)]]
        for found in mine:
            part = found["variant"] or found["part"]
            rows.append([found["shape"], part, *(cell(found["values"].get(key), form) for key, _, form in columns)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        texts = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
        if mine:
            lines.append("\n" + texts[0])
        for text, found in zip(texts[1:], mine, strict=True):
            lines.append(text)
            if found["why"]:
                lines.append(f"{'':{widths[0]}}  {found['status']}: {found['why']}")
    return "\n".join(lines)
