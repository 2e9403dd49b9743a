"""Teachers behind HTTP: servers that fail and come back, and whatever a server may answer. The servers have no vLLM."""

import asyncio
import logging
import math
from itertools import count

import pytest
import torch
from conftest import compose_config
from helpers.foreign_server import SCORES, Foreign, Scorer, answer
from helpers.learning import GROUPS
from helpers.runs import rows

from grpo.engines.protocol import Sampling
from grpo.extras.teachers.kinds import Passes
from grpo.extras.teachers.server import Served
from grpo.extras.teachers.teaching import Teaching
from grpo.extras.vllm_server import pool
from grpo.extras.vllm_server.engine import VLLMServerEngine
from grpo.models.pretrained import Pretrained
from grpo.rollout.collate import collate
from grpo.system.errors import UserError
from grpo.system.output import secrets
from train import train

NUMBERS = Passes(1.0)


def each(rows, change):
    """Return rows with another entry of each token of its own."""
    return [row and {key: change for key in row} for row in rows]


@pytest.fixture
def student(toy) -> Pretrained:
    return Pretrained(str(toy))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(pool, "PAUSE", 0.02)


def teacher(student, toy_model, *servers, teaching=None, **settings) -> Served:
    served = Served([server.url for server in servers], student, **{"wait": 5.0} | settings)
    served.check(teaching or Teaching(1.0), 1.0)
    served.attach(toy_model)
    return served


def right(batch) -> torch.Tensor:
    """Return the log-probabilities of a batch by hand."""
    return torch.where(batch.mask, -1 - batch.ids[:, batch.prompt_width :] / 1000, 0.0)


LIKELY = Teaching(1.0, "reverse", top_k=4, top_of="teacher")
ODD = {
    "null": (lambda rows: each(rows, {"logprob": None}), "with null as a log-probability of token"),
    "NaN": (lambda rows: each(rows, {"logprob": math.nan}), "with NaN as a log-probability of token"),
    "-inf": (lambda rows: each(rows, {"logprob": -math.inf}), "with -Infinity as a log-probability of token"),
    "no chance": (lambda rows: each(rows, {"logprob": -9999.0}), "with -9999.0, the probability 0, for token"),
    "above 0": (lambda rows: each(rows, {"logprob": 0.5}), "with 0.5 as a log-probability of token"),
    "text": (lambda rows: each(rows, {"logprob": "-1.0"}), 'with "-1.0" as a log-probability of token'),
    "no number": (lambda rows: each(rows, {}), "without 'logprob'"),
    "no entry": (lambda rows: each(rows, None), "cannot be read"),
    "no row": (lambda rows: [None] * len(rows), "cannot be read"),
    "another token": (lambda rows: [row and {"999": {"logprob": -1.0}} for row in rows], r"without \d+"),
    "no id": (lambda rows: [row and {"x": {"logprob": -1.0}} for row in rows], "cannot be read, invalid literal"),
    "short": (lambda rows: rows[:-2], r"prompt_logprobs of (\d+) tokens, and (\d+) were sent"),
    "long": (lambda rows: [None, *rows], r"prompt_logprobs of (\d+) tokens, and (\d+) were sent"),
    "no rows": (lambda rows: None, "cannot be read"),
}


@pytest.mark.parametrize("case", ODD)
def test_numbers_that_are_none_are_one_line_at_the_start_and_later(student, toy_model, case):
    change, line = ODD[case]

    def odd(body):
        return 200, answer(body["prompt"], 0, change)

    with Scorer() as server:
        served = teacher(student, toy_model, server)
        # the look at a server that was away has more tokens, and finds nothing
        server.routes[SCORES] = lambda body: odd(body) if len(body["prompt"]) < 100 else server.score(body)
        refused(
            rf"a request to a teacher failed 5 times, .*{server.url}{SCORES} answers .*{line}",
            later,
            served,
        )
        server.routes[SCORES] = odd
        refused(
            rf"the teacher at {server.url}{SCORES} answers .*{line}",
            teacher,
            student,
            toy_model,
            server,
        )


def refused(line: str, function, *arguments, **named) -> None:
    with pytest.raises(UserError, match=line) as told:
        function(*arguments, **named)
    assert "\n" not in str(told.value) and len(str(told.value)) < 600


def later(served: Served) -> None:
    served.logprobs(collate(GROUPS), NUMBERS)


