"""A real vLLM server as a teacher: it scores tokens as a plain forward pass of its model does."""

import pytest
import torch
from helpers.learning import GROUPS
from helpers.models import CONTEXT
from transformers import AutoModelForCausalLM

from grpo.extras.teachers.kinds import Passes
from grpo.extras.teachers.server import Served
from grpo.extras.teachers.teaching import Teaching, coarse
from grpo.extras.vllm_server.http import START
from grpo.models.pretrained import Pretrained
from grpo.rollout.collate import collate
from grpo.system.errors import UserError

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")


@pytest.fixture
def servers(launched):
    """The servers of an engine, with the weights of their folder."""
    launched.load_weights(AutoModelForCausalLM.from_pretrained(launched._launched.path), (launched.version or 0) + 1)
    return launched._launched


def test_a_vllm_server_scores_as_its_model(servers):
    folder, batch = servers.path, collate(GROUPS)
    model = AutoModelForCausalLM.from_pretrained(folder)
    teacher = Served(servers.urls, Pretrained(folder))
    teacher.check(Teaching(1.0, "reverse", top_k=5, top_of="teacher"), 1.0)
    teacher.attach(model)
    assert teacher.limit == CONTEXT
    logprobs, found = teacher.logprobs(batch, Passes(1.0)), teacher.distributions(batch, Passes(1.0, top_k=5))
    hot = Served(servers.urls, Pretrained(folder))
    hot.check(Teaching(1.0), 0.7)
    with pytest.raises(UserError, match=r"temperature=0\.7, but http:.* scores at 1: set the temperature to 1"):
        hot.attach(model)
    for r, (prompt, ids) in enumerate(batch.sequences()):
        with torch.no_grad():
            exact = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        own = exact.gather(1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(logprobs[r, : len(ids)], own, atol=1e-5, rtol=0)
        first = int(batch.mask[:r].sum())
        theirs = found.logprobs(slice(first, first + len(ids)), 1.0, exact.shape[1])
        kept = exact.topk(5).indices
        torch.testing.assert_close(coarse(theirs, kept, True), coarse(exact, kept, True), atol=1e-4, rtol=0)


def test_a_vllm_server_that_is_killed_and_started_again_costs_no_row(servers):
    folder, batch = servers.path, collate(GROUPS)
    model = AutoModelForCausalLM.from_pretrained(folder)
    teacher = Served(servers.urls, Pretrained(folder), wait=START)
    teacher.check(Teaching(1.0), 1.0)
    teacher.attach(model)
    before = teacher.logprobs(batch, Passes(1.0))
    servers.close()
    servers.start_all()
    torch.testing.assert_close(teacher.logprobs(batch, Passes(1.0)), before, atol=1e-5, rtol=0)
