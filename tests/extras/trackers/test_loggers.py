"""TensorBoard, Weights & Biases and MLflow get the same metrics, settings and samples; a run continues without one that fails."""

import json
import math
import struct
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import lightning as L
import pytest
from conftest import compose_config
from helpers.runs import VARIED
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

from grpo.extras.trackers.trackers import MLflow, TensorBoard, Tracker, Trackio, Wandb, allowed, markdown, sweep
from grpo.runs.run import Run
from grpo.system.output.secrets import learn
from train import train

pytestmark = pytest.mark.skipif(not (find_spec("wandb") and find_spec("mlflow")), reason="needs wandb and mlflow")


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    """No tracker has credentials, and no file is written outside the test's folder."""
    import wandb  # takes seconds, as mlflow does

    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "300")
    monkeypatch.setattr(sys, "exit", sys.exit)  # wandb replaces it and does not restore it
    yield
    wandb.teardown()  # it reads the environment only once


def learned(smoke, tmp_path: Path, *more: str) -> Run:
    config = compose_config(*smoke("eval.samples=2", "eval.sampling.temperature=1", *more))
    config.task = VARIED
    train(config)
    return Run(tmp_path)


def numbers(run: Run) -> dict[tuple[str, int], float]:
    """Return metrics.csv as {(name, rollouts): value}."""
    return {
        (name, rollouts): value
        for name, column in run.metrics.items()
        for rollouts, value in column.items()
        if not math.isnan(value)
    }


@pytest.mark.slow
def test_all_loggers_get_the_same_numbers_settings_and_texts(smoke, tmp_path, caplog):
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/store/mlflow.db"
    run = learned(
        smoke,
        tmp_path,
        *f"""logger=[wandb,mlflow] logger.wandb.mode=offline logger.wandb.timeout=300 logger.mlflow.uri={uri}
        callbacks=[samples,texts] callbacks.texts.samples=3""".split(),
    )
    assert not warnings(caplog)
    logged = numbers(run)
    assert {("eval/pass@2", 0), ("eval/pass@2", 2), ("rollout/reward", 1), ("time/eval", 2)} <= logged.keys()

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = {(name, e.step): e.value for name in events.Tags()["scalars"] for e in events.Scalars(name)}
    assert scalars == pytest.approx(logged)
    (text,) = (e.tensor_proto.string_val[0].decode() for e in events.Tensors("rollout/samples/text_summary"))
    assert text.count("**reward**") == text.count("**advantage**") == text.count("*completion*") == 3
    assert [e.step for e in events.Tensors("eval/samples/text_summary")] == [0, 1, 2]
    assert "_hparams_/session_start_info" in events.summary_metadata

    client = MlflowClient(uri)
    (found,) = client.search_runs([client.get_experiment_by_name("grpo").experiment_id])
    histories = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    there = {(name, metric.step): metric.value for name, history in histories.items() for metric in history}
    assert time.time() - next(iter(histories.values()))[0].timestamp / 1000 < 3600  # they are milliseconds
    assert there == pytest.approx({(allowed(name), step): value for (name, step), value in logged.items()})
    assert {("eval/pass_at_2", 0), ("eval/pass_hat_2", 0)} <= there.keys()
    assert found.data.params["optim.optimizer.lr"] == "0.001" and found.data.params["task.path"] == VARIED["path"]
    assert found.info.status == "FINISHED"
    names = [file.path for file in client.list_artifacts(found.info.run_id, "eval/samples")]
    assert names == [f"eval/samples/{step:06d}.md" for step in (0, 1, 2)]
    (artifact,) = tmp_path.rglob("rollout/samples/000001.md")
    assert artifact.read_text() == text

    history, config, tables = wandb_run(tmp_path)
    assert history == pytest.approx(logged)
    assert config["rollout.group_size"] == 2 and config["task.path"] == VARIED["path"]
    columns = ["prompt", "completion", "reward", "advantage", "tokens"]
    written = run.samples(rollouts=[1], columns=columns)[columns].head(3)
    assert [row[:2] for row in tables["rollout/samples"]] == written[["prompt", "completion"]].values.tolist()
    assert [row[2:] for row in tables["rollout/samples"]] == [pytest.approx(row[2:]) for row in written.values.tolist()]