@pytest.mark.parametrize(
    ("route", "content", "line"),
    [
        ("/v1/models", b"<html>gateway</html>", "answers what cannot be read: <html>gateway</html>"),
        ("/v1/models", b"[" * 100_000, r"answers what cannot be read: \[\[\[\["),
        ("/v1/models", {"data": []}, r'answers what cannot be read: \{"data": \[\]\}'),
        ("/v1/models", {"data": [{"id": "t"}]}, "without 'max_model_len'"),
        ("/v1/models", {"data": [{"id": "t", "max_model_len": "512"}]}, 'with "512" in place of a whole number'),
        ("/v1/models", None, "answers what cannot be read: null"),
        (SCORES, b"<html>gateway</html>", "answers what cannot be read: <html>gateway</html>"),
        (SCORES, {"choices": [{"text": ""}]}, "without 'prompt_logprobs'"),
        (SCORES, {"choices": []}, "answers what cannot be read: "),
        (SCORES, ["x"], "answers what cannot be read: "),
    ],
)
def test_an_answer_of_another_form_is_one_line(student, toy_model, route, content, line):
    with Scorer(**{route: (200, content)}) as server:
        refused(f"the teacher at {server.url}{route} .*{line}.*: is it vLLM", teacher, student, toy_model, server)


def test_fewer_entries_than_the_divergence_compares_are_refused(student, toy_model):
    """A proxy cuts them, or vLLM's --max-logprobs: what is left would count as all that the teacher finds likely."""
    with Scorer() as server:
        served = teacher(student, toy_model, server, teaching=LIKELY)
        found = served.distributions(collate(GROUPS), Passes(1.0, top_k=4))
        assert found.ids.shape[1] == 5 and {*range(4)} <= {*found.ids[0].tolist()}
        line = r"with [23] of the 4 likeliest entries that algo\.teacher\.top_k asks for"
        server.routes[SCORES] = lambda body: (
            server.score(body) if len(body["prompt"]) > 99 else (200, answer(body["prompt"], 2))
        )
        refused(line, served.distributions, collate(GROUPS), Passes(1.0, top_k=4))
        server.routes[SCORES] = lambda body: (200, answer(body["prompt"], 2))
        refused(rf"the teacher at {server.url}.*{line}", teacher, student, toy_model, server, teaching=LIKELY)


