"""report.html in a real browser: its numbers agree with the run's files, and completions are shown as plain text."""

import http.client
import json
import os
import runpy
import shutil
import socket
import sys
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from conftest import EXAMPLES, compose_config

from grpo.extras.report import plain, write_report
from grpo.extras.report.callback import Report
from grpo.extras.report.changes import changed_problems
from grpo.extras.report.run import evenly, run_title
from grpo.extras.report.serve import serve
from grpo.extras.report.statistics import holm
from grpo.runs.run import Run, read_yaml
from train import train

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.slow
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
SCREENSHOTS = os.environ.get("GRPO_SCREENSHOTS")  # a folder for pictures of the pages


@pytest.fixture(scope="module")
def sweep(toy, tmp_path_factory) -> Path:
    """A sweep of two algorithms with two seeds each and four rollouts of varied rewards; a fifth job crashes in rollout 3."""
    folder = tmp_path_factory.mktemp("sweep")
    crash = "+callbacks.crash={_target_: helpers.slots.Crash, rollout: 2}"
    jobs = [["algo=grpo", "seed=0"], ["algo=grpo", "seed=1"], ["algo=dr_grpo", "seed=0"], ["algo=dr_grpo", "seed=1"]]
    for job, said in enumerate([*jobs, ["algo=grpo", "seed=2"]]):
        settings = (
            f"task=gsm8k model=path model.path={toy} debug=smoke preflight=off forecast=false max_tokens=8".split()
        )
        settings += ["callbacks=[samples,report]", "callbacks.samples.token_logprobs=true", "logger=csv"]
        settings += ["rollout.num_rollouts=4", "rollout.group_size=4", "eval.every=2", "optim.optimizer.lr=1e-3"]
        settings += ["eval.samples=4", "eval.sampling.temperature=1"]
        config = compose_config(*settings, *said, *([crash] if job == 4 else []), f"output_dir={folder / str(job)}")
        config.task = {"_target_": "helpers.slots.Varied", "path": str(EXAMPLES)}
        if job == 4:
            with pytest.raises(RuntimeError, match="the disk is full"):
                train(config, said)
        else:
            train(config, said)
    return folder


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, request):
    """A page in a new profile. At the end it must have logged no error and requested only files."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(300_000)
    complaints, requests = [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda asked: requests.append(asked.url))
    yield page
    if SCREENSHOTS:
        page.screenshot(path=f"{SCREENSHOTS}/{request.node.name}.png", full_page=True)
    assert complaints == []
    assert requests and all(url.startswith(("file://", "data:")) for url in requests)
    context.close()


def table(page, section: str) -> list[list[str]]:
    rows = page.locator(f"#{section} tbody tr").all()
    return [[cell.replace("\N{NO-BREAK SPACE}", " ") for cell in row.locator("td").all_inner_texts()] for row in rows]


def pick(page, name: str) -> None:
    """Choose a rollout or an evaluation by the beginning of its option's text."""
    options = page.locator("#step option").all_inner_texts()
    page.locator("#step").select_option(index=next(i for i, text in enumerate(options) if text.startswith(f"{name} (")))


