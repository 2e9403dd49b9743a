"""Runs over pictures from the first row to the resumed run, and the line for what they refuse."""

import json
import re
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.runs import rows, state, told
from helpers.seeing import drawn, made
from PIL import Image

import grpo
from grpo.apps.api import save_rows
from grpo.env.pictures import ALIVE
from grpo.extras.devices.sharding import Sharded
from grpo.extras.images.door import sight_of
from grpo.models.pretrained import Pretrained
from grpo.runs.run import Run
from grpo.system.errors import UserError
from tasks.jsonl import Jsonl

QUIET = "debug=smoke callbacks=none forecast=false preflight=off logger=csv max_tokens=6".split()
REWARD = """
def length(completions, images, **columns):
    assert images
    return [float(len(text.encode()) % 3) for text in completions]
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory, toy) -> dict[str, str]:
    """Folders of models that see, by family, and of one that reads text."""
    kinds = {kind: made(kind, tmp_path_factory.mktemp(kind), toy) for kind in ("idefics3", "qwen2_5_vl")}
    return kinds | {"text": str(toy)}


@pytest.fixture
def words(tmp_path) -> list[str]:
    """The command line of a run over eight pictures beside a JSONL, without its model."""
    (tmp_path / "pictures").mkdir()
    for i in range(8):
        (tmp_path / "pictures" / f"{i}.png").write_bytes(drawn(40 + i, 50, i).data)
    lines = [json.dumps({"prompt": f"How many, {i % 4}?", "images": [f"pictures/{i}.png"]}) for i in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "lengths.py").write_text(REWARD)
    named = f"task=jsonl task.path={tmp_path}/train.jsonl task.rewards={tmp_path}/lengths.py:length model=path"
    return [*named.split(), *QUIET]


SEES = "model.vision=frozen"
LARGE = f"{SEES} model.pictures={{size:{{shortest_edge:500000,longest_edge:1000000}}}}"
SHORT = f"{SEES} prompt_limit.max_tokens=9"
REFUSED = [  # a model, more settings, the line
    (
        "text",
        "",
        "a message has a picture, and the model reads text only: set model.vision=frozen, with a model that sees",
    ),
    ("text", SEES, r"model\.vision: pictures are for idefics3, .*, and \S+ is a llama; set model\.vision=null"),
    ("qwen2_5_vl", "model.vision=yes", "model.vision=yes is not one of frozen, trained, or null"),
    (
        "qwen2_5_vl",
        f"{SEES} model.pictures={{maxpixels:5}}",
        r"model\.pictures\.maxpixels: the image processor of \S+ has no such setting; for fewer tokens set model\.pictures=",
    ),
    (
        "qwen2_5_vl",
        LARGE,
        r"picture \w{16} is [\d,]+ tokens, and the model's context 512: make it smaller, or set model\.pictures=",
    ),
    (
        "qwen2_5_vl",
        SHORT,
        r"the prompt of train example 1 has \d+ tokens, and prompt_limit\.max_tokens=9: .*; fewer tokens a picture: model\.p",
    ),
    ("idefics3", SHORT, r"fewer tokens a picture: model\.pictures={size: {longest_edge: 512}}"),
    (
        "idefics3",
        f"{SHORT} prompt_limit.too_long=truncate",
        r"prompts with pictures cannot be cut to their last tokens: set prompt_limit\.too_long to refuse or drop",
    ),
    ("idefics3", f"{SEES} task.images=photo", "no column 'photo'; it has prompt, images"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "more", "line"), REFUSED, ids=range(len(REFUSED)))
def test_what_a_run_refuses_is_one_line(models, words, tmp_path, model, more, line):
    overrides = [
        *words,
        f"model.path={models[model]}",
        *more.split(),
        f"output_dir={tmp_path / 'run'}",
    ]
    found = told(*overrides)
    assert re.search(line, found), found


def test_a_tower_that_learns_is_fetched_and_not_sharded(models):
    """`python -m grpo.prefetch` leaves the weights in their files, as a policy that is sharded does."""
    model = Pretrained(models["idefics3"], vision="trained", eyes=sight_of).model(mapped=True)
    assert model.is_mapped and all(p.requires_grad for p in model.parameters())
    with pytest.raises(UserError, match=r"^strategy=fsdp2 shares out no policy that sees: set strategy=ddp"):
        Sharded.share(None, SimpleNamespace(policy=model))


def test_rows_of_a_program_keep_their_pictures(tmp_path, monkeypatch):
    """Images of PIL become bytes in the run's folder, paths are whole, and a resumed run reads what was written first."""
    monkeypatch.chdir(tmp_path)
    first, second = drawn(40, 50, 1), drawn(30, 30, 2)
    Path("b.png").write_bytes(second.data)
    image = Image.open(BytesIO(first.data))
    parts = [{"type": "image", "image": None}, {"type": "text", "text": "?"}]
    for name, dataset in {
        "images": [{"prompt": "a", "images": [image, image]}, {"prompt": "b", "images": [image]}],
        "mixed": [{"prompt": "a", "image": first}, {"prompt": "b", "image": None}],
        "paths": [{"prompt": "a", "image": "b.png"}, {"prompt": "b", "image": Path("b.png")}],
        "parts": [{"prompt": [{"role": "user", "content": parts}], "image": image}],
        "inside": [{"prompt": [{"role": "user", "content": [{"type": "image", "image": image}]}]}],
    }.items():
        folder = tmp_path / name
        save_rows(dataset, folder)
        (folder / "config.yaml").touch()
        save_rows([{"prompt": "of a later call"}], folder)
        monkeypatch.chdir("/")
        task = Jsonl(str(folder / "data"), "longer", splits={"train": "train"}, held_out={})
        messages = [task.build(row).start().messages[0] for row in task.examples("train")]
        monkeypatch.chdir(tmp_path)
        pictures = [Image.open(BytesIO(one.data)).tobytes() for message in messages for one in message.pictures]
        expected = {
            "images": [first] * 3,
            "mixed": [first],
            "paths": [second] * 2,
            "parts": [first],
            "inside": [first],
        }[name]
        assert pictures == [Image.open(BytesIO(one.data)).tobytes() for one in expected], name


