"""The notebooks, executed on runs made here. Their output is compared with the files of these runs.

`PYTHONPATH=tests python tests/programs/test_notebooks.py` strips them, as they have to be in git.
"""

import csv
import io
import json
import os
import re
import shutil
import sys
from contextlib import redirect_stdout
from html import unescape

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ROOT, compose_config
from helpers.runs import VARIED
from pyarrow import parquet
from scipy.stats import binomtest

from grpo.extras.report.statistics import arm_interval
from notebooks import cards, figures, folders
from train import train

nbformat = pytest.importorskip("nbformat")  # missing where only vLLM is tested
NotebookClient = pytest.importorskip("nbclient").NotebookClient
KernelSpecManager = pytest.importorskip("jupyter_client.kernelspec").KernelSpecManager
InteractiveShell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
AsyncKernelManager = pytest.importorskip("jupyter_client.manager").AsyncKernelManager

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


# -- as files


def stripped(notebook):
    """Return the notebook without traces of the last execution: outputs, counts, and the machine."""
    notebook = notebook.copy()
    notebook.metadata = {"kernelspec": KERNEL}
    notebook.cells = [nbformat.NotebookNode({**cell, "metadata": {}}) for cell in notebook.cells]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_stripped_and_opens_with_its_question(file):
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    assert notebook == stripped(notebook), (
        f"PYTHONPATH=tests python tests/programs/test_notebooks.py strips {file.name}"
    )
    first = notebook.cells[0]
    assert first.cell_type == "markdown" and re.match(r"# .+\n\n\*\*[^*]+\?\*\*\n", first.source)


# -- executed


def execute(name, folder, tmp_path, warns=False, named=(), **environment):
    """Return the outputs of each code cell of a notebook in `folder`: {"text": ..., "html": [...], "images": n}.

    The kernel is this interpreter with the grpo of this checkout. named: pairs such as FOLDER and the folder that a user writes
    there.
    """
    spec = tmp_path / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec.write_text(json.dumps({"argv": argv, **KERNEL}))
    specs = KernelSpecManager(kernel_dirs=[str(spec.parents[1])], ensure_native_kernel=False)
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    for variable, value in named:
        (cell,) = (cell for cell in notebook.cells if re.search(rf"^{variable} = ", cell.source, re.M))
        cell.source = re.sub(rf"^{variable} = \S+", f"{variable} = {str(value)!r}", cell.source, flags=re.M)
    folder.mkdir(exist_ok=True)
    client = NotebookClient(
        notebook,
        timeout=1800,
        km=AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs),
        resources={"metadata": {"path": str(folder)}},
    )
    # tqdm warns about ipywidgets, which come with the extra `notebooks`
    quiet = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore:IProgress not found"}
    client.execute(env={**os.environ, **quiet, **environment})
    return [shown(cell.outputs, warns) for cell in notebook.cells if cell.cell_type == "code"]


def shown(outputs, warns):
    assert warns or not [output.text for output in outputs if output.get("name") == "stderr"]
    data = [output.get("data", {}) for output in outputs]
    text = "".join(output.get("text", "") for output in outputs) + "".join(d.get("text/plain", "") for d in data)
    html = [d["text/html"] for d in data if "text/html" in d]
    return {"text": text, "html": html, "images": sum("image/png" in d for d in data)}


def rows(html):
    """Return the cells of an HTML table, line by line."""
    lines = re.findall(r"<tr.*?</tr>", html, re.S)
    return [[unescape(cell).strip() for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line, re.S)] for line in lines]


def column(html, name):
    """Return {first cell: value of the column} of an HTML table whose head has a separate line for the index."""
    head, _, *body = rows(html)
    return {line[0]: line[head.index(name)] for line in body}


def text_of(html):
    return unescape(re.sub(r"<[^>]+>", "", html))


JOBS = [(algo, seed) for algo in ("grpo", "dr_grpo") for seed in (0, 1)]


def trained(toy, folder, jobs):
    """Return a folder outputs/ with some jobs of a sweep of two algorithms and two seeds. The newest run keeps no tokens. There
    are three held-out problems."""
    sweep = folder / "outputs" / "sweep"
    for job in jobs:
        algo, seed = JOBS[job]
        told = [f"algo={algo}", f"seed={seed}"]
        config = compose_config(
            *told,
            *f"""model=path model.path={toy} debug=smoke preflight=off callbacks=[health,samples,checkpoint]
            callbacks.samples.token_logprobs={"false" if job == 3 else "true"}""".split(),
            "rollout={prompts: 4, group_size: 4, num_rollouts: 3}",
            *f"forecast=false max_tokens=8 optim.optimizer.lr=1e-2 output_dir={sweep / str(job)}".split(),
        )
        config.task = VARIED
        train(config, told)
    (sweep / "multirun.yaml").touch()
    return sweep.parent