@needs_browser
def test_numbers_and_curves_are_those_of_the_run(sweep, page):
    folder = sweep / "0"
    metrics = pd.read_csv(folder / "metrics.csv").set_index("step")
    page.goto((folder / "report.html").as_uri())
    assert page.locator("h1").inner_text().endswith("seed 0") and page.locator("h1 + .pill").inner_text() == "finished"
    first, last = metrics["eval/accuracy"].dropna().iloc[[0, -1]]
    shown = page.locator(".numbers strong").first.inner_text().replace("\N{NO-BREAK SPACE}", " ")
    assert shown == f"{100 * first:.1f} % → {100 * last:.1f} %"

    rows = table(page, "evaluation")
    assert [row[0] for row in rows] == ["0", "2", "4"]
    for row in rows:
        assert row[1].startswith(f"{100 * metrics.loc[int(row[0]), 'eval/accuracy']:.1f} % ")  # and its interval

    figure = page.locator("figure", has=page.locator("figcaption", has_text="rollout/reward"))
    assert figure.locator("circle").count() == 4
    figure.locator("svg").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    label, value = figure.locator(".tip").inner_text().split("\n")  # two points before the last
    assert label == "rollout 2" and float(value) == pytest.approx(metrics.loc[2, "rollout/reward"], rel=1e-3)

    page.locator("#picker summary").click()
    constant = page.locator("#constant")
    before = constant.inner_text() if constant.count() else ""
    box = page.get_by_role("checkbox", name="rollout/rounds")
    box.check()
    assert "rollout/rounds 1" in constant.inner_text() and "rollout/rounds" not in before
    assert page.locator("figcaption", has_text="rollout/rounds").count() == 0
    box.uncheck()
    caption = page.locator("figcaption", has_text="time/update")
    box = page.get_by_role("checkbox", name="time/update")
    box.check()
    assert caption.count() == 1
    box.uncheck()
    assert caption.count() == 0
    words = figure.locator(".words").inner_text()
    assert words.startswith("Mean over the samples whose reward is known") and "Healthy: " not in words
    page.get_by_label("log scale").check()
    page.reload()
    assert page.get_by_label("log scale").is_checked()  # a page that loads itself again keeps it
    assert "All watched metrics stayed" in page.locator("#health").inner_text() or table(page, "health")


@needs_browser
def test_samples_are_searched_filtered_sorted_opened_and_compared(sweep, page):
    run = Run(sweep / "0")
    page.goto((run.folder / "report.html").as_uri())
    assert page.locator("#left").inner_text() == "All 68 samples are here."  # 4 x 2 x 4 and 3 x 3 x 4
    first = run.evaluations([4]).iloc[0]  # of the last step, without a click
    assert page.locator("#completion").text_content() == first["completion"]
    pick(page, "rollout 3")
    samples = run.samples([3])
    count = page.locator("#count")
    assert count.inner_text() == "8 of 8 samples"

    page.locator("#kind").select_option("right")
    assert count.inner_text() == f"{samples['correct'].sum()} of 8 samples"
    page.locator("#kind").select_option("all")
    bound = samples["reward"].median()
    page.locator("#least").fill(str(bound))
    assert count.inner_text() == f"{(samples['reward'] >= bound).sum()} of 8 samples"
    page.locator("#least").fill("")
    word = samples["prompt"].iloc[0].split()[0]
    page.locator("#search").fill(word.upper())
    holds = samples["prompt"].str.contains(word, case=False, regex=False)
    holds |= samples["completion"].str.contains(word, case=False, regex=False)
    assert count.inner_text() == f"{holds.sum()} of 8 samples"
    page.locator("#search").fill("")

    page.locator("[data-sort=reward]").click()
    rewards = [float(row[2]) for row in table(page, "samples")]
    assert rewards == pytest.approx(sorted(samples["reward"], reverse=True), rel=1e-3)
    page.locator("[data-sort=advantage]").click()
    page.locator("[data-sort=advantage]").click()
    assert [float(row[3]) for row in table(page, "samples")] == pytest.approx(sorted(samples["advantage"]), rel=1e-3)

    page.locator(".list tbody button").first.press("Enter")  # by keyboard
    lowest = samples.sort_values("advantage", kind="stable").iloc[0]
    assert page.locator("#completion").text_content() == lowest["completion"]
    assert page.locator("#tokens span").count() == lowest["tokens"] == len(lowest["token_ids"])
    assert page.locator("#gold").text_content() == lowest["gold"]
    page.locator("#example summary").click()
    assert page.locator("#example dd").last.is_visible() and "question" in page.locator("#example dt").all_inner_texts()
    group = page.locator(".members").first.locator(".member")
    assert group.count() == 4
    cards = group.locator("span:nth-child(2)").all_inner_texts()
    shown = [float(text.rpartition("advantage ")[2]) for text in cards]
    own = samples[samples["prompt_index"] == lowest["prompt_index"]]["advantage"]
    assert shown == pytest.approx(list(own), rel=1e-3)
    teaching = samples.groupby("prompt_index")["advantage"].apply(lambda some: (some != 0).any()).sum()
    assert page.locator("#groups").inner_text().startswith(f"2 groups, of which {teaching} teach something")

    pick(page, "evaluation after 4")
    page.locator(".list tbody tr").first.click()
    before, after = run.evaluations([0]).iloc[0], run.evaluations([4]).iloc[0]
    assert before["item"] == after["item"]
    steps = page.locator(".members").last.locator(".member span:first-child").all_inner_texts()
    assert [step[2:] for step in steps] == [f"evaluation after {at}" for at in (0, 2, 4)]
    against = page.locator("#against")
    label = next(text for text in against.locator("option").all_inner_texts() if text.startswith("evaluation after 0"))
    against.select_option(label=label)
    sides = page.locator("#diff .two .text")
    assert [side.text_content() for side in sides.all()] == [before["completion"], after["completion"]]
    marks = page.locator("#diff del, #diff ins").count()
    assert (marks > 0) == (before["completion"] != after["completion"])


