"""Hydra made faster composes what Hydra alone composes, and refuses with the same words."""

import io
import re
import sys
from contextlib import contextmanager, redirect_stdout
from pkgutil import resolve_name

import hydra
import pytest
from bad_inputs import side_by_side  # benchmarks/bad_inputs.py
from helpers import composing
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf

from grpo.config import hydra_speed
from grpo.config.composing import CONF, composed, options

REPLACED = hydra_speed.REPLACED | composing.REPLACED
ALONE = {place.replace(":", "."): resolve_name(place).__wrapped__ for place in REPLACED}


@contextmanager
def hydra_alone():
    with pytest.MonkeyPatch.context() as patch:
        for place, original in ALONE.items():
            patch.setattr(place, original)
        yield


def outcome(make):
    """The result as text, with its order and types; or the error, with its causes."""
    try:
        made = make()
    except Exception as error:
        causes = [error]
        while cause := causes[-1].__cause__:
            causes.append(cause)
        return [(type(cause), str(cause)) for cause in causes]
    return repr(OmegaConf.to_container(made) if OmegaConf.is_config(made) else made)


def same(make):
    ours = outcome(make)
    with hydra_alone():
        assert outcome(make) == ours
    return ours


QUICK = [
    (
        "train",
        "algo=dapo algo/kl=reward task=math model=qwen05b adapter=lora engine=vllm callbacks=[samples,health] ~judge",
    ),
    (
        "train",
        "experiment=qwen3_base_math recipe=tiny_lora optim.optimizer.lr=1e-3 +new=[1,{a: 1e-3}] ~seed rollout.promts=3",
    ),
    ("eval", "task=gsm8k model=path"),
    ("serve", "engine=nope"),
]
GROUPS = {str(file.parent.relative_to(CONF)) for file in CONF.rglob("*.yaml")} - {".", "data", "limits", "sampling"}
AXES = {group for group in GROUPS if group.startswith("algo/")}
SHARED = {"task", "model", "engine", "renderer", "judge", "problem"}
EVERY = [  # every option
    *(
        ("train", " ".join(line))
        for part in (GROUPS - AXES - {"experiment"}, AXES)
        for line in side_by_side(sorted(part))
    ),
    *(("train", f"experiment={option}") for option in options("experiment")),
    *(("eval", " ".join(line)) for line in side_by_side(sorted(SHARED))),
]


@pytest.mark.parametrize("lines", [QUICK, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["quick", "every_option"])
def test_the_same_is_composed(lines):
    for program, line in lines:
        found = same(lambda program=program, line=line: composed(program, line.split(" "), return_hydra_config=True))
        assert isinstance(found, list) == bool(re.search("nope|promts", line)), found


FILES = {
    "main.yaml": "defaults: [_self_, size: small, shape: round, optional both: '${size}_${shape}', tone: null, more: null]\n"
    "seed: 0",
    "size/small.yaml": "edge: 1",
    "size/large.yaml": "edge: 1e3",
    "shape/round.yaml": "radius: ${size.edge}",
    "both/large_round.yaml": "# @package _global_\nseed: 7",
    "tone/dark.yaml": "depth: 0.5",
    "more/missing.yaml": "# @package _global_\ndefaults:\n- override /tone: ???",
    "more/sweep.yaml": "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {size: large}}}",
    "more/broken.yaml": "path: x\nrewards: [a, b\nlimit: 3\n",
}


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("size=large", "'seed': 7"),
        ("hydra.mode=RUN", "'task': []"),
        ("seed=1,2", "Ambiguous value for argument 'seed=1,2'"),
        ("sed=1", "Could not override 'sed'"),
        ("size=huge", "Could not find 'size/huge'"),
        ("-m hydra.job.name=a,b", "Sweeping over Hydra's configuration is not supported"),
        ("more=sweep", "'seed': 7"),
        ("more=missing", "You must specify 'tone'"),
        ("more=missing tone=choice(dark) hydra.mode=MULTIRUN", "'tone': 'dark'"),
        ("more=broken", 'more/broken.yaml", line 2, column 10'),
        ("--cfg all", "config_name: main"),
    ],
)
def test_a_program_gets_the_same_and_refuses_the_same(line, shown, tmp_path, monkeypatch):
    found = str(same(program(line, tmp_path, monkeypatch)))
    assert shown in found, found