@pytest.mark.slow
@pytest.mark.parametrize(
    "ahead",
    ["rollout.ahead=1", "rollout.ahead=1 rollout.order=ready selection=all engine._target_=helpers.slots.Streams"],
)
def test_a_run_over_pictures_resumes_bit_exactly(models, words, tmp_path, ahead):
    """Four rollouts equal two, a crash and the rest: what waits or is replayed has its pictures in the checkpoint."""
    from conftest import compose_config

    from train import train

    settings = f"""model.path={models["idefics3"]} model.vision=trained rollout.num_rollouts=4 eval.every=0
        algo.old_policy=rollout selection=replay engine=transformers engine._target_=helpers.slots.Apart
        callbacks=[samples,checkpoint] callbacks.checkpoint.every=1
        task.held_out.test=0 task.splits.test=null optim.optimizer.lr=1e-3 {ahead}""".split()

    def run(folder: str, *more: str) -> list[dict[str, float]]:
        train(compose_config(*words, *settings, *more, f"output_dir={tmp_path / folder}"))
        return rows(tmp_path / folder)

    straight = run("straight")
    with pytest.raises(RuntimeError, match="the disk is full"):
        run("crashed", "+callbacks.crash={_target_: helpers.slots.Crash, rollout: 2}")
    last = tmp_path / "crashed" / "checkpoints" / "last.ckpt"
    ALIVE.clear()  # another process
    resumed = run("resumed", f"ckpt_path={last}", "resume.changes=allow")
    if "ready" not in ahead:
        assert resumed == straight[2:]
        weights = [state(tmp_path / folder)["state_dict"] for folder in ("straight", "resumed")]
        assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert len(resumed) == 2
    names = [file.stem for file in (tmp_path / "straight" / "rollouts").glob("*.parquet")]
    assert names and "PNG" not in str(Run(tmp_path / "straight").samples([1]).to_dict())


@pytest.mark.slow
def test_a_program_trains_on_images_of_pil(models, tmp_path):
    data = [{"prompt": "How many?", "image": Image.open(BytesIO(drawn(40 + i, 50, i).data))} for i in range(8)]
    seen = []

    def reward(completions, image, **columns):
        seen.extend(image)
        return [float(len(text.encode()) % 3) for text in completions]

    settings = {
        "model.vision": "frozen",
        "debug": "smoke",
        "max_tokens": 6,
        "forecast": False,
        "preflight": "off",
        "eval.every": 0,
    }
    settings |= {"task.held_out.test": 0, "task.splits.test": None}
    run = grpo.train(models["idefics3"], dataset=data, rewards=[reward], output_dir=tmp_path / "run", **settings)
    assert len(run.metrics) == 2 and all(one["bytes"].startswith(b"\x89PNG") for one in seen)
