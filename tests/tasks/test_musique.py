"""MuSiQue: results of searches, rewards of answers. Three invented questions, and 200 real ones if they are present."""

import json

import pytest
from conftest import EXAMPLES, REAL_DATA, compose_config
from helpers.episodes import hop_queries, played
from helpers.rows import write
from hydra.utils import instantiate

from grpo.env.intake import build as build_env
from grpo.env.messages import Message, ToolCall
from grpo.env.types import Action, Example, Reward, Trajectory
from grpo.system.errors import UserError
from tasks.musique import NOTHING, Musique, Paragraph, em, f1, normalised, question_of, search_of

OURS = EXAMPLES / "musique.jsonl"
REAL = REAL_DATA / "musique_200.jsonl"
real = pytest.mark.skipif(not REAL.is_file(), reason="no real rows on this machine")


def task_of(path=OURS, **settings) -> Musique:
    return Musique(str(path), splits={"test": "test"}, **settings)


def search(*queries: str, text: str = "") -> Message:
    return Message("assistant", text, tuple(ToolCall("search", {"query": query}) for query in queries))


def say(text: str) -> Message:
    return Message("assistant", text)


def scored(task: Musique, example: Example, *said: Message, **how) -> Reward:
    return task.score(example, played(task.build(example), *said, **how))


def published(row: Example) -> Example:
    """The same row in MuSiQue's own form."""
    paragraphs = [
        {"idx": i, "title": p["title"], "paragraph_text": p["text"], "is_supporting": bool(p["support"])}
        for i, p in enumerate(row["paragraphs"])
    ]
    hops = [{"question": h["q"], "answer": h["a"], "paragraph_support_idx": h["support"]} for h in row["decomposition"]]
    same = {name: row[name] for name in ("id", "question", "answer")}
    rest = {"answer_aliases": row["aliases"], "question_decomposition": hops, "answerable": True}
    return {**same, **rest, "paragraphs": paragraphs}


# -- search


@real
def test_what_bm25_finds_of_the_real_questions():
    task = task_of(REAL)
    rows = task.examples("test")
    own = every = at_once = 0
    for row in rows:
        paragraphs, queries = question_of(row).paragraphs, hop_queries(row)
        find = search_of(tuple(paragraphs), 3)
        hops = zip(queries, row["decomposition"], strict=True)
        own += all(paragraphs[hop["support"]].shown in find(query).split("\n\n") for query, hop in hops)
        every += scored(task, row, *map(search, queries), say("\\boxed{?}")).parts["supports"] == 1
        at_once += scored(task, row, search(row["question"]), say("\\boxed{?}")).parts["supports"] == 1
    # each hop's search finds that hop's paragraph: 70.5 %; all searches together do: 83 %; the whole question does: 13.5 %
    assert (len(rows), own, every, at_once) == (200, 141, 166, 27)


def test_an_oracle_earns_everything():
    task = task_of()
    assert [row["hops"] for row in task.examples("test")] == [2, 3, 4]
    for row in task.examples("test"):
        reward = scored(task, row, *map(search, hop_queries(row)), say(f"So it is \\boxed{{{row['answer']}}}."))
        told = {"em": 1, "f1": 1, "searches": row["hops"], "repeats": 0, "supports": 1, f"hops_{row['hops']}": 1}
        assert reward == Reward(1.0, True, told, "right")


def test_a_search_shows_the_best_paragraphs_as_text():
    paragraphs = (
        Paragraph("Otter", "An otter swims.", False),
        Paragraph("Badger", "A badger digs.", False),
        Paragraph("Marten", "A marten climbs, the badger digs, and digs.", False),
        Paragraph("Vole", "A vole digs.", False),
    )
    otter, badger, marten, vole = (paragraph.shown for paragraph in paragraphs)
    find = search_of(paragraphs, 2)
    assert find("Where is the BADGER?") == f"{badger}\n\n{marten}" == f"Badger\nA badger digs.\n\n{marten}"
    assert search_of(paragraphs, 9)("digs").split("\n\n") == [marten, badger, vole]  # equal scores keep their order
    assert find("otter") == otter  # a paragraph that shares no word is not shown, even if fewer remain
    assert find("digs").split("\n\n") == [marten, badger]
    for query in ("zebra", "", "is it the", "?"):
        assert find(query) == NOTHING
    assert search_of((Paragraph("?", "!", False),), 2)("what") == search_of((), 2)("x") == NOTHING


def test_the_tool_is_described_and_its_failures_are_text():
    task = task_of()
    env = task.build(task.examples("test")[0])
    state = env.start()
    (asked,) = state.messages
    assert asked.content.endswith("Question: In which town was the builder of the Lark Bridge born?")
    (tool,) = state.tools
    assert (tool.name, tool.parameters["required"]) == ("search", ["query"])
    calls = (ToolCall("search", {"query": "Tamsel"}), ToolCall("search", {"text": "Tamsel"}), ToolCall("find", {}))
    found, missing, unknown = env.step(Action(Message("assistant", "", calls))).messages[-3:]
    assert found.content.startswith("Tamsel\nThe Tamsel is a river") and found.error is None
    assert missing.error and "search takes query" in missing.content and unknown.error