@needs_browser
def test_a_page_opens_with_what_changed(sweep, page, tmp_path):
    """Three held-out problems: one becomes right, one becomes wrong, one stays right."""
    folder = tmp_path / "run"
    shutil.copytree(sweep / "0", folder, ignore=shutil.ignore_patterns("checkpoints", "report.html"))
    for at, right in ((0, [False, True, True]), (4, [True, False, True])):
        file = folder / "evaluations" / f"{at:06d}.parquet"
        samples = pd.read_parquet(file)
        samples["reward"] = 1.0
        samples["correct"] = np.repeat(right, 4)
        samples["completion"] = f"the answer after {at}"
        samples.to_parquet(file)
    # a problem that became worse is never left out
    assert changed_problems(Run(folder), 1)["problems"][0]["gold"] == samples["gold"].iloc[4]
    page.goto(write_report(folder).as_uri())
    opening = page.locator("main section").first
    assert opening.locator("h2").inner_text() == "Before and after"
    assert opening.locator("p").inner_text().startswith("1 of 3 held-out problems became right, and 1 became wrong")
    better, worse = opening.locator(".problem").all()
    assert better.locator(".gold").inner_text() == samples["gold"].iloc[0]
    heads = [worse.locator(".two > div").nth(i).locator("div").first.inner_text().split(",")[0] for i in (0, 1)]
    assert heads == ["before: right", "after: wrong"]
    assert better.locator("ins").all_inner_texts() == ["4"] and better.locator("del").all_inner_texts() == ["0"]


@needs_browser
def test_the_timeline_is_saved_for_perfetto(sweep, page):
    metrics = Run(sweep / "0").metrics
    page.goto((sweep / "0" / "report.html").as_uri())
    with page.expect_download() as download:
        page.locator("#trace").click()
    events = [
        event for event in json.loads(Path(download.value.path()).read_text())["traceEvents"] if event["ph"] == "X"
    ]
    updates = [event for event in events if event["name"] == "update"]
    assert [event["args"]["rollout"] for event in updates] == [1, 2, 3, 4]
    assert [event["dur"] / 1e6 for event in updates] == pytest.approx(metrics["time/update"].dropna(), rel=1e-3)
    trainer = [event for event in events if event["tid"] == 0]
    assert all(one["ts"] + one["dur"] <= two["ts"] + 2 for one, two in pairwise(trainer))  # microseconds, rounded
    x, times = [1, 2, 3], {"time/rollout": [1, 1, 1], "time/update": [2, 2, 2], "time/started": [0, 4, 0]}
    spans = page.evaluate("([x, y]) => spans(x, y).map(({kind, start, seconds}) => [kind, start, seconds])", [x, times])
    times["time/started"] = [1, 5, 1]
    begun = page.evaluate("([x, y]) => spans(x, y).map(({kind}) => kind)", [x, times])
    assert begun == [
        "preparation",
        "rollout",
        "update",
        "idle",
        "rollout",
        "update",
        "preparation",
        "rollout",
        "update",
    ]
    ahead = {
        "time/rollout": [3, 1, 0.5],
        "time/update": [2, 2, 2],
        "time/played": [3, 2, 4],
        "time/engine_idle": [3, 0.5, 0],
    }
    beside = (
        "([x, y]) => spans(x, y).filter((one) => BESIDE.includes(one.kind)).map((s) => [s.kind, s.start, s.seconds])"
    )
    assert page.evaluate(beside, [x, ahead]) == [  # handovers after 3, 6 and 8.5 s
        ["rollout ahead", 3, 2], ["engine idle", 5.5, 0.5], ["rollout ahead", 4.5, 4],
    ]  # fmt: skip
    assert spans[2:] == [["idle", 3, 1], ["rollout", 4, 1], ["update", 5, 2], ["rollout", 7, 1], ["update", 8, 2]]


