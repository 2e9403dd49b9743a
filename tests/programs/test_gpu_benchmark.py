"""benchmarks/gpu.py: its jobs, its arithmetic and its parts. The figures of a GPU are not checked: none is here."""

import json
import sys
import warnings

import pytest
from on_gpu.jobs import MARK, Job, results, run, share_of, sorted_by
from on_gpu.table import COLUMNS, completed, line, table

SCRIPT = """
import json, sys, time
part = sys.argv[1]
if part == "hangs":
    time.sleep(3600)
print("a line of a library")
print({mark!r} + json.dumps(dict(tokens_per_s=2.0, step_s=3.0)), flush=True)
if part == "raises":
    raise MemoryError("out of memory:\\n  too many tokens")
print({mark!r} + json.dumps(dict(skipped="there is none here") if part == "lacks" else dict(step_s=4.0)))
"""


def command(tmp_path) -> list[str]:
    """Return a command that does, in place of a part, what its name says."""
    (tmp_path / "part.py").write_text(SCRIPT.format(mark=MARK))
    return [sys.executable, str(tmp_path / "part.py")]


def test_the_others_go_on_after_a_part_that_fails(tmp_path):
    jobs = [Job(part, "", "tiny") for part in ("raises", "lacks", "works")]
    failed, skipped, ok = results(jobs, command(tmp_path), 3600)
    assert (failed["status"], failed["why"]) == ("failed", "too many tokens")
    assert failed["values"] == {"tokens_per_s": 2.0, "step_s": 3.0}  # it was measured before
    assert (skipped["status"], skipped["why"]) == ("skipped", "there is none here")
    assert (ok["status"], ok["why"], ok["values"]) == ("ok", "", {"tokens_per_s": 2.0, "step_s": 4.0})


def test_a_part_that_hangs_is_ended_and_no_time_is_no_start(tmp_path):
    hung = run(Job("hangs", "", "tiny"), [*command(tmp_path), "hangs"], 0.2)
    assert (hung["status"], hung["why"], hung["values"]) == ("failed", "it was ended after 0 s", {})
    (late,) = results([Job("works", "", "tiny")], command(tmp_path), 1)
    assert (late["status"], late["why"]) == ("skipped", "no time was left: raise --minutes")
    assert [share_of(left) for left in (480, 240, 50)] == [120, 90, 50]


def test_the_most_important_part_comes_first():
    import gpu

    first = [(job.part, job.variant, job.shape) for job in gpu.chosen(["preflight", "update"], ["tiny", "1.5b"])]
    assert first[:2] == [("update", "shared_prompt", "1.5b"), ("update", "recompute", "1.5b")]
    assert first[2:4] == [("update", "no_liger", "1.5b"), ("preflight", "", "1.5b")]
    assert len(first) == 12  # 2 shapes x (5 updates and a preflight)
    assert {job.shape for job in gpu.chosen(["trl"], None)} == {"0.5b", "1.5b"}
    assert gpu.chosen(None, None) == gpu.ORDER == sorted_by(gpu.ORDER, reversed(gpu.ORDER))
    assert all(job.shape in gpu.SHAPES and job.variant in gpu.VARIANTS[job.part] for job in gpu.ORDER)


def test_carried_libraries_are_used_where_they_are_missing(tmp_path, monkeypatch):
    import gpu

    monkeypatch.setattr(gpu, "CARRIED", tmp_path)
    monkeypatch.setenv("PYTHONPATH", "mine")
    monkeypatch.setattr(gpu, "find_spec", lambda name: name)
    assert gpu.environment("cache")["PYTHONPATH"].split(":")[2:] == ["mine"]
    monkeypatch.setattr(gpu, "find_spec", lambda name: None if name == "antlr4" else name)
    assert gpu.environment("cache")["PYTHONPATH"].split(":")[2:] == ["mine", str(tmp_path)]
    with pytest.raises(ModuleNotFoundError, match=r"^antlr4 not installed: run benchmarks/carry.py"):
        gpu.one("update", "packed", "tiny", [])


def test_a_table_shows_values_reasons_and_gaps():
    job = {"part": "update", "variant": "packed", "shape": "tiny", "seconds": 1.0}
    values = {"tokens_per_s": 12345.6, "mfu": "no GPU", "graphs": 5}
    found = [
        completed(job | {"status": "ok", "why": "", "values": values}),
        completed(job | {"status": "failed", "why": "it hung", "values": {}}),
    ]
    assert found[1]["values"] == dict.fromkeys(key for key, _, _ in COLUMNS["update"])
    head, first, second, why = table(found).strip().splitlines()
    assert head.split()[:4] == ["shape", "part", "tokens/s", "MFU"]
    assert first.split()[:4] == ["tiny", "packed", "12,346", "no"] and set(second.split()[2:]) == {"-"}
    assert why.strip() == "failed: it hung"
    assert line(found[0]) == "update packed tiny: tokens/s 12,346, MFU no GPU, graphs 5"
    assert line(found[1]) == "update packed tiny: failed: it hung"