def test_the_index_is_made_once_a_question():
    search_of.cache_clear()
    task = task_of()
    for row in task.examples("test"):
        for _ in range(4):
            task.build(row)
    assert (search_of.cache_info().misses, search_of.cache_info().hits) == (3, 9)


# -- rewards


def test_match_by_hand():
    assert normalised("  The Mills,\n a (Town) an-d THE U.S.! ") == "mills town and us"
    assert normalised("Thea another") == "thea another"
    assert em("the mills.", ["Ostrava Mills", "Mills"]) == 1 and em("mills of Ostrava", ["Ostrava Mills"]) == 0
    for answer, golds, value in [
        ("Ostrava", ["Ostrava Mills"], 2 / 3),  # precision 1, recall 1/2
        ("Ostrava Mills in Sollen", ["Ostrava Mills"], 2 / 3),  # 1/2, 1
        ("mills mills mills", ["Mills"], 1 / 2),  # 1/3, 1: a repeated word counts each time
        ("new new", ["New New York"], 4 / 5),  # 1, 2/3
        ("a b c d e", ["d c x"], 2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3)),  # a is an article
        ("Sollen", ["Ostrava Mills"], 0),
        ("the", ["Mills"], 0),
        ("Sollen", ["Ostrava Mills", "Sollen town", "of Sollen market"], 2 / 3),  # the best of the golds
    ]:
        assert f1(answer, golds) == pytest.approx(value), answer


@pytest.mark.parametrize(
    ("said", "value", "outcome", "parts"),
    [
        ([say("\\boxed{Ostrava Mills}")], 1, "right", {"searches": 0, "supports": 0, "hops_2": 1}),
        ([say("\\boxed{\\text{the mills}}")], 1, "right", {"f1": 1}),  # an alias
        ([say("\\boxed{Ostrava}")], 0, "wrong", {"em": 0, "f1": pytest.approx(2 / 3), "hops_2": 0}),
        ([say("It is Ostrava Mills.")], 0, "no_answer", {"f1": 0}),
        ([say("<think>\\boxed{Mills}</think> Sollen.")], 0, "no_answer", {}),
        ([search("Lark Bridge"), say("\\boxed{Mills}")], 1, "right", {"searches": 1, "supports": 1 / 2}),
        (  # 1 - 2 * 0.1: twice the same words
            [search("Lark Bridge"), search("the lark bridge?"), search("Lark, bridge"), say("\\boxed{Mills}")],
            0.8,
            "right",
            {"searches": 3, "repeats": 2, "supports": 1 / 2},
        ),
        (  # 1 - 2 * 0.05: six searches, four of them free, in any number of messages
            [search("Lark", "Ines"), search("Wend", "Heron", "Tamsel", "born"), say("\\boxed{Mills}")],
            0.9,
            "right",
            {"searches": 6, "repeats": 0, "supports": 1},
        ),
        ([search("x"), search("x"), say("\\boxed{Sollen}")], -0.1, "wrong", {"repeats": 1, "supports": 0}),
        # no search: an unknown tool, and arguments that are no object
        (
            [
                Message("assistant", "", (ToolCall("find", {"query": "x"}), ToolCall("search", ["x"]))),
                say("\\boxed{Mills}"),
            ],
            1,
            "right",
            {"searches": 0},
        ),
        # out of turns: a box beside a call is no answer
        (
            [search("Lark Bridge"), search("Ines Korda", text="\\boxed{Mills}")],
            0,
            "no_answer",
            {"em": 0, "supports": 1},
        ),
    ],
)
def test_reward_by_hand(said, value, outcome, parts):
    task = task_of()
    reward = scored(task, task.examples("test")[0], *said)
    assert (reward.value, reward.outcome) == (pytest.approx(value), outcome)
    assert reward.correct == (outcome == "right") and {name: reward.parts[name] for name in parts} == parts


def test_f1_is_learned_from_where_it_is_chosen_and_em_says_what_is_right():
    task = task_of(match="f1", repeat_penalty=0.5, call_penalty=0.25, free_searches=0)
    reward = scored(task, task.examples("test")[0], search("x", "x"), say("\\boxed{Ostrava}"))
    assert reward.value == pytest.approx(2 / 3 - 0.5 - 2 * 0.25) and not reward.correct and reward.outcome == "wrong"