@needs_browser
def test_discarded_groups_say_why(sweep, page, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(sweep / "0", folder, ignore=shutil.ignore_patterns("checkpoints", "report.html"))
    samples = pd.read_parquet(folder / "rollouts" / "000003.parquet").drop(columns="advantage")
    samples["reward"] = [1.0] * 4 + [0.0, 1.0, np.nan, 0.5]
    samples["correct"] = [True] * 4 + [False, True, False, False]
    (folder / "discarded").mkdir()
    samples.to_parquet(folder / "discarded" / "000003.parquet")
    page.goto(write_report(folder).as_uri())
    assert page.locator("#left").inner_text() == "All 76 samples are here."
    pick(page, "discarded in 3")
    why = "every reward is 1 (1), left out by the selection (1)"
    assert page.locator("#groups").inner_text() == f"2 groups shown that the policy did not learn from: {why}."
    page.locator(".list tbody tr").first.click()
    assert "The policy did not learn from this group: every reward is 1." in page.locator("#detail").inner_text()


@needs_browser
def test_a_live_page_loads_itself_again_unless_somebody_reads(sweep, browser, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(sweep / "0", folder, ignore=shutil.ignore_patterns("report.html"))
    manifest = json.loads((folder / "manifest.json").read_text())
    running = {"status": "running", "pid": os.getpid(), "host": socket.gethostname()}
    (folder / "manifest.json").write_text(json.dumps(manifest | running))
    (tmp_path / "run" / ".hydra").mkdir(exist_ok=True)
    server = serve(tmp_path, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"
    try:
        page = browser.new_page()
        page.clock.install()
        page.goto(address)
        assert page.locator("#runs tbody tr").count() == 1
        page.locator("#runs a").click()
        assert page.locator("#live").inner_text() == "live" and page.locator("h1 + .pill").inner_text() == "running"
        with page.expect_navigation():
            page.clock.fast_forward(11_000)
        page.locator(".list tbody tr").first.click()
        page.clock.fast_forward(11_000)
        assert page.locator("#live").inner_text() == "live, waits while you read"
        page.close()
        asked = [("run/report.html", "example.org:80", 403), ("../run/report.html", "127.0.0.1:80", 404)]
        asked += [("run/report.html", "example.org", 403), ("run/report.html", "localhost", 200)]  # at port 80
        for path, name, status in [*asked, ("run/config.yaml", "127.0.0.1:80", 404)]:
            request = http.client.HTTPConnection("127.0.0.1", server.server_port)
            request.request("GET", f"/{path}", headers={"Host": name})
            assert request.getresponse().status == status
    finally:
        server.shutdown()
        server.server_close()


def test_a_live_report_is_written_as_the_run_goes(sweep, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(sweep / "0", folder, ignore=shutil.ignore_patterns("report.html"))
    report = Report(folder, samples=12, when="live")
    report.on_train_batch_end(None, None)
    first = (folder / "report.html").stat().st_mtime_ns
    report.on_train_batch_end(None, None)  # too early for another one
    assert (folder / "report.html").stat().st_mtime_ns == first and report.due > 0
    Report(tmp_path, when="end").on_train_batch_end(None, None)
    assert not (tmp_path / "report.html").exists()


@needs_browser
def test_the_difference_is_the_least_one(sweep, page):
    page.goto((sweep / "0" / "report.html").as_uri())
    words = page.evaluate("difference('12+7=19\\n', '12+8=20\\n', false)")
    assert words == [
        [["12+", True], ["7", False], ["=", True], ["19", False], ["\n", True]],
        [["12+", True], ["8", False], ["=", True], ["20", False], ["\n", True]],
    ]
    assert page.evaluate("difference('119', '19', true)") == [[["1", True], ["1", False], ["9", True]], [["19", True]]]
    assert page.evaluate("difference('', 'a b', false)") == [[], [["a b", False]]]


@needs_browser
def test_a_completion_is_text_and_no_number_is_no_error(sweep, page, tmp_path):
    """The page of a changed copy of a run: one completion is hostile HTML, and rewards are unknown."""
    folder = tmp_path / "run"
    shutil.copytree(sweep / "0", folder, ignore=shutil.ignore_patterns("checkpoints", "report.html"))
    evil = '</script><script>window.owned = 1</script><img src=x onerror="window.owned = 2">\u2028<!-- $data \N{BROKEN HEART}'
    file = folder / "rollouts" / "000004.parquet"
    samples = pd.read_parquet(file)
    samples.loc[0, "completion"] = evil
    samples.loc[0, "messages"] = json.dumps([{"role": "user", "content": evil}])
    samples.loc[0, "prompt"] = evil
    samples["reward"] = np.nan
    samples.to_parquet(file)
    metrics = pd.read_csv(folder / "metrics.csv")
    metrics["rollout/truncated"] = [np.nan, 0, 0.875, 0.875, 0]
    metrics.loc[1:, "loss/grad_norm"] = np.inf
    metrics.to_csv(folder / "metrics.csv", index=False)

    page.goto(write_report(folder).as_uri())
    pick(page, "rollout 4")
    page.locator("#kind").select_option("unknown")
    page.locator(".list tbody tr").first.click()
    assert page.locator("#completion").text_content() == evil
    assert page.locator("#detail .message .text").first.text_content() == evil
    assert page.locator("#detail .facts").inner_text().startswith("reward \N{EN DASH}")
    assert page.evaluate("window.owned") is None and page.locator("img").count() == 0
    ((rollout, _, value, words),) = [row for row in table(page, "health") if row[1] == "rollout/truncated"]
    assert (rollout, value) == ("2", "87.5 %") and words.startswith("above 0.5: most answers are cut short")
    assert page.locator("figure", has_text="loss/grad_norm").inner_text().endswith("no value")


@needs_browser
def test_a_sweep_shows_its_arms_and_leads_to_its_runs(sweep, page):
    page.goto(write_report(sweep).as_uri())
    last = [Run(sweep / str(job)).accuracy.iloc[-1] for job in range(4)]
    one, two = table(page, "arms")
    assert one[:2] == ["algo=grpo", "2"] and two[:2] == ["algo=dr_grpo", "2"]  # without the crashed run
    assert one[2:4] == ["4", "3"] and one[4].startswith(f"{50 * (last[0] + last[1]):.1f} % ")
    difference = float(two[5].split()[0].replace("\N{MINUS SIGN}", "-"))
    assert difference == pytest.approx(50 * (last[2] + last[3] - last[0] - last[1]), abs=0.06)

    runs = table(page, "runs")
    assert [row[1] for row in runs] == ["0", "1", "2", "3", "4"]
    assert (
        runs[4][2] == "failed"
        and "the disk is full" in runs[4][3]
        and [row[4] for row in runs[1:3]] == ["grpo", "dr_grpo"]
    )
    figure = page.locator("figure", has=page.locator("figcaption", has_text="rollout/reward"))
    assert figure.locator(".curve").count() == 7  # two means, and five seeds in lines
    assert figure.locator("path[opacity='0.16']").count() == 0  # a band needs four seeds
    page.locator("#list a", has_text="4").click()
    assert page.locator("h1 + .pill").inner_text() == "failed"
    assert "the disk is full" in page.locator("header .bad").last.inner_text()
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400  # nothing sticks out of a narrow screen


@needs_browser
def test_runs_are_filtered_sorted_and_chosen_and_the_address_holds_it(browser, page, tmp_path):
    """Three learning rates; the highest one has two seeds, and a name that is HTML."""
    evil = "<img src=x onerror=owned=1>"
    for name, rate, seed in (("a", 1e-3, 0), ("b", 2e-4, 0), (evil, 1e-2, 0), ("d", 1e-2, 1)):
        shutil.copytree(EXAMPLES / "run", tmp_path / name)
        config = read_yaml((tmp_path / name / "config.yaml").read_text()) | {"seed": seed}
        config["optim"]["optimizer"]["lr"] = rate
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "report.html").write_text("")
    page.goto(write_report(tmp_path).as_uri())

    def names() -> list[str]:
        return [row[1] for row in table(page, "runs")]

    assert page.locator("#list thead th").all_inner_texts()[1:5] == ["run", "status", "lr", "seed"]
    page.locator("[data-sort='optim.optimizer.lr']").click()
    assert names() == ["b", "a", evil, "d"]
    page.locator("[data-sort='optim.optimizer.lr']").click()
    assert names() == [evil, "d", "a", "b"]
    for said, found in (
        ("lr=0.010", [evil, "d"]),
        ("lr<5e-3 seed=0", ["a", "b"]),
        ("lr!=0.01 B", ["b"]),
        ("algo=none", []),
    ):
        page.locator("#filter").fill(said)
        assert (said, names()) == (said, [name for name in [evil, "d", "a", "b"] if name in found])
    page.locator("#filter").fill("lr>5e-4")
    page.locator("#only").click()
    assert page.locator("#count").inner_text() == "3 of 4 runs, 3 chosen"
    page.get_by_label("choose d").uncheck()
    page.locator("#against").select_option(label="optim.optimizer.lr=0.001")
    page.get_by_label("log scale").check()
    compared = table(page, "arms")
    assert [row[:2] for row in compared] == [["optim.optimizer.lr=0.01", "2"], ["optim.optimizer.lr=0.001", "1"]]
    assert (
        compared[0][5].startswith("0.0") and compared[1][5] == "\N{EN DASH}"
    )  # the second is what the others are compared with
    figure = page.locator("figure", has=page.locator("figcaption", has_text="rollout/reward"))
    assert figure.locator(".curve").count() == 2
    answers = page.locator(".answers .text").all_inner_texts()
    assert len(answers) == 2 and answers[0] == answers[1]

    with browser.new_context() as another:
        other = another.new_page()
        other.goto(page.url)
        for seen in (other, page):
            page.reload()
            assert seen.locator("#filter").input_value() == "lr>5e-4" and seen.locator("#log").is_checked()
            assert [box.is_checked() for box in seen.locator("#list tbody input").all()] == [True, False, True]
            assert seen.locator("#against option:checked").inner_text() == "optim.optimizer.lr=0.001"
            assert seen.locator("#list thead [aria-sort=descending]").inner_text() == "lr ▼"
    assert page.locator("img").count() == 0 and page.evaluate("window.owned") is None
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390

    assert page.evaluate("holm([0.04, 0.01, 0.03])") == pytest.approx(holm([0.04, 0.01, 0.03]))
    curves = [{"curves": {"x": [2], "y": {"lr": [value]}}} for value in (1, 2, 3, 4)]
    page.evaluate("data.t = [12.706, 4.3027, 3.1824]")
    band = page.evaluate("(runs) => over(runs, 'lr')", curves)  # 2.5 +- 3.1824 sqrt(5/3 / 4)
    assert band["y"] == [2.5] and [*band["low"], *band["high"]] == pytest.approx([0.4458, 4.5542], abs=1e-4)
    labels = "([ys, unit]) => axisLabels(ys, unit, true)"
    shown = [page.evaluate(labels, [some, "bytes"]) for some in ([8.2e8, 8.25e8, 8.3e8], [12.3e9, 12.35e9])]
    assert [[label.replace("\N{NO-BREAK SPACE}", " ") for label in some] for some in shown] == [
        ["820 MB", "825 MB", "830 MB"], ["12.30 GB", "12.35 GB"],
    ]  # fmt: skip
    assert page.evaluate(labels, [[-0.5, 0, 0.5], "number"]) == ["\N{MINUS SIGN}0.5", "0.0", "0.5"]


def embedded(file: Path) -> dict:
    text = file.read_text(encoding="utf-8")
    return json.loads(text.partition('id="data">')[2].partition("</script>")[0])


def test_a_page_holds_a_bounded_number_of_samples(sweep, tmp_path):
    data = embedded(write_report(sweep / "1", tmp_path / "small.html", samples=12))
    held = [(step["kind"], step["rollout"], len(step["samples"])) for step in data["steps"]]
    assert held == [("rollout", 1, 3), ("rollout", 4, 3), ("evaluation", 0, 3), ("evaluation", 4, 3)]
    assert data["left"].startswith("12 of 68 samples are here")
    assert evenly(range(81), 5) == [0, 20, 40, 60, 80]
    assert plain({"a": [np.float64("nan"), np.inf, np.int64(3), 1 / 3, True]}) == {"a": [None, None, 3, 0.333333, True]}


def test_an_interrupted_run_says_so(sweep, tmp_path):
    """The page says so although the manifest still has the status running at that moment."""
    folder = tmp_path / "run"
    shutil.copytree(sweep / "0", folder, ignore=shutil.ignore_patterns("report.html"))
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"status": "running", "ended": None}))
    Report(folder, samples=12).on_exception(None, None, KeyboardInterrupt())
    data = embedded(folder / "report.html")
    assert (data["status"], data["error"], sum(len(step["samples"]) for step in data["steps"])) == (
        "interrupted",
        None,
        12,
    )