def test_a_failure_of_a_moment_costs_no_row(student, toy_model, caplog):
    """HTTP 500, HTML of a gateway, a connection that ends: each row is asked for again."""
    batch, failures, calls = (
        collate(GROUPS),
        [(500, {"error": {"message": "busy"}}), (200, b"<html>"), (None, None)],
        count(),
    )

    def sometimes(body):
        i = next(calls)
        return failures[i // 2] if i % 2 and i < 6 else server.score(body)

    with Scorer() as server:
        served = teacher(student, toy_model, server, concurrency=1)
        server.routes[SCORES] = sometimes
        with caplog.at_level(logging.WARNING):
            found = served.logprobs(batch, NUMBERS)
    torch.testing.assert_close(found, right(batch))
    assert next(calls) > len(batch) and "a teacher is left out until it is back" in caplog.text


def test_rows_go_to_the_server_that_is_there_and_back_to_one_that_returns(student, toy_model):
    batch = collate(GROUPS)
    with Scorer() as whole:
        with Scorer() as away:
            served = teacher(student, toy_model, whole, away, concurrency=1)
            served.logprobs(batch, NUMBERS)
            away.routes[SCORES] = (500, None)
            torch.testing.assert_close(served.logprobs(batch, NUMBERS), right(batch))
        whole.asked = 0
        torch.testing.assert_close(served.logprobs(batch, NUMBERS), right(batch))
        assert whole.asked == len(batch) and [server.ready for server in served.pool.servers] == [True, False]
        again = Scorer()
        again.port = away.port
        whole.routes[SCORES] = (503, None)
        with again:
            torch.testing.assert_close(served.logprobs(batch, NUMBERS), right(batch))
        assert again.asked == len(batch) + 1  # and the look at its tokens


def test_a_server_that_stays_away_is_named_after_the_wait(student, toy_model):
    with Scorer() as server:
        served = teacher(student, toy_model, server, wait=0.1)
    refused(rf"no teacher for teacher\.wait=0\.1 s \({server.url}/v1/models: ConnectError", later, served)


def test_another_model_that_took_its_place_is_not_asked(student, toy_model):
    with Scorer() as server:
        served = teacher(student, toy_model, server, wait=0.1)
    refused("no teacher", later, served)
    other = Scorer(
        **{
            SCORES: lambda body: (
                200,
                answer(body["prompt"], 0, lambda rows: each(rows, {"logprob": -1.0, "decoded_token": "zz"})),
            )
        }
    )
    other.port = server.port
    with other:
        refused("no teacher for .*has another tokenizer than the policy", later, served)


def test_a_key_comes_from_the_environment_and_goes_nowhere_else(student, toy, toy_model, tmp_path, monkeypatch):
    key = "a-key-of-27-letters-in-all"
    with Scorer() as server, Foreign() as engines:
        server.key = engines.key = key
        monkeypatch.delenv("VLLM_API_KEY", raising=False)
        refused(r"answers 401: it needs a key in the environment's \$VLLM_API_KEY", teacher, student, toy_model, server)
        refused(r"401: it needs a key in the environment's \$VLLM_API_KEY", VLLMServerEngine, str(toy), [engines.url])
        monkeypatch.setenv("OUR_SERVERS", key + "\n")
        served = teacher(student, toy_model, server, key_from="OUR_SERVERS")
        torch.testing.assert_close(served.logprobs(collate(GROUPS), NUMBERS), right(collate(GROUPS)))
        engine = VLLMServerEngine(str(toy), [engines.url], folder=str(tmp_path), key_from="OUR_SERVERS")
        engine.load_weights(toy_model, 0)
        assert secrets.hidden(f"a server repeats {key}") == f"a server repeats {secrets.MASK}"
        server.key = "another"
        refused(r"answers 401: its key is not that of the environment's \$OUR_SERVERS", later, served)
    monkeypatch.setenv("OUR_SERVERS", "schlüssel")
    refused(r"\$OUR_SERVERS is no key: it has a character that a header cannot have", later, served)


def test_servers_are_asked_where_an_event_loop_runs(student, toy, toy_model, tmp_path):
    """As in a notebook."""

    async def cell() -> None:
        with Scorer() as server, Foreign() as engines:
            served = teacher(student, toy_model, server)
            torch.testing.assert_close(served.logprobs(collate(GROUPS), NUMBERS), right(collate(GROUPS)))
            engine = VLLMServerEngine(str(toy), [engines.url], folder=str(tmp_path))
            engine.load_weights(toy_model, 2)
            assert [one.versions for one in engine.sample([[5]] * 3, Sampling(1), range(3))] == [(2,)] * 3

    asyncio.run(cell())


@pytest.mark.parametrize("urls", [["localhost:8000"], [], ["http://"], ["http://h:x"]])
def test_addresses_are_checked_first(student, urls):
    refused(r"teacher\.urls=\[.*\] must name servers, as \[http://HOST:PORT\]", Served, urls, student)


@pytest.mark.slow
def test_a_teacher_that_is_away_for_a_while_costs_no_rollout(toy, tmp_path):
    """It answers nothing but 500 from the third rollout on, until it was looked at three times."""
    found = []
    for away in (False, True):
        with Scorer() as server:
            models, looks = server.routes["/v1/models"], count()

            def score(body, server=server, away=away, models=models, looks=looks):
                if away and server.asked == 20:
                    server.routes[SCORES] = (500, None)
                    server.routes["/v1/models"] = lambda _: models if next(looks) == 3 and back(server) else (500, None)
                    return 500, None
                return server.score(body)

            def back(server, score=score, models=models):
                server.routes |= {SCORES: score, "/v1/models": models}
                server.asked += 1
                return True

            server.routes[SCORES] = score
            words = f"""algo=opd teacher=server teacher.urls=[{server.url}] model=path model.path={toy} debug=smoke callbacks=none
                rollout.prompts=3 rollout.group_size=2 rollout.num_rollouts=5 max_tokens=8 forecast=false preflight=off
                trainer=cpu logger=csv output_dir={tmp_path}/{away}"""
            train(compose_config(*words.split()))
            found.append(rows(tmp_path / str(away)))
            assert server.asked > 20
    for one, other in zip(*found, strict=True):
        for name in ("teacher/divergence", "loss/grad_norm", "rollout/reward"):
            assert one.get(name) == pytest.approx(other.get(name), abs=1e-6)