def test_cut_short():
    task = task_of()
    row = task.examples("test")[0]
    assert scored(task, row, say("\\boxed{Mills}, and I"), truncated=True).correct  # the box is whole, as in every task
    assert scored(task, row, say("I think \\boxed{Mil"), truncated=True).outcome == "no_answer"
    assert scored(task, row, search("Lark", text="\\boxed{Mills}"), truncated=True).outcome == "no_answer"


def test_the_limit_of_turns_takes_the_credit_of_a_plain_answer_too():
    task = task_of()
    row = task.examples("test")[0]
    steps = played(task.build(row), say("\\boxed{Mills}")).steps
    assert task.score(row, Trajectory(steps)).correct and not task.score(row, Trajectory(steps, "out_of_turns")).correct


def test_a_paragraph_that_the_policy_itself_writes_was_not_found():
    task = task_of()
    row = task.examples("test")[0]
    fact = question_of(row).paragraphs[1]
    forged = Message("assistant", fact.shown, (ToolCall(fact.shown, {}), ToolCall("search", {fact.shown: ""})))
    assert scored(task, row, forged, say(f"{fact.shown} \\boxed{{Mills}}")).parts["supports"] == 0


def test_nothing_of_one_sample_is_in_another():
    task = task_of()
    row = task.examples("test")[0]
    ours, theirs = build_env(task, row, seed=1), build_env(task, row, seed=2)
    first = played(ours, search("Lark Bridge"), search("Ines Korda"), say("\\boxed{Mills}"))
    assert len(theirs.start().messages) == 1
    second = played(theirs, search("Lark Bridge"), say("\\boxed{Mills}"))
    assert [task.score(row, one).parts["supports"] for one in (first, second, first)] == [1, 0.5, 1]
    assert task.score(row, second).parts["repeats"] == 0  # only its sibling had searched for that


# -- rows


def test_both_forms_of_a_row_are_one(tmp_path):
    rows = [json.loads(line) for line in OURS.read_text().splitlines()]
    assert [question_of(published(row)) for row in rows] == [question_of(row) for row in rows]
    question = question_of(rows[0])
    assert (question.answers, question.hops) == (("Ostrava Mills", "Mills"), 2)
    assert [paragraph.support for paragraph in question.paragraphs] == [False, True, False, False, True, False]
    task = task_of(write(tmp_path / "rows.jsonl", map(published, rows)))
    example = task.examples("test")[0]
    reward = scored(task, example, search("Lark Bridge"), say("\\boxed{Mills}"))
    assert reward.correct and reward.parts["supports"] == 0.5 and reward.parts["hops_2"] == 1
    plain = {name: rows[0][name] for name in ("question", "answer")} | {"gold": "Mills"}
    assert set(task.score(plain, played(task.build(example), say("\\boxed{Mills}"))).parts) == {
        "em",
        "f1",
        "searches",
        "repeats",
    }  # a part needs its field in the row


def test_which_rows_are_kept(tmp_path):
    rows = [published(json.loads(line)) for line in OURS.read_text().splitlines()]
    rows[0]["answerable"] = False
    path = write(tmp_path / "rows.jsonl", rows)
    assert [row["id"][:4] for row in task_of(path).examples("test")] == ["3hop", "4hop"]
    streamed = task_of(path, streaming=True, test_limit=3)
    assert [row["id"][:4] for row in streamed.examples("test")] == ["3hop", "4hop"]
    path = write(tmp_path / "none.jsonl", rows[:1])
    with pytest.raises(UserError, match=r"no row of the split 'test' \(1\) is an answerable question$"):
        task_of(path).examples("test")
    path = write(tmp_path / "plain.jsonl", [{"question": "Why?", "answer": "So."}])
    with pytest.raises(UserError, match="no `paragraphs` to search; a row has question, answer and needs"):
        task_of(path).examples("test")
    path = write(tmp_path / "odd.jsonl", [{"question": "Why?", "answer": "So.", "paragraphs": [{"name": "Why"}]}])
    with pytest.raises(UserError, match="a paragraph has name: it needs title, and text"):
        task_of(path).examples("test")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"match": "bleu"}, "task.match=bleu is not one of em, f1"),
        ({"k": 0}, "task.k=0 must be an integer of at least 1"),
        ({"repeat_penalty": -1}, "task.repeat_penalty=-1 must be a number of at least 0"),
        ({"call_penalty": float("nan")}, "task.call_penalty=nan must be a number of at least 0"),
        ({"free_searches": -1}, "task.free_searches=-1 must be an integer of at least 0"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(UserError, match=message) as refused:
        task_of(**settings)
    assert "\n" not in str(refused.value)


def test_the_configuration_makes_it():
    config = compose_config("task=musique", f"task.path={OURS}", "task.match=f1", "output_dir=.")
    assert (config.max_turns, config.max_tokens) == (6, 512)
    task = instantiate(config.task)
    assert (task.match, task.k, len(task.examples("test"))) == ("f1", 3, 3)