def test_a_page_that_cannot_be_written_ends_no_run(smoke, tmp_path, caplog):
    train(compose_config(*smoke("callbacks=report", "logger=none")))
    (line,) = [record.getMessage() for record in caplog.records if "report" in record.getMessage()]
    assert line.startswith("no report.html (UserError: ") and "has no metrics.csv" in line
    assert not (tmp_path / "report.html").exists() and (tmp_path / "config.yaml").exists()


def test_a_title_names_the_file_of_the_rows(tmp_path):
    shutil.copytree(EXAMPLES / "run", tmp_path / "run")
    file = tmp_path / "run" / "manifest.json"
    manifest = json.loads(file.read_text())
    overrides = ["task=jsonl", "task.path=some/rows.jsonl", "model=path", "model.path='my models/best'"]
    file.write_text(json.dumps(manifest | {"overrides": overrides}))
    (tmp_path / "run" / ".hydra").mkdir()
    noted = "{hydra: {runtime: {choices: {task: jsonl, model: path, adapter: none, algo: grpo}}}}"
    (tmp_path / "run" / ".hydra" / "hydra.yaml").write_text(noted)
    assert run_title(Run(tmp_path / "run")) == "jsonl rows.jsonl, path best, grpo, seed 0"


def test_another_folder_gets_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path)])
    with pytest.raises(SystemExit, match=f"^error: {tmp_path} is neither a run .* nor a sweep"):
        runpy.run_module("grpo.report", run_name="__main__")
