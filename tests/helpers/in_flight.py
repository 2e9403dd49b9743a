"""Weights that arrive while an engine samples."""

import threading
from collections.abc import Iterator

from grpo.env.tokens import Completion


def at(engine, monkeypatch, actions: dict) -> None:
    """Call actions[n] in a thread of its own, which takes its turn after the engine's n-th step from now, before the next."""
    step, count = engine._llm.llm_engine.step, iter(range(10**6))

    def stepped():
        outputs = step()
        if action := actions.get(next(count)):
            queued = len(engine._turns._queue)
            threading.Thread(target=action).start()
            while len(engine._turns._queue) == queued:
                pass
        return outputs

    monkeypatch.setattr(engine._llm.llm_engine, "step", stepped)


def segments(prompt: list[int], done: Completion) -> Iterator[tuple[int, list[int], Completion]]:
    """Yield each version, the tokens before its segment, and the segment."""
    for version in sorted(set(done.versions)):
        start = done.versions.index(version)
        end = start + done.versions.count(version)
        assert set(done.versions[start:end]) == {version}
        yield (
            version,
            prompt + list(done.ids[:start]),
            Completion(done.ids[start:end], done.logprobs[start:end], "length"),
        )
