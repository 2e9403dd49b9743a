"""Words of the environment: which tokens they are in models' own templates, and what ECHO learns from them."""

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from conftest import preset
from helpers.families import FAMILIES, real, spelled
from helpers.learning import make_module
from helpers.taught import assigned
from tokenizers import AddedToken

from grpo.env.messages import Message, ToolCall
from grpo.env.rendering import rendered_prompt
from grpo.env.tokens import Completion, Turn
from grpo.env.types import Action, Reward, State, Step, Trajectory
from grpo.extras.demo.demo_model import make_model
from grpo.extras.teachers.kinds import Teacher
from grpo.extras.teachers.module import Lessons
from grpo.extras.teachers.observed import begin, observed
from grpo.extras.teachers.teaching import Imitation
from grpo.extras.tools.renderer import TokenizerRenderer
from grpo.objectives.kl import KL
from grpo.rollout.collate import collate, scores
from grpo.rollout.types import Sample
from grpo.training.batch import RolloutBatch
from grpo.training.meter import Means
from grpo.training.module import GRPOModule

CALL = Message("assistant", "", (ToolCall("add", {"a": 1, "b": 2}, "abcDEF123"),))
TALK = Message("assistant", "Hm.")


def tool(text: str) -> Message:
    return Message("tool", text, name="add")


def sample_of(renderer, *says: tuple[str, Message, list[Message]], reward=0.0) -> Sample:
    """An episode. says: the policy's text as it is sampled, the message that it is, and what the environment answers."""
    messages, steps, turns = (Message("user", "How many are 1 + 2?"),), [], []
    for text, said, answers in says:
        state = State(messages)
        prompt = rendered_prompt(renderer, state, [*steps, None], turns)
        ids = tuple(renderer.tokenizer(text, add_special_tokens=False).input_ids)
        steps.append(Step(state, Action(said)))
        turns.append(Turn(prompt, Completion(ids, (-1.0,) * len(ids), "stop")))
        messages = (*messages, said, *answers)
    return Sample({}, Trajectory(tuple(steps)), tuple(turns), Reward(reward, bool(reward)))


def words(renderer, sample: Sample) -> tuple[list[str], int, int]:
    """The texts of the runs of observed tokens, and how many messages were found, and how many there are."""
    tokens = collate([[sample]])
    mask, found, every = observed(tokens, [[sample]], 1, renderer)
    assert not (mask & tokens.mask).any()
    texts = []
    for ids, row in zip(tokens.ids[:, tokens.prompt_width :].tolist(), mask.tolist(), strict=True):
        runs, before = [], False
        for token, inside in zip(ids, row, strict=True):
            if inside and not before:
                runs.append([])
            if inside:
                runs[-1].append(token)
            before = inside
        texts += [renderer.tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs]
    return texts, found, every


NAMES = {"qwen2_5": "Hm.<|im_end|>", "qwen3": "Hm.<|im_end|>", "llama3_2": "Hm.<|eot_id|>", "gemma4_v5": "Hm.<turn|>"}
NAMES |= {"gptoss": "<|channel|>final<|message|>Hm.<|return|>", "lfm2_2_5": "Hm.<|im_end|>", "glm4moe": "Hm.<|user|>"}


@cache
def renderer_of(name: str) -> TokenizerRenderer:
    return TokenizerRenderer(FAMILIES[name].tokenizer()) if name in FAMILIES else real(name)


@pytest.mark.parametrize("name", NAMES)
def test_words_of_a_user_without_roles_and_ends(name):
    """Texts that the template's own tokens have too, spaces at the ends, a character of several tokens."""
    renderer = renderer_of(name)
    for text in ("user", "Sure? \U0001f642\n\nReally?", " <b>\n", "assistant\nuser\n"):
        sample = sample_of(renderer, (NAMES[name], TALK, [Message("user", text)]), ("3", TALK, []))
        if len(collate([[sample]])) == 1:  # else the template rewrites what was said, and the words are in a prompt
            texts, found, every = words(renderer, sample)
            assert texts in ([text], [text.strip()]) and (found, every) == (1, 1), text


JSON = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
CALLS = {"qwen2_5": JSON, "qwen3": JSON, "llama3_2": '{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>'}
CALLS |= {name: family.call + family.end for name, family in FAMILIES.items()}