@pytest.fixture(scope="module")
def two(toy, tmp_path_factory):
    """The first run and the newest one."""
    return trained(toy, tmp_path_factory.mktemp("two"), (0, 3))


@pytest.fixture(scope="module")
def outputs(toy, tmp_path_factory):
    """All four runs, and a failed job."""
    folder = trained(toy, tmp_path_factory.mktemp("project"), range(4))
    sweep = folder / "sweep"
    shutil.copytree(sweep / "0", sweep / "4")
    manifest = json.loads((sweep / "4" / "manifest.json").read_text())
    (sweep / "4" / "manifest.json").write_text(json.dumps({**manifest, "status": "failed", "seed": 2}))
    return folder


def metrics(run):
    with open(run / "metrics.csv") as file:
        return list(csv.DictReader(file))


def last_accuracy(run):
    return float(metrics(run)[-1]["eval/accuracy"])


def answers(run, after):
    """Return {item: record} of an evaluation."""
    return {
        record["item"]: record
        for record in parquet.read_table(run / "evaluations" / f"{after:06d}.parquet").to_pylist()
    }


@pytest.mark.slow
def test_01_tells_of_the_newest_run(two, tmp_path):
    run = two / "sweep" / "3"
    cells = execute("01_run", two.parent / "notebooks", tmp_path, named=[("BESIDE", two / "sweep" / "0")])
    said, _, parts, evaluations, change, several, levels, health, _, moves, time, _, beside, points = cells
    assert "sweep/3, finished, 3 of 3 rollouts\noverrides: algo=dr_grpo seed=1" in said["text"]
    assert [cell["images"] for cell in cells] == [0, 1, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0]
    for cell, setting in (
        (parts, "task.rewards=[correct,format]"),
        (several, "eval.samples=4 eval.sampling.temperature=1"),
        (levels, "eval.by=[level]"),
        (moves, "algo/kl=loss adds one"),
        (moves, "algo.num_epochs=2"),
    ):
        assert setting in cell["text"]
    assert "algo=grpo: " in beside["text"] and "sweep/0\nalgo=dr_grpo: " in beside["text"]
    difference = 100 * (last_accuracy(run) - last_accuracy(two / "sweep" / "0"))
    assert f"to this run {difference:+.1f} points" in points["text"] and "on 3 problems" in points["text"]

    values, lows = (column(evaluations["html"][0], name) for name in ("value", "low"))
    measured = {row["step"]: float(row["eval/accuracy"]) for row in metrics(run)}
    assert list(values) == list(measured) == ["0", "1", "2", "3"]
    for step, accuracy in measured.items():
        interval = binomtest(round(3 * accuracy), 3).proportion_ci(method="wilson")
        assert values[step] == f"{accuracy:.1%}" and lows[step] == f"{interval.low:.1%}"

    before, after = answers(run, 0), answers(run, 3)
    better = sum(after[item]["correct"] > before[item]["correct"] for item in before)
    worse = sum(after[item]["correct"] < before[item]["correct"] for item in before)
    assert f"{better} better, {worse} worse, {3 - better - worse} as before" in change["text"]
    assert f"{100 * (better - worse) / 3:+.1f} points" in change["text"]

    highest = max(float(row["rollout/logprob_gap"]) for row in metrics(run) if row["rollout/logprob_gap"])
    assert column(health["html"][0], "highest")["rollout/logprob_gap"] == f"{highest:.3f}"
    truncated = sum(float(row["rollout/truncated"] or 0) > 0.5 for row in metrics(run))
    assert column(health["html"][0], "rollouts outside")["rollout/truncated"] == str(truncated)
    spent = sum(float(row["time/update"] or 0) for row in metrics(run))
    assert rows(time["html"][0])[-1][:2] == ["time/update", f"{spent:.1f}"]


