"""The demo's base model: tokenizer, loss, cache, the models that ship. The real recipe is slow: 2 + 1 steps here."""

import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import TEST_PATH, compose_config
from filelock import FileLock
from hydra.utils import instantiate
from torch.nn import Parameter
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from grpo.env.messages import Message, ToolCall, ToolSpec
from grpo.env.types import State
from grpo.extras.demo import demo_model
from grpo.extras.demo.demo_model import (
    BATCH,
    SHIPPED,
    Muon,
    answer_loss,
    batches,
    fit,
    make_model,
    make_once,
    make_tokenizer,
    texts,
    tiny_folder,
    tokenize,
)
from grpo.system.errors import UserError
from tasks import calculator
from tasks.wordmath import worked_answers

brief = partial(tiny_folder, worked_answers, clean_steps=2, hasty_steps=1)


def asked(question: str, answer: str) -> State:
    return State((Message("user", question), Message("assistant", answer)))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Two processes with two threads each on two cores wait for each other more than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer([text for pair in texts(worked_answers(500, 0)) for text in pair])


@pytest.fixture(scope="module")
def with_tools():
    """A tokenizer that knows calls."""
    return make_tokenizer([text for said in texts(calculator.worked_answers(500, 0)) for text in said], tools=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return brief(cache=str(tmp_path_factory.mktemp("cache")))


def test_any_text_survives_the_tokenizer(tokenizer):
    scripts = "".join(map(chr, range(0x250))) + "你好 ✓ 𒀀 👩‍🚀 é e\u0301\u2028\x00"
    spaces = "  a\n\n b\t c   4  5 \r\n\n"
    for text in (scripts, spaces, "zebras eat 12 quinces", "\\boxed{\\frac{1}{2}} #### 3,000.5", ""):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text


def test_a_digit_is_a_token_and_so_is_a_word_of_the_task(tokenizer):
    def pieces(text: str) -> list[str]:
        return [tokenizer.decode([i]) for i in tokenizer(text, add_special_tokens=False).input_ids]

    assert pieces("14+7=21\n\\boxed{21}") == ["1", "4", "+", "7", "=", "2", "1", "\n", "\\boxed{", "2", "1", "}"]
    assert pieces("Sam has 14 coins.") == ["Sam", " has ", "1", "4", " coins", "."]
    assert pieces("2024") == ["2", "0", "2", "4"]


def test_the_chat_template(tokenizer):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|system|>Be brief.<|end|><|user|>1+1?<|end|><|assistant|>"
    answered = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": "2"}], tokenize=False)
    assert answered == prompt + "2" + tokenizer.eos_token
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    special = [i for i in ids if i in tokenizer.all_special_ids]
    assert tokenizer.convert_ids_to_tokens(special) == ["<|system|>", "<|end|>", "<|user|>", "<|end|>", "<|assistant|>"]


WEIGHED = State(
    (
        Message("user", "12*3, then?"),
        Message("assistant", "", (ToolCall("calculator", {"expression": "12*3"}),)),
        Message("tool", "36", name="calculator"),
        Message("assistant", "\\boxed{36}"),
    ),
    (ToolSpec("calculator", "Works it out.", {"type": "object", "properties": {"expression": {"type": "string"}}}),),
)


def test_the_chat_template_with_tools(with_tools):
    def rendered(count: int, **arguments) -> str:
        return with_tools.apply_chat_template(
            [message.as_dict() for message in WEIGHED.messages[:count]],
            tools=[tool.as_dict() for tool in WEIGHED.tools],
            tokenize=False,
            **arguments,
        )

    asked = rendered(1, add_generation_prompt=True)
    assert asked == "<|system|>calculator(expression)<|end|><|user|>12*3, then?<|end|><|assistant|>"
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*3"}}\n</tool_call>'
    told = rendered(3, add_generation_prompt=True)
    assert told == f"{asked}{call}<|end|><|tool|>36<|end|><|assistant|>"  # the next prompt begins with this one
    assert rendered(4) == told + "\\boxed{36}<|end|>"


def test_a_message_may_call_twice_and_say_something(with_tools):
    calls = tuple(ToolCall("add", {"a": a, "b": "é"}) for a in (1, 2))
    said = [Message("user", "?"), Message("assistant", "Well.", calls)]
    tools = [ToolSpec(name, "", {"properties": {"a": {}, "b": {}}}) for name in ("add", "sub")]
    text = with_tools.apply_chat_template(
        [m.as_dict() for m in said], tools=[t.as_dict() for t in tools], tokenize=False
    )
    one, two = (f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": "é"}}}}\n</tool_call>' for a in (1, 2))
    assert text == f"<|system|>add(a, b)\nsub(a, b)<|end|><|user|>?<|end|><|assistant|>Well.\n{one}\n{two}<|end|>"


def test_a_call_is_few_tokens_that_are_read_back(with_tools):
    text = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*3"}}\n</tool_call>'
    ids = with_tools(text, add_special_tokens=False).input_ids
    assert [with_tools.decode([i]) for i in ids] == [
        "<tool_call>", '\n{"name": "', "calculator", '", "arguments": {"', "expression", '": "', "1", "2", "*", "3",
        '"}}\n', "</tool_call>",
    ]  # fmt: skip
    assert with_tools.decode(ids, skip_special_tokens=True) == text


def test_without_tools_there_is_nothing_of_them(tokenizer):
    assert "tool" not in tokenizer.chat_template and "<tool_call>" not in tokenizer.get_vocab()


def test_learned_is_exactly_what_the_assistant_says(with_tools):
    ((ids, learned),) = tokenize(with_tools, [WEIGHED])
    assert len(ids) == len(learned)
    runs, before = [], False
    for i, one in zip(ids, learned, strict=True):
        if one and not before:
            runs.append([])
        if one:
            runs[-1].append(i)
        before = one
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*3"}}\n</tool_call><|end|>'
    assert [with_tools.decode(run) for run in runs] == [call, "\\boxed{36}<|end|>"]
    rest = with_tools.decode([i for i, one in zip(ids, learned, strict=True) if not one])
    begin = "<|system|>calculator(expression)<|end|><|user|>12*3, then?<|end|><|assistant|>"
    assert rest == begin + "<|tool|>36<|end|><|assistant|>"


def test_a_batch_marks_the_answer_and_its_end(tokenizer):
    rows = tokenize(tokenizer, [asked("1+1?", "2"), asked("How many?", "1+1=2\n\\boxed{2}")])
    ((ids, answer),) = batches(rows, tokenizer.pad_token_id, seed=0)
    texts = {tokenizer.decode(row[marks]) for row, marks in zip(ids, answer, strict=True)}
    assert texts == {"2<|end|>", "1+1=2\n\\boxed{2}<|end|>"}


def test_every_row_is_in_one_batch(tokenizer):
    rows = tokenize(tokenizer, worked_answers(150, 0))
    got = list(batches(rows, tokenizer.pad_token_id, seed=0))
    assert sorted(len(ids) for ids, _ in got) == [150 % BATCH] + [BATCH] * (150 // BATCH)
    assert sum(int(answer.sum()) for _, answer in got) == sum(sum(learned) for _, learned in rows) > 0


def test_the_loss_is_that_of_each_row_alone(tokenizer):
    """Padding, and the rows beside it, change nothing."""
    model = make_model(tokenizer, seed=0)
    rows = tokenize(tokenizer, [asked("1+1?", "2"), asked("How many coins does Sam have?", "1+1=2\n\\boxed{2}")])
    ((ids, answer),) = batches(rows, tokenizer.pad_token_id, seed=0)
    with torch.no_grad():
        together = answer_loss(model, ids, answer)
        total = count = 0
        for row, learned in rows:
            prompt = learned.index(True)
            logprobs = model(torch.tensor([row])).logits[0].log_softmax(-1)
            total -= sum(logprobs[t - 1, row[t]] for t in range(prompt, len(row)))
            count += len(row) - prompt
    torch.testing.assert_close(together, total / count)
    assert abs(together - math.log(len(tokenizer))) < 0.5  # it knows nothing yet


def test_the_folder_loads(folder):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert 1e6 < sum(p.numel() for p in model.parameters()) < 2e6
    assert model.config.head_dim == 32 and model.config.max_position_embeddings == 4096
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    assert model.config.bos_token_id is None and tokenizer.bos_token is None
    assert tokenizer("Sam has 14 👩‍🚀").input_ids == tokenizer("Sam has 14 👩‍🚀", add_special_tokens=False).input_ids
    assert tokenizer.decode(tokenizer("Sam has 14 👩‍🚀").input_ids) == "Sam has 14 👩‍🚀"


@pytest.mark.parametrize("task", ["wordmath", "calculator"])
def test_the_shipped_model_is_of_the_default_recipe(task, tmp_path, monkeypatch):
    """After a change of the recipe, of what makes the model, or of the worked answers, it has to be made again."""
    monkeypatch.setattr(
        demo_model, "fit", lambda *_: pytest.fail("run python -m grpo.extras.demo.demo_model, and commit")
    )
    path = compose_config(f"task={task}", "output_dir=.").model.path
    assert instantiate(path, cache=str(tmp_path)) == str(SHIPPED / task)
    weights = AutoModelForCausalLM.from_pretrained(SHIPPED / task).state_dict()
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert (SHIPPED / task / "model.safetensors").stat().st_size < 2.7e6


@pytest.mark.slow
def test_a_model_made_anew_takes_the_place_of_the_old_one(tmp_path):
    for steps in (1, 2):
        brief(clean_steps=steps, anew=str(tmp_path / "model"))
        assert f'"clean_steps": {steps},' in (tmp_path / "model" / "recipe.json").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_made_once_and_found_again(tmp_path, capsys):
    folder = brief(cache=str(tmp_path))
    told = capsys.readouterr()
    assert told.out.startswith("warm-starting") and told.out.count("\n") == 2 and told.err == ""  # no bars in a log
    weights = next(tmp_path.glob("*/model.safetensors"))
    made = weights.stat().st_mtime_ns
    assert brief(cache=str(tmp_path)) == folder
    assert weights.stat().st_mtime_ns == made and capsys.readouterr().out == ""
    assert [str(path) for path in tmp_path.iterdir() if path.is_dir()] == [folder]  # nothing unfinished is left


@pytest.mark.slow
def test_two_at_once_make_it_once(tmp_path, capfd):
    """As the jobs of a sweep do."""
    code = "import sys; from test_demo_model import brief; print(brief(cache=sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": TEST_PATH}
    other = subprocess.Popen(command, env=environment)
    print(brief(cache=str(tmp_path)))
    assert other.wait(900) == 0
    told = capfd.readouterr().out
    assert told.count("warm-starting") == 1 and told.count(f"{tmp_path}/tiny-") == 3  # the maker says it twice


@pytest.mark.slow
def test_another_recipe_is_another_model(folder, tmp_path):
    name = folder.rpartition("/")[2]
    assert name not in brief(seed=1, cache=str(tmp_path))
    assert name not in tiny_folder(
        lambda *args, **kwargs: [asked(q, "\\boxed{0}") for q, _ in texts(worked_answers(*args, **kwargs))],
        clean_steps=2,
        hasty_steps=1,
        cache=str(tmp_path),
    )


def test_equal_seeds_equal_weights_and_the_callers_dice_untouched(folder, tmp_path):
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    again = brief(cache=str(tmp_path))
    assert torch.equal(torch.random.get_rng_state(), before)
    one, two = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, again))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.slow