@pytest.mark.parametrize("name", CALLS)
def test_answers_of_tools(name):
    """Several messages between two turns; a template may write them as JSON. Mistral's takes no user after a tool."""
    answers = [tool('tool "3"\n{}'), Message("user", "Go on.")][: 1 if name == "mistral" else 2]
    renderer = renderer_of(name)
    texts, found, every = words(renderer, sample_of(renderer, (CALLS[name], CALL, answers), ("Three.", TALK, [])))
    forms = ('tool "3"\n{}', 'tool \\"3\\"\\n{}')
    assert texts in [[form, "Go on."][: len(answers)] for form in forms] and found == every == len(answers)


def test_a_token_across_the_border_is_out():
    """The prompt ends a message by one token for its last letter and what follows it: the letters before it are words."""
    renderer = TokenizerRenderer(FAMILIES["qwen25"].tokenizer())
    tokenizer = renderer.tokenizer
    sample = sample_of(renderer, ("Hm.<|im_end|>", TALK, [Message("user", "coins")]), ("3", TALK, []))
    assert words(renderer, sample)[0] == ["coins"]
    tokenizer.add_tokens([AddedToken("s<|im_end|>", special=True, normalized=False)])
    first, second = sample.turns
    between = spelled(tokenizer, tokenizer.decode(second.prompt_ids[len(first.ids) :]))
    assert tokenizer.convert_tokens_to_ids("s<|im_end|>") in between
    second = replace(second, prompt_ids=first.ids + between)
    assert words(renderer, replace(sample, turns=(first, second))) == (["coin"], 1, 1)


def test_messages_that_are_not_in_the_text_are_out_and_counted():
    renderer = renderer_of("qwen25")
    sample = sample_of(renderer, ("Hm.<|im_end|>", TALK, [Message("user", "Sure?")]), ("3", TALK, []))
    other = replace(
        sample.trajectory.steps[1].state, messages=(*sample.trajectory.steps[1].state.messages[:2], tool("4"))
    )
    steps = (sample.trajectory.steps[0], replace(sample.trajectory.steps[1], state=other))
    assert words(renderer, replace(sample, trajectory=Trajectory(steps))) == ([], 0, 1)
    prefilled = sample_of(
        renderer, ("Hm.<|im_end|>", TALK, [Message("user", "No."), Message("assistant", "So")]), ("3", TALK, [])
    )
    assert words(renderer, prefilled) == (["No."], 1, 1)  # words in the policy's name are no observation


def test_the_words_stand_right_after_what_the_template_writes():
    assert begin("so<user>\nab", "<user>\n", "ab") == 9
    assert begin("so<user>\ncab", "<user>\n", "ab") is None  # the end of a longer message


# -- what is learned

SAID = [
    ("Hm.<|im_end|>", TALK, [Message("user", "Sure 12?")]),
    ("It is 3.<|im_end|>", Message("assistant", "It is 3."), []),
]
OTHER = [
    ("<|im_end|>", Message("assistant", ""), [Message("user", "7")]),
    ("12<|im_end|>", Message("assistant", "12"), []),
]


@pytest.fixture(scope="module")
def groups():
    renderer = renderer_of("qwen25")
    return [[sample_of(renderer, *SAID, reward=1.0), sample_of(renderer, *OTHER)]] * 2


def fresh():
    return make_model(renderer_of("qwen25").tokenizer, seed=0)


def taught(policy, observed: float, **settings) -> GRPOModule:
    class Heard(Lessons):
        rollouts = SimpleNamespace(renderer=renderer_of("qwen25"))

    return make_module(policy, parts={"teacher": Heard(Teacher())}, imitation=Imitation(observed=observed), **settings)


REWARDS = ((1.0, -1.0), (0.5, 0.0))  # a row without an advantage has words, too


def batch_of(groups, rewards=REWARDS) -> RolloutBatch:
    rewards = torch.tensor(rewards)
    return RolloutBatch(0, groups=groups, tokens=collate(groups), scores=replace(scores(groups), rewards=rewards))