@pytest.mark.slow
def test_01_shows_parts_samples_levels_and_the_kl(tmp_path):
    """A run that has them: two parts of the reward, two samples of a problem, steps, a KL, two updates. No other run is there."""
    settings = (
        "task.rewards=[correct,format] task.weights=[1,0.1] eval.samples=2 eval.sampling.temperature=1 algo/kl=loss"
    )
    folder = tmp_path / "project" / "outputs" / "run"
    settings += f" algo.num_epochs=2 debug=smoke preflight=off forecast=false callbacks=samples output_dir={folder}"
    train(compose_config(*settings.split()))
    cells = execute("01_run", folder.parents[1] / "notebooks", tmp_path)
    assert [cell["images"] for cell in cells] == [0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 0, 0]
    assert "There is no other run" in cells[12]["text"] and not any(
        cells[i]["text"].startswith("No ") for i in range(12)
    )


@pytest.mark.slow
def test_02_shows_samples_groups_changes_and_tokens(outputs, tmp_path):
    run = outputs / "sweep" / "0"
    cells = execute("02_rollouts", outputs.parent / "notebooks", tmp_path, named=[("FOLDER", run)])
    said, table, cards, groups, changes, tokens = cells
    assert "samples of 3 rollouts, from 1 to 3" in said["text"]
    samples = parquet.read_table(run / "rollouts" / "000003.parquet").to_pylist()
    rewards = [float(line[rows(table["html"][0])[0].index("reward")]) for line in rows(table["html"][0])[1:]]
    assert rewards == pytest.approx(sorted((s["reward"] for s in samples), reverse=True)[:10], abs=1e-6)

    best, worst = (f"reward {pick(s['reward'] for s in samples):.3g} " for pick in (max, min))
    first, *_, last = cards["html"][0].split('<div style="border-left')[1:]
    assert best in text_of(first) and worst in text_of(last)
    assert any(s["completion"] in text_of(first) for s in samples if f"{s['reward']:.3g} " in best)

    differ = column(groups["html"][0], "rewards differ")
    effective = {
        row["step"]: row["rollout/effective_groups"] for row in metrics(run) if row["rollout/effective_groups"]
    }
    assert groups["images"] == 1 and differ == {step: f"{float(share):.0%}" for step, share in effective.items()}

    before, after = answers(run, 0), answers(run, 3)
    became_right = sum(after[item]["correct"] and not before[item]["correct"] for item in before)
    assert f"of 3 problems {became_right} became right" in changes["text"]

    assert len(tokens["html"]) == 3
    least_sure = min(samples, key=lambda s: sum(s["rollout_logprobs"]) / len(s["rollout_logprobs"]))
    spans = [float(p) for p in re.findall(r'<span title="([\d.]+)"', tokens["html"][0])]
    assert spans == pytest.approx(np.exp(least_sure["rollout_logprobs"]), abs=6e-4)


@pytest.mark.slow
def test_02_says_how_to_keep_tokens_and_goes_on(outputs, tmp_path):
    *_, tokens = execute("02_rollouts", outputs.parent / "notebooks", tmp_path)  # the newest run has none
    assert "callbacks.samples.token_logprobs=true" in tokens["text"] and not tokens["html"]


@pytest.mark.slow
def test_03_compares_the_arms_of_what_finished(outputs, tmp_path):
    sweep = outputs / "sweep"
    said, comparison, words, effect, jobs, curves = execute("03_sweep", outputs.parent / "notebooks", tmp_path)
    assert "sweep: 5 runs, 4 finished, 1 failed" in said["text"]
    head, *body = rows(jobs["html"][0])
    states = {line[head.index("folder")][-1]: line[head.index("status")] for line in body}
    assert states == {"0": "finished", "1": "finished", "2": "finished", "3": "finished", "4": "failed"}
    assert curves["images"] == effect["images"] == 1

    jobs_of = {"algo=grpo": (0, 1), "algo=dr_grpo": (2, 3)}
    accuracy = {arm: [last_accuracy(sweep / str(job)) for job in of] for arm, of in jobs_of.items()}
    table = comparison["html"][0]
    for arm, (a, b) in accuracy.items():
        assert [column(table, f"seed {seed}")[arm] for seed in (0, 1)] == [f"{a:.1%}", f"{b:.1%}"]
        answered = [answers(sweep / str(job), 3) for job in jobs_of[arm]]
        _, low, high, _ = arm_interval([[float(one[item]["correct"]) for item in answered[0]] for one in answered])
        shown = f"{(a + b) / 2:.1%} ({100 * low:.1f} to {100 * high:.1f})"
        assert column(table, "accuracy (95 %)")[arm] == shown
    difference = (sum(accuracy["algo=dr_grpo"]) - sum(accuracy["algo=grpo"])) / 2
    differences = column(table, "difference (95 %)")
    assert differences["algo=grpo"] == "" and differences["algo=dr_grpo"].startswith(f"{difference:.1%} (")
    assert column(table, "p") == column(table, "p (Holm)")  # a single comparison
    assert "only 2 seeds: an interval reaches 12.7 standard errors" in words["text"]


