"""Counts in sentences, and a line of a run that has one of everything."""

from grpo.system.errors import plural


def test_one_is_no_plural():
    from grpo.extras.preflight.plan import RunPlan

    assert [plural(n, "job") for n in (0, 1, 2, 1000)] == ["0 jobs", "1 job", "2 jobs", "1,000 jobs"]
    assert [plural(n, "batch", "batches") for n in (1, 2)] == ["1 batch", "2 batches"]
    (line,) = RunPlan(1, 1, 1, 1, 2048, 1, 1.0, 1, 1).lines()
    assert line == (
        "plan: 1 rollout x 1 sample x at most 1 token, 1 update in microbatches of 2,048 tokens, 1.0 passes over 1 row, "
        "1 evaluation of 1 problem"
    )
