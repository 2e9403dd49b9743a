"""Episodes without an engine: what a policy says, turn by turn."""

from grpo.env.messages import Message
from grpo.env.types import Action, Example, State, Step, Trajectory


def said(text: str, *before: Message, length: int = 0, truncated: bool = False) -> Trajectory:
    messages = before or (Message("user", "2 + 2?"),)
    return Trajectory((Step(State(messages), Action(Message("assistant", text), truncated, tuple(range(length)))),))


def hop_queries(row: Example) -> list[str]:
    """Return the searches of someone who knows the plan and every intermediate answer."""
    queries = []
    for place, hop in enumerate(row["decomposition"]):
        query = hop["q"]
        for earlier in range(place, 0, -1):
            query = query.replace(f"#{earlier}", row["decomposition"][earlier - 1]["a"])
        queries.append(query)
    return queries


def played(env, *said: Message, most: int = 99, truncated: bool = False) -> Trajectory:
    """Return the episode of a policy that says these, one a turn, at most `most`. It is out of turns if the environment wants
    more. truncated: the last one is cut."""
    state, steps = env.start(), []
    for message in said[:most]:
        steps.append(Step(state, Action(message, truncated and message is said[-1])))
        state = env.step(steps[-1].action)
    end = "truncated" if truncated else "out_of_turns" if state else "answered"
    return Trajectory(tuple(steps), end, None if truncated else state)
