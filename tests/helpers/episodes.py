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