def test_the_arithmetic_of_an_update():
    """One layer: q and o 4 x 4, k and v 4 x 2, three of 4 x 8: 144 weights. A row of 2 + 3 tokens: 4 pass, 3 reach the head."""
    from on_gpu.models import config, needed_flops, rule_of_thumb
    from transformers import Qwen2Config, Qwen3Config

    small, groups = config(Qwen2Config, 4, 8, 1, 2, 1, 10), [(2, [3])]
    products, attention = 2 * 144 * 4 + 2 * 4 * 10 * 3, 4 * 4 * (1 + 2 + 3 + 4)
    assert needed_flops(small, groups) == 3 * products + 3 * attention == 4656
    assert needed_flops(small, groups, adapter=5) == 2 * products + 6 * 5 * 4 + 3 * attention
    wide = config(Qwen3Config, 4, 8, 1, 2, 1, 10, head_dim=4)  # q and o 4 x 8, k and v 4 x 4
    assert needed_flops(wide, groups) == 3 * (2 * 192 * 4 + 240) + 3 * 4 * 8 * 10
    assert (rule_of_thumb(100, 10), rule_of_thumb(100, 10, adapter=5)) == (6000, 4300)


def test_lengths_are_drawn_anew_for_each_update():
    from on_gpu.models import SHAPES

    shape = SHAPES["0.5b"]
    every = [n for turn in range(20) for _, answers in shape.groups(turn) for n in answers]
    assert shape.groups(0) != shape.groups(1) and shape.groups(0) == shape.groups(0)
    assert min(every) >= 2 and max(every) == 1024
    assert sum(every) / len(every) == pytest.approx(0.432 * 1024, rel=0.05)  # (1 - exp(-2)) / 2
    assert SHAPES["0.6b-16k"].groups(3) == [(384, [16000, 16000])]


def test_waits_are_counted_by_line():
    from on_gpu.device import waits

    found: dict = {}
    with waits(found):
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("another one", stacklevel=1)
    ((place, count),) = found["waits_at"].items()
    assert "programs/test_gpu_benchmark.py:" in place and count == 3
    assert found["waits"] == "no GPU"


@pytest.mark.slow
def test_an_update_is_measured():
    from on_gpu.update import forecast, update

    found: dict = {}
    update("tiny", "shared_prompt", lambda **values: found.update(json.loads(json.dumps(values))), ["seed=1"])
    assert found.keys() >= {key for key, _, _ in COLUMNS["update"]} - {"forecast_gb"}
    assert found["mfu"] == found["mfu_6n"] == found["waits"] == found["reserved_gb"] == found["busy"] == "no GPU"
    assert found["kernel"] == "shared_prompt/sdpa/torch/transformers" and found["longest"]["aten::mm"] > 0
    assert len(found["steps"]) == 2 and found["at_once"] == 2048

    foreseen = {}
    for variant in ("shared_prompt", "recompute", "builtin"):
        forecast(
            "tiny", variant, lambda variant=variant, **values: foreseen.update({variant: values["forecast_gb"]}), []
        )
    assert 0 < foreseen["recompute"] < foreseen["shared_prompt"] < found["peak_gb"]  # of the whole process
    weights = 4 * (1100 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)) / 1e9
    assert 3 * weights < foreseen["builtin"] < foreseen["recompute"]  # AdamW's state is there, gradients are not


@pytest.mark.slow
def test_a_rollout_is_measured():
    from on_gpu.rollout import rollout

    found: dict = {}
    rollout("tiny", "builtin", found.update, [])
    assert found.keys() == {key for key, _, _ in COLUMNS["rollout"]} - {"sync_s", "forecast_gb"}
    assert found["tokens_per_s"] == pytest.approx(2 * 4 * 48 / found["rollout_s"])


def test_verdicts_of_the_preflight_are_read():
    from on_gpu.preflight import VERDICT, summary

    lines = [
        "PASS gold, 0.1 s: 8 of 8, as it should be",
        "     lower it",
        "FAIL mask, 2.5 s: 1 of 8",
        "preflight: 2.6 s",
    ]
    found = [VERDICT.match(text).groups() for text in lines if VERDICT.match(text)]
    checks = {check: [verdict, float(took), why] for verdict, check, took, why in found}
    assert checks == {"gold": ["PASS", 0.1, "8 of 8, as it should be"], "mask": ["FAIL", 2.5, "1 of 8"]}
    assert summary(checks) == {"preflight_s": 2.6, "slowest": "mask", "failed": "mask", "verdicts": checks}