@pytest.mark.slow
def test_04_draws_every_preset_and_the_run(outputs, tmp_path):
    named = [("FOLDER", outputs / "sweep" / "3")]
    names, *figures = execute("04_objective", ROOT / "notebooks", tmp_path, named=named)
    assert "drawn without it" not in names["text"]
    assert set(names["text"].strip("'").split(", ")) == {file.stem for file in (ROOT / "conf" / "algo").glob("*.yaml")}
    assert [cell["images"] for cell in figures] == [1, 1, 2, 1]


@pytest.mark.slow
def test_05_teaches_another_task(tmp_path):
    """A model of two steps knows nothing yet: the notebook's form is tried here, not what it learns."""
    short = {"GRPO_STEPS": "2", "GRPO_ROLLOUTS": "2", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    source, texts, run, accuracy, curves, samples = execute(
        "05_tiny_world", tmp_path / "notebooks", tmp_path, warns=True, **short
    )
    assert "def worked_answers(" in source["text"]
    assert "preflight failed: there is something to learn: 0% solved" in run["text"]
    assert "rollout 0: no held-out answer is right: model=tiny was trained on examples.sorting alone" in run["text"]
    careful, hasty = re.findall(r"hasty=[\d.]+\n(.*?\\boxed\{.*?\})", texts["text"], re.S)
    assert len(careful) > len(hasty)  # the same question, with fewer lines
    assert "eval/accuracy" in accuracy["text"] and curves["images"] == 1
    assert "rollout 1\n" in samples["text"] and "rollout 2\n" in samples["text"]


# -- their modules


def done(folder, seed, lr, right, status="finished"):
    """Make a run that has been evaluated on four problems, of which the first `right` were solved."""
    (folder / "evaluations").mkdir(parents=True)
    solved = [i < right for i in range(4)]
    table = pd.DataFrame({"item": list("abcd"), "prompt": "p", "correct": solved, "reward": np.array(solved, float)})
    table.to_parquet(folder / "evaluations" / "000002.parquet")
    settings = {"seed": seed, "rollout": {}, "optim": {"lr": lr}, "output_dir": str(folder)}
    (folder / "config.yaml").write_text(json.dumps(settings))
    (folder / "manifest.json").write_text(json.dumps({"status": status, "overrides": [f"optim.lr={lr}"]}))
    (folder / "metrics.csv").write_text(f"step,eval/accuracy\n2,{right / 4}\n")


def test_a_sweep_is_a_table_of_rates_and_seeds_and_one_plot(tmp_path):
    """Two rates ten times apart with two seeds each; a job that was interrupted, one that has not begun, and an older sweep."""
    done(tmp_path / "old" / "0", 0, 0.5, 4)
    os.utime(tmp_path / "old" / "0" / "manifest.json", (0, 0))
    sweep = tmp_path / "sweep"
    for job, (lr, seed, right) in enumerate([(1e-4, 0, 1), (1e-4, 1, 2), (1e-3, 0, 3), (1e-3, 1, 4)]):
        done(sweep / str(job), seed, lr, right)
    done(sweep / "4", 2, 1e-3, 0, "interrupted")
    (sweep / "jobs.json").write_text(json.dumps([[]] * 6))
    place, runs, arms = folders.newest_sweep(tmp_path)
    said = "6 runs, 4 finished, 1 interrupted, 1 not begun"
    assert place == sweep and folders.said_of(place, runs) == f"{sweep}: {said}"

    table = figures.by_seed(arms)
    assert list(table.index) == ["optim.lr=1e-4", "optim.lr=0.001"] and list(table)[:2] == ["seed 0", "seed 1"]
    assert table[["seed 0", "seed 1", "value"]].to_numpy().tolist() == [[0.25, 0.5, 0.375], [0.75, 1.0, 0.875]]
    assert table["difference"].iloc[1] == 0.5 and not table[["value", "low", "high"]].isna().any(axis=None)

    words = figures.in_words(table)
    low, high = (f"{100 * table[end].iloc[0]:.1f}" for end in ("low", "high"))
    assert list(words.iloc[0]) == ["25.0%", "50.0%", f"37.5% ({low} to {high})", "", "", "", ""]
    assert words["difference (95 %)"].iloc[1].startswith("50.0% (") and words.iloc[1, -1] == "3 / 0 / 1"

    (axes,) = figures.swept(arms).axes
    assert axes.get_xscale() == "log" and [tick.get_text() for tick in axes.get_xticklabels()] == ["1e-4", "0.001"]
    assert axes.collections[-1].get_offsets().tolist() == [[1e-4, 0.25], [1e-4, 0.5], [1e-3, 0.75], [1e-3, 1.0]]
    (mean, *_), *_ = axes.containers
    assert mean.get_ydata().tolist() == [0.375, 0.875]
    bars = figures.effects(arms)["optim.lr"]  # one key: the intervals of the table
    assert bars[["low", "high"]].to_numpy().tolist() == table[["low", "high"]].to_numpy().tolist()


def test_runs_that_are_no_sweep_are_compared_with_one_run_of_each_seed(tmp_path):
    for name, seed, right in (("2026-01-01", 0, 1), ("2026-01-02", 0, 4), ("2026-01-03", 1, 2)):
        done(tmp_path / "grpo" / name, seed, 1e-4, right)
    place, runs, arms = folders.newest_sweep(tmp_path)
    assert place == tmp_path and len(runs) == 3
    table = figures.by_seed(arms)
    assert table[["seed 0", "seed 1"]].to_numpy().tolist() == [[0.25, 0.5]] and figures.swept(arms) is None


def test_words_on_a_plot_are_side_by_side_each_with_its_interval(tmp_path):
    """One of the values is a number; one arm solved nothing, and its interval begins at 0."""
    for job, (lr, right) in enumerate([("auto", 0), (0.5, 3)]):
        done(tmp_path / str(job), 0, lr, right)
    _, _, arms = folders.newest_sweep(tmp_path)
    (axes,) = figures.swept(arms).axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0.5", "auto"]
    assert axes.collections[-1].get_offsets().tolist() == [[1, 0.0], [0, 0.75]]
    ends = figures.by_seed(arms)[["low", "high"]]
    bars = figures.effects(arms)["optim.lr"][["low", "high"]]
    assert [[*bars.loc[name]] for name in ("auto", "0.5")] == ends.to_numpy().tolist()


@pytest.mark.parametrize(
    ("find", "line"),
    [
        (folders.newest_run, "No run in FOLDER has learned from a rollout: python train.py makes one,"),
        (
            folders.newest_sweep,
            "No run in FOLDER has finished with an evaluation yet: python train.py -m sweep=lr makes a",
        ),
    ],
)
def test_where_there_is_no_run_one_line_says_what_to_do(find, line, tmp_path):
    done(tmp_path / "sweep" / "0", 0, 1e-4, 1, "interrupted")
    (tmp_path / "sweep" / "0" / "metrics.csv").write_text("step,eval/accuracy\n0,0.5\n")  # before learning
    for folder in (tmp_path, tmp_path / "none"):
        shell = InteractiveShell()
        shell.user_ns.update(find=find, folder=folder)
        with redirect_stdout(io.StringIO()) as shown:
            shell.run_cell("find(folder)")
        assert shown.getvalue().count("\n") == 1 and shown.getvalue().startswith(line.replace("FOLDER", str(folder)))


def test_a_run_with_code_of_others_is_not_drawn(tmp_path, capsys):
    done(tmp_path, 0, 1e-4, 1)
    algo = {"_target_": "grpo.objectives.algorithm.Algorithm", "advantage": {"_target_": "os.system"}}
    settings = json.loads((tmp_path / "config.yaml").read_text()) | {"algo": algo}
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    assert folders.own_algorithm(tmp_path) == {}
    said = capsys.readouterr().out
    assert "algo.advantage._target_=os.system" in said and said.endswith("The presets are drawn without it.\n")


def test_what_coincides_is_drawn_once():
    curves = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([1.0, 0.1]), "c": torch.tensor([1.0001, 0.0])}
    assert {names: curve.tolist() for names, curve in figures.alike(curves).items()} == {
        "a, c": [1.0, 0.0],
        "b": curves["b"].tolist(),
    }


def test_differences_are_word_by_word_and_escaped():
    marked = cards.difference("x < 12 apples", "x < 13 <b>apples</b>")
    assert text_of(re.sub(r"<del.*?</del>", "", marked)) == "x < 13 <b>apples</b>"
    assert text_of(re.sub(r"<ins.*?</ins>", "", marked)) == "x < 12 apples"
    assert ">12</del>" in marked and "<b>" not in marked


if __name__ == "__main__":
    for file in NOTEBOOKS:
        nbformat.write(stripped(nbformat.read(file, as_version=4)), file)