@pytest.mark.slow
def test_trackio_gets_the_same_numbers_and_conversations(smoke, tmp_path, caplog, capsys, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    run = learned(smoke, tmp_path, "logger=trackio", "logger.trackio.name=ours", "callbacks=[samples,texts]")
    assert not warnings(caplog) and "trackio" not in capsys.readouterr().out.lower()
    rows = [row for row in SQLiteStorage.get_logs("grpo", "ours") if "eval/pass@2" in row or "rollout/reward" in row]
    there = {(name, row["step"]): value for row in rows for name, value in row.items() if isinstance(value, float)}
    logged = numbers(run)
    assert there == pytest.approx({place: value for place, value in logged.items() if place in there})
    assert {("eval/pass@2", 0), ("rollout/reward", 1)} <= there.keys()
    config = SQLiteStorage.get_run_config("grpo", "ours")
    assert config["rollout.group_size"] == 2 and config["task.path"] == VARIED["path"]
    traces = SQLiteStorage.get_traces("grpo", "ours")
    (first, *_) = run.samples(rollouts=[1]).to_dict("records")
    (found,) = [
        trace for trace in traces if trace["step"] == 1 and trace["messages"][-1]["content"] == first["completion"]
    ][:1]
    assert found["messages"][:-1] == json.loads(first["messages"])
    assert found["metadata"]["reward"] == first["reward"] and found["metadata"]["tokens"] == first["tokens"]


def recorded(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format: blocks of 32 KiB, each piece after its checksum, length and kind."""
    place, record = 7, b""  # after wandb's header
    while place + 7 < len(data):
        if (room := 32768 - place % 32768) < 7:
            place += room
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or its last piece
            yield record
            record = b""


def wandb_run(folder: Path) -> tuple[dict[tuple[str, int], float], dict, dict]:
    """Return the metrics, settings and tables of an offline run, read from the file that `wandb sync` would send."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    history, config, tables = {}, {}, {}
    for data in recorded(file.read_bytes()):
        record = Record.FromString(data)
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        row = {tuple(item.nested_key) or (item.key,): json.loads(item.value_json) for item in record.history.item}
        for (name, *inner), value in row.items():
            if inner == ["path"]:
                tables.setdefault(name, json.loads((file.parent / "files" / value).read_text())["data"])
            elif not inner and name != "rollouts" and not name.startswith("_"):
                history[name, row["rollouts",]] = value
    return history, config, tables


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "grpo.extras.trackers.trackers"]


def test_a_run_goes_on_without_what_is_not_installed(smoke, tmp_path, caplog, monkeypatch):
    for module in ("wandb", "mlflow", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    run = learned(smoke, tmp_path, "logger=[wandb,mlflow]", "callbacks=[texts]")
    assert list(run.metrics.index) == [0, 1, 2]
    told = warnings(caplog)
    assert len(told) == 3 and all("did not start, the run continues without it: import of" in line for line in told)
    assert {line.split()[0] for line in told} == {"TensorBoard", "Wandb", "MLflow"}
    assert any("(pip install wandb and wandb login, or logger.wandb.mode=offline)" in line for line in told)


@pytest.mark.slow
def test_a_run_goes_on_where_no_server_answers(smoke, tmp_path, caplog, monkeypatch):
    nowhere = "http://127.0.0.1:9"
    monkeypatch.setenv("WANDB_API_KEY", 40 * "a")
    monkeypatch.setenv("WANDB_BASE_URL", nowhere)
    more = ("logger.wandb.timeout=6", f"logger.mlflow.uri={nowhere}")
    run = learned(smoke, tmp_path, "logger=[wandb,mlflow]", "callbacks=[texts]", *more)
    assert list(run.metrics.index) == [0, 1, 2]
    told = warnings(caplog)
    assert len(told) == 2 and all("did not start" in line and "127.0.0.1" in line for line in told)


def test_nobody_is_asked_to_log_in(tmp_path, caplog):
    Wandb(str(tmp_path), project="grpo").experiment  # noqa: B018
    (line,) = warnings(caplog)
    assert line.startswith("Wandb did not start") and "not logged in (" in line


class Break(L.Callback):
    """Replaces a file by a folder in the middle of a run."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if batch.rollout == 1:
            self.file.unlink()
            self.file.mkdir()


@pytest.mark.slow
def test_a_logger_that_fails_on_the_way_is_left_out(smoke, tmp_path, caplog):
    database = tmp_path / "mlflow.db"
    broken = f"+callbacks.broken={{_target_: test_loggers.Break, file: {database}}}"
    run = learned(smoke, tmp_path, "logger=mlflow", f"logger.mlflow.uri=sqlite:///{database}", broken)
    (line,) = warnings(caplog)
    assert line.startswith("MLflow failed, the run continues without it: ") and "\n" not in line
    assert list(run.metrics.index) == [0, 1, 2]


def test_a_run_does_not_go_on_without_its_table(smoke, tmp_path):
    with pytest.raises(OSError, match=r"metrics\.csv"):
        learned(smoke, tmp_path, f"+callbacks.broken={{_target_: test_loggers.Break, file: {tmp_path}/metrics.csv}}")


def test_one_option_brings_the_others_along():
    for options, extra in (("wandb", {"wandb"}), ("mlflow", {"mlflow"}), ("[wandb,mlflow]", {"wandb", "mlflow"})):
        assert compose_config(f"logger={options}", "output_dir=.").logger.keys() == {"csv", "tensorboard"} | extra


def test_a_run_that_went_back_to_its_checkpoint_is_shown_once(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    for first, last in ((0, 5), (3, 6)):  # the run had learned from 4 rollouts, and its checkpoint had 2
        tracker = TensorBoard(str(tmp_path))
        _ = tracker.experiment
        for step in range(first, last):
            tracker.log_metrics({"eval/accuracy": step / 10}, step)
        tracker.finalize("success")
        time.sleep(1.1)  # files are ordered by their creation time in seconds
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("eval/accuracy")] == [0, 1, 2, 3, 4, 5]


def test_a_run_that_is_killed_has_its_numbers_in_tensorboard(tmp_path):
    """The client alone writes its first record at once, and those after it within two minutes."""
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    tracker = TensorBoard(str(tmp_path))
    _ = tracker.experiment
    for step in range(3):
        tracker.log_metrics({"eval/accuracy": step / 10}, step)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("eval/accuracy")] == [0, 1, 2]
    tracker.finalize("failed")


@pytest.mark.slow
def test_an_address_in_the_environment_is_kept_nowhere(smoke, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://joe:hunter2@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    learned(smoke, tmp_path, "logger=mlflow")
    assert "MLflow did not start" in caplog.text and "hunter2" not in "".join(warnings(caplog))
    files = [
        file for file in tmp_path.rglob("*") if file.is_file() and file.parent.name != "code"
    ]  # a copy of this file
    files = [file for file in files if file.suffix != ".patch"]
    assert files and not any(b"hunter2" in file.read_bytes() for file in files)


class Noted(Tracker):
    """Notes how it ended. Its client refuses the key of the environment."""

    advice = "none"

    def start(self, settings) -> None: ...

    def metrics(self, metrics, step) -> None:
        raise ConnectionError("no right for abcdefgh1234")

    def end(self, well: bool) -> None:
        self.well = well


def test_a_tracker_begins_on_one_rank_shows_no_secret_and_knows_how_the_run_ended(tmp_path, caplog, monkeypatch):
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    monkeypatch.setenv("WANDB_API_KEY", "abcdefgh1234")
    learn([])
    for status in ("success", "failed"):
        tracker = Noted(str(tmp_path))
        _ = tracker.experiment
        tracker.finalize(status)
        assert tracker.well == (status == "success")
    tracker = Noted(str(tmp_path))
    _ = tracker.experiment
    tracker.log_metrics({"a": 1.0}, 0)
    assert warnings(caplog) == ["Noted failed, the run continues without it: no right for ***"]
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    other = Noted(str(tmp_path))
    _ = other.experiment
    assert other.works is None


def test_runs_of_a_sweep_are_a_group(tmp_path):
    job = tmp_path / "lr" / "3"
    job.mkdir(parents=True)
    assert sweep(job) is None
    (tmp_path / "lr" / "multirun.yaml").touch()
    assert sweep(job) == "lr"
    assert (
        Wandb(str(job), project="p").options
        == {"project": "p", "group": "lr", "name": "lr/3"}
        == Trackio(str(job), project="p").options
    )
    assert MLflow(str(job), "sqlite://").tags == {"group": "lr"}


def test_the_configured_address_of_mlflow_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere")
    assert [MLflow(str(tmp_path), uri).uri for uri in ("sqlite://", None)] == ["sqlite://", "http://elsewhere"]


def test_a_tracker_that_never_began_is_silent(tmp_path, caplog):
    tracker = TensorBoard(str(tmp_path))
    tracker.log_metrics({"a": 1.0}, 0)
    tracker.finalize("failed")
    assert not warnings(caplog) and not list(tmp_path.iterdir())


def test_text_shows_as_it_is():
    row = {"prompt": "2 < 3 | *x*\n\n# so", "completion": "", "reward": 0.25, "advantage": None}
    text = markdown([row, {"completion": "<b>"}])
    assert [allowed(f"eval/{name}") for name in ("pass@8", "pass^8")] == ["eval/pass_at_8", "eval/pass_hat_8"]
    assert text.splitlines()[0] == "**reward** 0.25"
    html = markdown_to_safe_html(text)
    assert "<code>2 &lt; 3 | *x*\n\n# so\n</code>" in html and "<code>&lt;b&gt;\n</code>" in html