def test_training_learns(folder, tmp_path):
    """A few steps on a single sum, and it is known by heart."""

    def by_heart(count: int, seed: int, hasty: float = 0.0, slips: float = 0.0) -> list[State]:
        return [asked("1+1?", "2")] * count

    folder = tiny_folder(by_heart, clean_steps=20, hasty_steps=0, cache=str(tmp_path))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "1+1?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**prompt, max_new_tokens=5, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert tokenizer.decode(said) == "2<|end|>"


def test_a_model_that_another_process_makes_is_not_awaited_for_ever(tmp_path, monkeypatch):
    others = []

    def held(path, seconds):
        others.append(FileLock(path))
        others[0].acquire()
        return FileLock(path, seconds)

    monkeypatch.setattr(demo_model, "FileLock", held)
    monkeypatch.setattr(demo_model, "LOCKED", 0.05)
    with pytest.raises(UserError, match=r"another process holds .*\.lock for 0.05 s, to make the demo's model: end"):
        brief(cache=str(tmp_path))


def test_batches_do_not_come_in_the_order_of_their_lengths():
    """Eight batches whose longest rows have 33, 65 ... 257 tokens."""
    rows = [([7] * (n + 1), [False] * n + [True]) for n in range(1, 8 * BATCH + 1)]
    lengths = [ids.shape[1] for ids, _ in batches(rows, 0, seed=0)]
    assert sorted(lengths) == [33, 65, 97, 129, 161, 193, 225, 257] != lengths


