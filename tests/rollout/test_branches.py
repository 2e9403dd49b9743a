"""Conversations that continue an earlier turn than the last one."""

from conftest import ROOT, seed

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Sampling
from grpo.env.messages import Message, ToolCall
from grpo.env.rendering import rendered_prompt
from grpo.env.tokens import Completion, Row, Turn, rows_of_turns
from grpo.env.types import Action, State, Step
from grpo.extras.tools.renderer import TokenizerRenderer
from grpo.models.pretrained import Pretrained
from grpo.rollout.episodes import play
from grpo.rollout.types import Limits
from tasks.calculator import Calculator


def test_the_latest_turn_that_a_conversation_continues_gives_its_ids():
    from grpo.extras.demo.demo_model import make_tokenizer

    renderer = TokenizerRenderer(make_tokenizer(["How many coins are left? 12 + 7 = 19"] * 30, tools=True))
    odd = tuple(renderer.tokenizer("12", add_special_tokens=False).input_ids)
    assert len(odd) == 2  # a digit is a token: "12" cannot be tokenized in another way, so a word is spelled by letters
    spelled = tuple(renderer.tokenizer(letter, add_special_tokens=False).input_ids[0] for letter in "left")
    assert tuple(renderer.tokenizer("left", add_special_tokens=False).input_ids) != spelled
    end = renderer.tokenizer.eos_token_id

    def taken(question: str, ids: tuple[int, ...]) -> tuple[Step, Turn]:
        state = State((Message("user", question),))
        message = Message("assistant", "left", (ToolCall("f", {}),) if question == "called" else ())
        turn = Turn(renderer.prompt_ids(state.messages), Completion((*ids, end), (-1.0,) * (len(ids) + 1), "stop"))
        return Step(state, Action(message)), turn

    steps, turns = zip(*(taken(question, spelled) for question in ("one", "one", "two")), strict=True)
    after = State((Message("user", "one"), Message("assistant", "left"), Message("user", "more")))
    prompt = rendered_prompt(renderer, after, steps, turns)
    assert prompt[: len(turns[1].ids)] == turns[1].ids  # as it was sampled, letter by letter
    fresh = renderer.prompt_ids(after.messages)
    assert fresh[: len(turns[1].ids)] != turns[1].ids
    assert renderer.tokenizer.decode(fresh) == renderer.tokenizer.decode(prompt)
    new = State((Message("user", "three"),))
    assert rendered_prompt(renderer, new, steps, turns) == renderer.prompt_ids(new.messages)


def test_other_environments_get_the_prompts_and_rows_that_they_had():
    """Their conversations continue the last turn, or none: the rule that looks at the last turn only agrees."""
    trained = Pretrained(str(ROOT / "grpo/extras/demo/demo_models/calculator"))
    engine, renderer = TransformersEngine(), TokenizerRenderer(trained.tokenizer())
    engine.load_weights(trained.model(), 0)
    task = Calculator(test_size=4)
    groups = play(task, task.examples("test"), 4, engine, renderer, Sampling(32), seed, Limits(max_turns=4))
    samples = [sample for group in groups for sample in group]
    assert max(len(sample.turns) for sample in samples) > 2
    for sample in samples:
        before: tuple[int, ...] = ()
        rows = []
        for number, (step, turn) in enumerate(zip(sample.trajectory.steps, sample.turns, strict=True)):
            assert turn.prompt_ids == renderer.prompt_ids(step.state.messages, step.state.tools, before)
            before = turn.ids
            longer = rows and rows[-1].extended(turn, number)
            rows = [*rows[:-1], longer] if longer else [*rows, Row(turn.prompt_ids, (), (), ()).extended(turn, number)]
        assert rows_of_turns(sample.turns) == rows
