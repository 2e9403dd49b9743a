"""Secrets are found by key, by form and by value, and no file of a run has one."""

import logging

import pytest
from conftest import TEST_PATH
from helpers.programs import command
from lightning.pytorch.loggers import Logger

from grpo.config.composing import composed
from grpo.config.resuming import add_saved_overrides, continued
from grpo.runs.run import Run
from grpo.system.errors import UserError
from grpo.system.output import secrets
from grpo.system.output.secrets import hidden, is_secret, learn, masked_argument, masked_values


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(secrets, "_known", set())


@pytest.mark.parametrize(
    "key", ["token", "a.hf_token", "api_key", "b.apikey", "wandb.API_KEY", "password", "db_password", "secret"]
)
def test_keys_of_secrets(key):
    assert is_secret(key)


@pytest.mark.parametrize(
    "key",
    "max_tokens rollout.tokens pad_token eos_token key keys secretary tokenizer token_logprobs".split(),
)
def test_keys_of_other_values(key):
    assert not is_secret(key)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgresql://me:hunter2@db/runs", "postgresql://***@db/runs"),
        ("https://0123456789abcdef0123@host/x", "https://***@host/x"),
        ("http://host/x?token=abc&y=1", "http://host/x?token=***&y=1"),
        ("Authorization: Bearer abcdefgh12345", "Authorization: Bearer ***"),
        ("hf_abcdefghijklmnopqrstuv", "***"),
        ("a sk-proj-abcdefghijklmnop1234 b", "a *** b"),
        ("http://127.0.0.1:8000/v1 mail@host 3:4", "http://127.0.0.1:8000/v1 mail@host 3:4"),
        ("task-hf_small and sk-learn", "task-hf_small and sk-learn"),
    ],
)
def test_forms_of_secrets(text, expected):
    assert hidden(text) == expected


def test_arguments():
    assert masked_argument("logger.x.api_key=abc") == "logger.x.api_key=***"
    assert (
        masked_argument("+callbacks.x={_target_: a.B, token: 'a b', n: 3}")
        == "+callbacks.x={_target_: a.B, token: ***, n: 3}"
    )
    assert masked_argument("max_tokens=40") == "max_tokens=40"


def test_a_secret_is_known_by_its_value(monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", "correct horse")
    learn(["x.token=battery-staple", "y.token=short"])
    assert hidden("correct horse, battery-staple, short") == "***, ***, short"
    given = {
        "a": {"token": "short", "url": "u://${oc.env:X}", "list": ["battery-staple", 3]},
        "b": "${oc.env:MY_PASSWORD}",
        "api_key": ["one", ["two"]],
    }
    assert masked_values(given) == {
        "a": {"token": "***", "url": "u://${oc.env:X}", "list": ["***", 3]},
        "b": "${oc.env:MY_PASSWORD}",
        "api_key": ["***", ["***"]],
    }


def test_logs_are_masked(tmp_path):
    learn(["x.token=battery-staple"])
    handler = logging.FileHandler(tmp_path / "log")
    logging.getLogger().addHandler(handler)
    try:
        secrets.guard_logs()
        logging.getLogger("anything").warning("it is %s", "battery-staple")
    finally:
        logging.getLogger().removeHandler(handler)
    assert (tmp_path / "log").read_text() == "it is ***\n"


OWN = (("code", ".py"), ("run", ".patch"))  # copies of this file
PLANTED = {
    "+logger.x={_target_: test_secrets.Quiet, api_key: planted-number-one, url: 'http://me:planted-two@host'}": {},
    "+logger.y={_target_: test_secrets.Quiet, token: planted-number-three}": {},
    "+logger.z={_target_: test_secrets.Quiet, password: '${oc.env:PLANTED}'}": {"PLANTED": "planted-number-four"},
    "+logger.w={_target_: test_secrets.Quiet, other: '${oc.env:PLAIN}'}": {"PLAIN": "planted-number-five"},
    "+logger.v={_target_: test_secrets.Quiet, id: hf_plantedplantedplantedplanted}": {},
    "+logger.u={_target_: test_secrets.Quiet, list: [Bearer plantedplanted, 'x://planted-a:planted-b@y']}": {},
    "+logger.t={_target_: test_secrets.Quiet, nested: {db: {passwd: planted-number-nine}}}": {},
    "+logger.s={_target_: test_secrets.Quiet, q: 'http://host/?token=planted-number-ten'}": {},
    "+logger.r={_target_: test_secrets.Quiet, secret: planted-number-eleven}": {"HF_TOKEN": "planted-number-twelve"},
}


class Quiet(Logger):
    """A logger that prints what it was given, as careless code does."""

    name = version = ""

    def __init__(self, **given):
        if "other" not in given:
            logging.getLogger("careless").warning("logging to %s", given)

    def log_metrics(self, metrics, step=None):
        pass

    log_hyperparams = log_metrics


@pytest.mark.slow
def test_no_file_of_a_run_has_a_secret(smoke, tmp_path):
    """A run with twelve planted secrets, its report, its model card and TensorBoard. To resume it they are given again."""
    folder = tmp_path / "run"
    overrides = [
        o for o in smoke("callbacks=default", "logger=default", "rollout.num_rollouts=1") if "output_dir" not in o
    ]
    overrides += ["+callbacks.health.note='<script>alert(1)</script>|'", "~callbacks.health.note"]
    variables = {name: value for given in PLANTED.values() for name, value in given.items()}
    environment = {"PYTHONPATH": TEST_PATH, **variables}
    done = command("train.py", *overrides, *PLANTED, f"hydra.run.dir={folder}", environment=environment)
    assert done.returncode == 0, done.stderr
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"config.yaml", "manifest.json", "report.html", "README.md", "overrides.yaml", "train.log"} <= names
    assert any("tfevents" in name for name in names)
    assert [
        str(path) for path in files if b"planted" in path.read_bytes() and (path.parent.name, path.suffix) not in OWN
    ] == []
    said = (folder / "train.log").read_text()  # all that the terminal showed, with the time
    assert "***" in said and " after 0: " in said and " plan: 1 rollout" in said and "the run" in said
    assert "${oc.env:PLAIN}" in (folder / "config.yaml").read_text()
    card = (folder / "checkpoints" / "last" / "README.md").read_text()
    assert "<script>" not in card.replace(card[card.index("```\npython") :], "") and "***" in card

    again = add_saved_overrides([f"ckpt_path={folder}"])
    assert len(Run(folder).manifest["overrides"]) == len(again) - 1 and "planted" not in " ".join(again)
    with pytest.raises(UserError, match="is a secret, which no file of a run has: give it again"):
        continued(composed("train", [*again, f"output_dir={folder}"]), again)