def step(module, groups, rewards=REWARDS) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The gradient of an update, of SGD with rate 0.1, and what was logged."""
    before = {name: p.detach().clone() for name, p in module.trained().items()}
    batch = batch_of(groups, rewards)
    metrics = module.training_step(batch, 0) | batch.metrics
    return {name: (before[name] - p.detach()) / 0.1 for name, p in module.trained().items()}, metrics


def test_three_tokens_of_probability_one_half(groups):
    """0.05 ln 2, and with the weight 0.1 0.1 ln 2, however many tokens the policy sampled, in however many rows."""
    for weight, rows in ((0.05, [3]), (0.1, [2, 1])):
        module = taught(fresh(), weight)
        tokens = assigned(module, batch_of(groups)).rows(torch.arange(len(rows)))
        mask = torch.zeros_like(tokens.mask)
        for row, count in enumerate(rows):
            mask[row, tokens.mask[row].nonzero().max() - torch.arange(count)] = True
        tokens = replace(tokens, imitation=weight * mask, advantages=torch.zeros_like(tokens.rollout_logprobs))
        tokens = replace(module.weighed(tokens, len(rows)), old_logprobs=tokens.rollout_logprobs)
        logprobs = torch.full_like(tokens.rollout_logprobs, -2.0).masked_fill(mask, math.log(0.5))
        loss, _ = module.loss_of(logprobs, torch.zeros_like(logprobs), tokens, 0.0, Means())
        assert loss.item() == pytest.approx(weight * math.log(2), abs=1e-7)


def test_a_weight_of_nothing_is_grpo_to_the_bit(groups):
    plain, echo = fresh(), fresh()
    one, logged = step(make_module(plain), groups)
    two, heard = step(taught(echo, 0.0), groups)
    assert all(torch.equal(one[name], two[name]) for name in one) and logged == heard


def test_the_words_are_in_no_metric_of_the_policys_tokens(groups):
    rewards = ((1.0, -1.0), (0.5, -0.5))
    _, logged = step(make_module(fresh()), groups, rewards)
    _, heard = step(taught(fresh(), 0.05), groups, rewards)
    own = {name for name in logged if name != "loss/grad_norm"}
    assert {name: heard[name] for name in own} == pytest.approx({name: logged[name] for name in own}, abs=1e-6)


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prompt"])
def test_the_gradient_is_grpos_and_that_of_the_words_by_hand(groups, layout):
    """Each word is predicted from all tokens before it: a mask shifted by one, as labels are, has another gradient."""
    modules = (
        make_module(fresh(), layout=layout),
        taught(fresh(), 0.05, layout=layout, max_tokens_per_microbatch=90),
    )
    for module in modules:
        module.temperature = 0.7  # of sampling; what the environment said was not sampled
    (plain, _), (echo, heard) = (step(module, groups) for module in modules)
    model, tokens = fresh(), collate(groups)
    places = []  # of the words' tokens, found by their texts
    for ids, start in zip(tokens.ids.tolist(), tokens.attention_mask.argmax(1).tolist(), strict=True):
        text = "Sure 12?" if "Sure" in decoded(ids) else "7"
        size = next(n for n in range(1, 9) for i in range(len(ids)) if decoded(ids[i : i + n]) == text)
        place = next(i for i in range(tokens.prompt_width, len(ids)) if decoded(ids[i : i + size]) == text)
        places.append((ids[start:], range(place - start, place - start + size)))
    terms = []
    for ids, words in places:
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        terms += [-logprobs[i - 1, ids[i]] for i in words]
    loss = 0.05 * sum(terms) / len(terms)
    loss.backward()
    assert heard["imitation/loss"] == pytest.approx(20 * loss.item(), abs=1e-5) and heard["imitation/found"] == 1
    for name, p in model.named_parameters():
        torch.testing.assert_close(echo[name] - plain[name], p.grad, atol=2e-6, rtol=0, msg=name)


def decoded(ids: list[int]) -> str:
    return renderer_of("qwen25").tokenizer.decode(ids)


def test_the_words_stay_out_of_ratio_and_kl(groups):
    """A word that the policy thinks impossible has the weight 0 in the policy's part: 0 times infinity would be no number."""
    module = taught(fresh(), 0.05, kl=KL(coef=0.04))
    tokens = module.weighed(replace(assigned(module, batch_of(groups)), advantages=torch.zeros(4, 1)), 4)
    nothing = torch.zeros_like(tokens.rollout_logprobs)
    tokens = replace(tokens, old_logprobs=nothing, reference_logprobs=nothing, advantages=nothing)
    logprobs = torch.where(tokens.imitation > 0, -200.0, nothing).requires_grad_()
    loss, _ = module.loss_of(logprobs, nothing, tokens, 0.0, Means())
    loss.backward()
    assert loss.item() == pytest.approx(0.05 * 200) and logprobs.grad.isfinite().all()
    assert not logprobs.grad[tokens.mask].any()


def test_the_preset_weighs_the_words_by_a_twentieth():
    algorithm = preset("algo=echo")
    assert algorithm.imitation == Imitation(observed=0.05) and algorithm.policy_coef == 1 and not algorithm.teacher.coef