def test_the_installed_hydra_calls_each_function_that_is_replaced(tmp_path, monkeypatch):
    """Also where its names stay and it composes in another way: then it would be slow, and nothing would say so."""
    called = set()

    def noted(place, faster):
        def function(*given, **named):
            called.add(place)
            return faster(*given, **named)

        return function

    for place in REPLACED:
        monkeypatch.setattr(place.replace(":", "."), noted(place, resolve_name(place)))
    program("size=large", tmp_path, monkeypatch)()
    composed("train", ["seed=1"])
    assert called == set(REPLACED)


def program(line, tmp_path, monkeypatch):
    """Return a function that runs a program with this command line, and returns its configurations and what it printed."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    silent = "hydra/job_logging=none hydra/hydra_logging=none hydra/launcher=basic hydra.output_subdir=null"
    folders = [f"hydra.{mode}.dir={tmp_path}" for mode in ("run", "sweep")]
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", ["main.py", *line.split(), *silent.split(), *folders])

    def run():
        seen = []

        @hydra.main(version_base="1.3", config_path=str(tmp_path), config_name="main")
        def main(config):
            seen.append([OmegaConf.to_container(config), OmegaConf.to_container(HydraConfig.get(), resolve=False)])

        with redirect_stdout(io.StringIO()) as said:
            main()
        return [seen, said.getvalue()]

    return run


TEXTS = r"""1e-3; 1.; .5e3; 1_000; 0x10; 0o17; 017; 1:30; 1:30.5; .inf; -.Inf; .nan; 2020-01-01; 2020-01-01T10:00:00Z;
on; ~;
null; ''; "\u00e9 \x41"; é; !!str 3; !!python/object/apply:pathlib.PosixPath [a, b]; [a:b, c: d, {e: 1}]; # empty; a:b; 'a''b';
|\n  2\n  lines\n; >-\n  1\n  line; &x {b: 1}\nc: *x\nd: {<<: *x, e: 2}; 1\n? key\n: value; 1\n1: 2\ntrue: b; \n- 1\n- - 2"""
REFUSED = (
    r"""1\na: 2; [1; b: c; 'x; *none; !none 1; @b; 1\n- b; {a: 1, a: 2}; 1\n b: 2; \a; 1\n\tb: 1; 1\n...\nb: [; {b: 1"""
)


@pytest.mark.parametrize(("texts", "refused"), [(TEXTS, False), (REFUSED, True)], ids=["read", "refused"])
def test_yaml_is_read_by_the_same_rules(texts, refused, tmp_path):
    for text in texts.split(";"):
        text = "a: " + text.strip().replace("\\n", "\n").replace("\\t", "\t").replace("\\a", "\a")
        (tmp_path / "file.yaml").write_text(text, encoding="utf-8")
        for make in (lambda text=text: OmegaConf.create(text), lambda: OmegaConf.load(tmp_path / "file.yaml")):
            found = same(make)
            assert isinstance(found, list) == refused, (text, found)
            assert not refused or re.search("line [1-3], column|position 3", found[0][1]), (text, found)


def test_without_the_private_names_hydra_composes_alone():
    gone = dict.fromkeys(["omegaconf._utils:gone", "hydra._internal.gone:Loader.load"], hydra_speed.once)
    hydra_speed.hasten(gone)


def test_letters_of_every_language_need_no_quotes():
    """In values, keys, lists, dictionaries and sweeps; quotes change nothing, and other signs beyond ASCII are letters."""
    words = "task.path=Übungen/größe.csv +task.größe=5€ +a=[nän,'ß',e\u0301] +b={größe:1,kürze:{ß:日本}} +c=\"ä\""
    config = composed("train", ["task=jsonl", *words.split(" ")])
    assert (config.task.path, config.task["größe"], config.c) == ("Übungen/größe.csv", "5€", "ä")
    assert config.a == ["nän", "ß", "e\u0301"] and config.b == {"größe": 1, "kürze": {"ß": "日本"}}
    (sweep,) = OverridesParser.create().parse_overrides(["task.path=ä.csv,ö.csv"])
    assert [*sweep.sweep_string_iterator()] == ["ä.csv", "ö.csv"]
    with pytest.raises(OverrideParseException):
        composed("train", ["task=jsonl", "task.path=Größe (1).csv"])  # spaces and parentheses do
