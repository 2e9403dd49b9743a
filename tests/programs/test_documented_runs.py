"""Every run that the documents show passes its preflight, with a small model in place of one that is not here."""

import json
import re
from pathlib import Path

import pytest
from conftest import ROOT, compose_config
from helpers.documents import PAGES, commands, composable

from grpo.config.early import without_grader
from grpo.runs.run import Run
from grpo.system.errors import PreflightError
from train import train

LEFT_OUT = {  # what is not run here, by its words
    r"^-m |--help|--cfg|--config-dir|hydra.searchpath": "a sweep, a help text, or a folder of somebody's own",
    r"debug=forecast|preflight=off|replay=|ckpt_path=|source=": "a run without a preflight",
    r"engine=vllm": "vLLM is in an environment of its own",
    r"trainer.devices=|llama8b_8gpus": "several devices",
    r"task=agent|judge=": "programs and servers of others, which tests/extras/serve/test_agent_examples.py starts",
    r"quantization=4bit": "a GPU",
    r"[+]model.path.worked_answers": "a model that is trained first, for minutes",
    r"warm_start=": "a model that is trained first, for minutes",
    r"task=(mixture|musique|code|verl|open_instruct)|eval.sets.math|experiment=(quiz|tldr_length$)|parquet": "rows of the hub",
    r"vl3b|vl7b|model.vision=frozen": "models that see, which tests/extras/images/test_seeing_runs.py makes small",
    r"mcp:python my_server.py": "a server of the page, which tests/extras/tools/test_mcp_tools.py starts others",
    r"my_env.py": "an environment in TRL's form, which tests/tasks/test_jsonl.py plays",
    r"^task=jsonl algo=trl_default": "arguments that the page leaves open",
    r"mine/(axes|likely).py": "the files of a page, which tests/objectives/test_objectives.py and tests/apps/test_ideas.py name",
}
TEACHER = f"{ROOT}/grpo/extras/demo/demo_models/wordmath"
OTHER = [  # words of a command, and what takes their place
    (r"^model=(qwen|llama).*", "model=path model.path={toy} max_tokens=8"),
    (r"^model.path=FOLDER$", "model.path={toy} max_tokens=8"),
    (
        r"^(experiment=(?:qwen|t4).*)",
        r"\1 model.path={toy} task.path={rows} max_tokens=8 model.dtype=float32 trainer=cpu",
    ),
    (r"^task=gsm8k$", r"task=gsm8k task.path={rows}"),
    (r"^teacher.model.path=(FOLDER|RUN/checkpoints/best)$", f"teacher.model.path={TEACHER}"),
    (r"^task.path=FOLDER$", "task.path={rows}"),
    (r"^task.sources.gsm8k.task.path=FOLDER$", "task.sources.gsm8k.task.path={rows}"),
    (r"^task.path=\w+.jsonl$", "task.path={rows}/rows.jsonl"),
    (r"^task.path=(Übungen/größe.csv)$", r"task.path={rows}/\1"),
    (
        r"^(logger|report|resume|hydra.run.dir|preflight|max_tokens|prompt_limit.max_tokens|rollout.prompts|rollout.epochs)\b.*",
        "",
    ),
    (r"^task.make=textarena:.*", "task.make={rows}/game.py:Game"),
    (r"(my_rewards|mine|my_env).py", "{rows}/mine.py"),
]
MINE = """
def reward(completions, **_): return [float(len(text) % 3) for text in completions]
def brevity(completions, **_): return reward(completions)
def total_variation(student, teacher): return (student.exp() - teacher.exp()).abs().sum(-1) / 2
"""
GAME = """
class Game:
    "All games begin alike, as those of TextArena."
    def reset(self, seed=None): return "Guess a number from 1 to 20.", {}
    def step(self, action): return "higher", float(len(action) % 2), True, False, {}
"""
IS_POLICY = {"the gradient ignores microbatches"}  # there is none but rounding, if the teacher is the policy
MODEL_ALONE = {"there is something to learn", "prompts differ, answers end"}  # what a random model cannot pass


def documented() -> dict[str, list[str]]:
    """Return the arguments of every documented run, by page and number."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for words in commands(page):
            if words[:1] == ["python"] and words[1:2] == ["train.py"] and words[2:] not in found.values():
                found[f"{page.stem}-{len(found)}"] = words[2:]
    return found


RUNS = {
    name: words
    for name, words in documented().items()
    if not any(re.search(each, " ".join(words)) for each in LEFT_OUT)
}
FIRST, *OTHERS = RUNS  # the first is tried for each change


def small(words: list[str], toy: Path, rows: Path) -> list[str]:
    """Return the arguments with what is here in place of what is not."""
    done = []
    for word in words:
        for wanted, other in OTHER:
            word = re.sub(wanted, other.format(toy=toy, rows=rows), word)
        done += word.split(" ") if re.search(f"({toy}|{rows})( |$)", word) else [word]
    return [word for word in done if word]


def row(i: int, file: str) -> dict[str, str]:
    """Return a row with the columns of several datasets."""
    asked, right = f"Sam has {i} coins. Sam finds 3 coins. How many coins does Sam have?", str(i + 3)
    answer = right if file == "rows.jsonl" else f"#### {right}"
    return {
        "prompt": asked,
        "question": asked,
        "problem": asked,
        "answer": answer,
        "solution": f"\\boxed{{{right}}}",
        "worked": answer,
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", [FIRST, *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)])
def test_a_documented_run_passes_its_preflight(name, toy, tmp_path, monkeypatch):
    from grpo.extras.preflight import probe as probing

    rows = tmp_path / "rows"
    rows.mkdir()
    for file, first in (("train.jsonl", 0), ("test.jsonl", 60), ("validation.jsonl", 80), ("rows.jsonl", 0)):
        numbers = range(first, first + 60 - first // 2)
        (rows / file).write_text("".join(json.dumps(row(i, file)) + "\n" for i in numbers))
    (rows / "Übungen").mkdir()
    table = ["Frage;Lösung;Größe", *(f"{row(i, 'rows.jsonl')['prompt']};{i + 3};{i}" for i in range(60))]
    (rows / "Übungen" / "größe.csv").write_text("\n".join(table), encoding="utf-8-sig")
    (rows / "mine.py").write_text(MINE)
    (rows / "game.py").write_text(GAME)
    words = small(composable(RUNS[name]), toy, rows)
    config = compose_config(*words, "preflight=only", "forecast=false", "logger=none", f"output_dir={tmp_path}/run")
    without_grader(config)  # as the command line does
    config.rollout.prompts = min(config.rollout.prompts, 8)
    replaced = re.search(f"{toy}|{rows}", " ".join(words))
    if replaced:  # a random model needs no second look
        config.max_turns = min(config.max_turns, 2)
        monkeypatch.setattr(probing, "FURTHER", 1)
    with pytest.raises((SystemExit, PreflightError)):
        train(config)
    verdicts = Run(tmp_path / "run").manifest["preflight"]
    failed = {check: each["compared"] for check, each in verdicts.items() if each["result"] == "FAIL"}
    expected = (MODEL_ALONE if replaced else set()) | (IS_POLICY if TEACHER in " ".join(words) else set())
    assert not failed.keys() - expected, failed
    assert "do not depend on the rows" not in verdicts["prompts differ, answers end"]["remedy"]