def test_muon_follows_the_average_of_the_gradients():
    """It is 0.95 * 0.05 - 0.05 * 0.25 = 0.035 after 1 and -0.25: the second step has the direction of the first."""
    p = Parameter(torch.zeros(1, 1))
    optimizer, places = Muon([p], lr=0.1), []
    for gradient in (1.0, -0.25):
        p.grad = torch.full((1, 1), gradient)
        optimizer.step()
        places.append(p.item())
    assert 0 > places[0] > places[1]
    assert optimizer.state[p]["average"].item() == pytest.approx(0.035)


class Noting(torch.optim.SGD):
    """Notes the rate and the size of the gradient of each step, and changes nothing."""

    def __init__(self, params) -> None:
        super().__init__(params, lr=1.0)
        self.rates, self.sizes = [], []

    def step(self, closure=None) -> None:
        self.rates.append(self.param_groups[0]["lr"])
        self.sizes.append(self.param_groups[0]["params"][0].grad.norm().item())


def test_rates_rise_and_fall_and_each_step_has_its_own_gradient():
    """In 40 steps they go up by 0.05 each, then down to 0. All batches are equal, and so are their gradients."""
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1, pad_token_id=0))
    optimizer = Noting(model.parameters())
    fit(model, [([1, 2, 3], [False, False, True])] * (40 * BATCH), [optimizer], seed=0)
    assert [optimizer.rates[step] for step in (0, 13, 30, 39)] == pytest.approx([0.05, 0.675, 0.25, 0.025])
    assert max(optimizer.sizes) == pytest.approx(min(optimizer.sizes)) and min(optimizer.sizes) > 0


def test_hasty_answers_have_a_seed_of_their_own(tmp_path, monkeypatch):
    """A recipe whose model does not ship with the project takes careful answers of the seed 6, and hasty ones of 7."""
    wanted, spoiled = [], {"hasty": 0.55, "slips": 0.05}

    def noted(count: int, seed: int, **settings: float) -> list[State]:
        wanted.append((count, seed, settings))
        return worked_answers(count, seed, **settings)

    monkeypatch.setattr(demo_model, "fit", lambda *_: None)
    folder = tiny_folder(noted, seed=3, clean_steps=2, hasty_steps=1, cache=str(tmp_path))
    assert folder.startswith(str(tmp_path))
    assert wanted == [(100, 3, spoiled), (2 * BATCH, 6, {}), (BATCH, 7, spoiled)]


def test_a_job_that_has_waited_takes_the_model_of_the_other(tmp_path):
    made = []

    def make(folder: Path) -> None:
        made.append(folder)
        folder.mkdir(exist_ok=True)

    for _ in range(2):
        make_once(make, tmp_path / "cache" / "tiny")
    assert made == [tmp_path / "cache" / "tiny"]
