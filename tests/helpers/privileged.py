"""Modules that learn from a teacher, in place of a trainer: samples of real text, a teacher, an update."""

from types import SimpleNamespace

from conftest import EXAMPLES

from grpo.env.chat_template import TemplateRenderer
from grpo.env.messages import Message
from grpo.env.tokens import Completion, Turn
from grpo.env.types import Action, Reward, State, Step, Trajectory
from grpo.extras.teachers.kinds import Teacher
from grpo.extras.teachers.module import Lessons
from grpo.models.pretrained import Pretrained
from grpo.rollout.collate import collate, scores
from grpo.rollout.types import Group, Sample
from grpo.training.batch import RolloutBatch
from grpo.training.module import GRPOModule
from helpers.learning import make_module
from tasks.gsm8k import GSM8K


def renderer_of(folder) -> TemplateRenderer:
    return TemplateRenderer(Pretrained(str(folder)).tokenizer())


def talk(renderer, *turns: tuple[str, str], pages: bool = False, example=None, **reward) -> Sample:
    """Return an episode of (question, answer) pairs. pages: the policy does not see the turns before. reward: value, extra."""
    steps, tokens, before = [], [], ()
    for question, answer in turns:
        ids = (*renderer.tokenizer(answer, add_special_tokens=False).input_ids, renderer.tokenizer.eos_token_id)
        state = State((*(() if pages else before), Message("user", question)))
        prompt = renderer.prompt_ids(state.messages, before=tokens[-1].ids if tokens and not pages else ())
        message = Message("assistant", answer)
        steps.append(Step(state, Action(message)))
        tokens.append(Turn(prompt, Completion(ids, (-0.5,) * len(ids), "stop")))
        before = (*state.messages, message)
    value = reward.pop("value", 0.0)
    return Sample(example or {}, Trajectory(tuple(steps)), tuple(tokens), Reward(value, value >= 1, **reward))


def batch_of(groups: list[Group]) -> RolloutBatch:
    return RolloutBatch(0, groups=groups, tokens=collate(groups), scores=scores(groups))


def taught(policy, who: Teacher, renderer, **settings) -> GRPOModule:
    """Return a module whose rollouts are of GSM8K."""

    class Alone(Lessons):
        rollouts = SimpleNamespace(renderer=renderer, task=GSM8K(str(EXAMPLES)))

    return make_module(policy, parts={"teacher": Alone(who)}, **{"policy_coef": 0.0, "reduce": "token", **settings})
