"""The same rollout in TRL's own code and in ours: advantages, loss and gradient agree."""

import random
from collections import defaultdict
from dataclasses import replace
from importlib.util import find_spec
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
import torch
from conftest import preset

from grpo.env.types import Reward
from grpo.models.pretrained import Pretrained
from grpo.objectives.batch import Scores, TokenBatch
from grpo.rollout.collate import collate, scores
from grpo.training.batch import RolloutBatch

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="no trl")

N, G, C, L_MAX = 3, 4, 6, 10
B = N * G


class Case:
    """A random rollout: N groups of G answers of 1 to C tokens, and a policy that has moved since it was sampled."""

    def __init__(self, seed: int, wrong: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(scale: float) -> torch.Tensor:
            return scale * torch.randn(B, C, generator=generator, dtype=torch.float64)

        self.lengths = torch.randint(1, C + 1, (B,), generator=generator)
        self.lengths[0] = C
        self.mask = torch.arange(C) < self.lengths[:, None]
        rollout = -1.5 + normal(0.5)
        old = rollout + normal(0.1)
        self.rollout, self.old, self.reference = rollout * self.mask, old * self.mask, (old + normal(0.4)) * self.mask
        self.logprobs = ((old + normal(0.3)) * self.mask).requires_grad_()
        self.entropy = (normal(1.0).abs() * self.mask).requires_grad_()
        self.rewards = torch.rand(B, generator=generator, dtype=torch.float64)
        self.rewards[torch.rand(B, generator=generator) < wrong] = torch.nan
        self.rewards[4:8] = 0.5  # a group that teaches nothing
        self.parts = torch.stack([self.rewards, torch.rand(B, generator=generator, dtype=torch.float64)], 1)


def peer(case: Case, trainer: str = "", **settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return TRL's advantages [B] and its loss. The case replaces the model and the engine. trainer: one of trl.experimental."""
    from accelerate import Accelerator
    from trl import GRPOTrainer  # takes seconds to import

    trl = object.__new__(resolve_name(f"trl.experimental.{trainer}") if trainer else GRPOTrainer)
    defaults = {
        "loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0,
        "importance_sampling_level": "token", "scale_rewards": "group", "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None, "use_vllm": False, "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
        "vllm_importance_sampling_clip_min": None, "multi_objective_aggregation": "sum_then_normalize",
        "reward_weights": torch.ones(1, dtype=torch.float64), "entropy_coef": 0.0,
        "mask_truncated_completions": False,
    }  # fmt: skip
    args = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    args |= {"delta": None, "use_bias_correction_kl": True, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    args |= {name: settings.pop(name) for name in list(settings) if name in args}
    settings = defaults | settings
    several = settings["multi_objective_aggregation"] == "normalize_then_sum"
    rewards = case.parts if several else case.rewards[:, None]
    ids = [[7] * int(length - 1) + [1] for length in case.lengths]
    fixed = {
        "accelerator": Accelerator(cpu=True),
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "args": SimpleNamespace(
            **args,
            per_device_train_batch_size=B,
            gradient_checkpointing_kwargs=None,
            gradient_accumulation_steps=1,
            steps_per_generation=2,  # so that it computes the old log-probabilities
        ),
        "num_iterations": 1,
        "num_generations": G,
        "max_completion_length": L_MAX,
        "environment_factories": None,
        "environments": None,
        "tools": [],
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "eos_token_ids": [1],
        "pad_to_multiple_of": None,
        "ref_model": SimpleNamespace(who="reference"),
        "reward_funcs": [None] * rewards.shape[1],
        "reward_func_names": ["r"] * rewards.shape[1],
        "current_gradient_accumulation_steps": 1,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": settings["entropy_coef"] > 0,
        "use_adaptive_entropy": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_logs": defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "_calculate_rewards": lambda *_: rewards.clone(),
        "_generate": lambda prompts: (
            [[5]] * B, ids, None, ["x"] * B,
            [case.rollout[i, :length].tolist() for i, length in enumerate(case.lengths)], {}, None, None,
        ),
    }  # fmt: skip

    def logprobs(model, *_, **__):
        if getattr(model, "who", None) == "reference":
            return case.reference, None, None
        return (case.logprobs if torch.is_grad_enabled() else case.old), case.entropy, None

    for name, value in (settings | fixed).items():
        object.__setattr__(trl, name, value)
    object.__setattr__(trl, "_get_per_token_logps_and_entropies", logprobs)
    inputs = trl._generate_and_score_completions([{"prompt": "q"}] * B)
    trl.args.steps_per_generation = 1  # one update with all of it
    if not settings["use_vllm"]:
        inputs.pop("sampling_per_token_logps")
    return inputs["advantages"], trl._compute_loss(trl.model, inputs)


def ours(case: Case, *overrides: str) -> tuple[torch.Tensor, torch.Tensor]:
    algorithm = preset(f"max_tokens={L_MAX}", *overrides)
    tokens = TokenBatch(
        ids=torch.zeros(B, 1 + C, dtype=torch.int64),
        attention_mask=torch.ones(B, 1 + C, dtype=torch.int64),
        mask=case.mask,
        rollout_logprobs=case.rollout,
        sample=torch.arange(B),
        old_logprobs=case.old,
        reference_logprobs=case.reference,
    )
    parts = {"correct": case.parts[:, 0].view(N, G), "format": case.parts[:, 1].view(N, G)}
    lengths = case.lengths.view(N, G).double()
    scored = Scores(case.rewards.view(N, G), parts, lengths, lengths, torch.zeros(N, G, dtype=torch.bool))
    batch = algorithm.credit(scored, tokens)
    batch = algorithm.choose(replace(batch, old_entropy=case.entropy.detach()), torch.Generator())
    batch = replace(batch, weights=algorithm.weights(batch.mask).double())
    return batch.advantages[:, 0], algorithm.loss(case.logprobs, case.entropy, batch, algorithm.entropy.coef)[0]


SEQUENCE = {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}
CASES = {
    "grpo": ([], {}),
    "clip higher": (["algo.surrogate.high=0.28"], {"epsilon_high": 0.28}),
    "delta": (["algo.surrogate.dual=1.3"], {"delta": 1.3}),
    "bnpo": (["algo=bnpo"], {"loss_type": "bnpo"}),
    "defaults": (["algo=trl_default"], {"loss_type": "dapo", "use_vllm": True}),
    "defaults, kl": (["algo=trl_default", "algo/kl=loss_with_ratio"], {"loss_type": "dapo", "use_vllm": True, "beta": 0.04}),
    "dr_grpo": (["algo=dr_grpo"], {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "dapo": (["algo=dapo"], {"loss_type": "dapo", "epsilon_high": 0.28}),
    "lite_ppo": (["algo=lite_ppo"], {"loss_type": "dapo", "scale_rewards": "batch"}),
    "gspo": (["algo=gspo"], SEQUENCE),
    "gspo, wide": (["algo=gspo", "algo.surrogate.low=0.04", "algo.surrogate.high=0.03"],
                   {**SEQUENCE, "epsilon_low": 0.04, "epsilon_high": 0.03}),
    "gspo, wider": (["algo=gspo", "algo.surrogate.low=0.1", "algo.surrogate.high=0.2"],
                    {**SEQUENCE, "epsilon_low": 0.1, "epsilon_high": 0.2}),
    "grpo, narrow": (["algo.surrogate.low=3e-4", "algo.surrogate.high=4e-4"],
                     {"epsilon_low": 3e-4, "epsilon_high": 4e-4}),
    "luspo": (["algo=luspo"], {**SEQUENCE, "loss_type": "luspo"}),
    "cispo": (["algo=cispo"], {"loss_type": "cispo", "epsilon_high": 5.0}),
    "cispo, narrow": (["algo=cispo", "algo.surrogate.bound=1.1"], {"loss_type": "cispo", "epsilon_high": 1.1}),
    "sapo": (["algo=sapo"], {"loss_type": "sapo"}),
    "vespo": (["algo=vespo"], {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_mode": "token_truncate",
                               "vllm_importance_sampling_clip_max": 1e9}),
    "vespo, other powers": (["algo=vespo", "algo.surrogate.k_positive=1.0", "algo.surrogate.lambda_negative=0.5"],
                            {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_mode": "token_truncate",
                             "vllm_importance_sampling_clip_max": 1e9, "vespo_k_pos": 1.0, "vespo_lambda_neg": 0.5}),
    "gmpo": (["algo=gmpo", "algo.surrogate.low=0.1", "algo.surrogate.high=0.1"],
             {"trainer": "gmpo.GMPOTrainer", "epsilon_low": 0.1, "epsilon_high": 0.1}),
    "gmpo with kl": (["algo=gmpo", "algo/kl=loss"],
                     {"trainer": "gmpo.GMPOTrainer", "epsilon_low": 0.4, "epsilon_high": 0.4, "beta": 0.04}),
    "kl": (["algo/kl=loss"], {"beta": 0.04, "use_bias_correction_kl": False}),
    "kl with ratio": (["algo/kl=loss_with_ratio"], {"beta": 0.04}),
    "kl with ratio, dapo": (["algo=dapo", "algo/kl=loss_with_ratio", "algo.kl.coef=0.5"],
                            {"beta": 0.5, "loss_type": "dapo", "epsilon_high": 0.28}),
    "kl with ratio, gspo": (["algo=gspo", "algo/kl=loss_with_ratio"], {**SEQUENCE, "beta": 0.04}),
    "batch std": (["algo/advantage=batch_std"], {"scale_rewards": "batch"}),
    "no std": (["algo/advantage=mean_only"], {"scale_rewards": "none"}),
    "gdpo": (["algo/advantage=gdpo", "algo.advantage.weights={correct: 1.0, format: 0.3}"],
             {"multi_objective_aggregation": "normalize_then_sum",
              "reward_weights": torch.tensor([1.0, 0.3], dtype=torch.float64)}),
    "mis": (["algo/correction=mis"], {"use_vllm": True}),
    "mis, narrow": (["algo/correction=mis", "algo.correction.low=0.9", "algo.correction.high=1.1"],
                    {"use_vllm": True, "vllm_importance_sampling_clip_min": 0.9, "vllm_importance_sampling_clip_max": 1.1}),
    "tis": (["algo/correction=tis", "algo.correction.high=1.05"],
            {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.05}),
    "tis by sequence": (["algo/correction=tis_sequence", "algo.correction.high=1.05"],
                        {"use_vllm": True, "vllm_importance_sampling_mode": "sequence_truncate",
                         "vllm_importance_sampling_clip_max": 1.05}),
    "icepop": (["algo/correction=icepop", "algo.correction.low=0.9", "algo.correction.high=1.1"],
               {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask",
                "vllm_importance_sampling_clip_min": 0.9, "vllm_importance_sampling_clip_max": 1.1}),
    "icepop with kl": (["algo/correction=icepop", "algo/kl=loss_with_ratio"],
                       {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask", "beta": 0.04,
                        "vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 5.0}),
    "decoupled": (["algo=decoupled"], {"loss_type": "dapo", "use_vllm": True, "vllm_importance_sampling_mode": "token_mask",
                                       "vllm_importance_sampling_clip_max": 5.0}),
    "decoupled, narrow": (["algo=decoupled", "algo.correction.high=1.05"],
                          {"loss_type": "dapo", "use_vllm": True, "vllm_importance_sampling_mode": "token_mask",
                           "vllm_importance_sampling_clip_max": 1.05}),
    "off-policy mask": (["algo.off_policy_delta=0.05"],
                        {"off_policy_mask_threshold": 0.05, "use_vllm": True, "vllm_importance_sampling_correction": False}),
    "top entropy": (["algo.top_entropy=0.3"], {"top_entropy_quantile": 0.3}),
    "entropy bonus": (["algo=dapo", "algo.entropy.coef=0.1"],
                      {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.1}),
}  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_trls(name, seed):
    overrides, settings = CASES[name]
    case = Case(seed)
    their_advantages, theirs = peer(case, **settings)
    our_advantages, loss = ours(case, *overrides)
    torch.testing.assert_close(our_advantages, their_advantages, atol=1e-6, rtol=0)
    torch.testing.assert_close(loss, theirs, atol=1e-6, rtol=0)
    inputs = (case.logprobs, case.entropy)
    gradients = [torch.autograd.grad(value, inputs, allow_unused=True, retain_graph=True) for value in (loss, theirs)]
    assert gradients[0][0].abs().max() > 1e-3
    for mine, other in zip(*gradients, strict=True):
        mine, other = (torch.zeros_like(case.entropy) if g is None else g for g in (mine, other))
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=0)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_loss_of_old_samples_is_that_of_trls_asynchronous_trainer(seed):
    """algo.old_policy=rollout: the clipped ratio is policy / policy that sampled, which was any number of versions ago."""
    from accelerate import Accelerator
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    case, trl = Case(seed), object.__new__(AsyncGRPOTrainer)
    advantages, loss = ours(case, "algo.old_policy=rollout", "algo.reduce=token")
    flat = case.mask.flatten().nonzero()[:, 0]
    passed = SimpleNamespace(log_probs=case.logprobs, entropy=case.entropy)
    fixed = {
        "accelerator": Accelerator(cpu=True), "aux_loss_enabled": False, "epsilon_low": 0.2, "epsilon_high": 0.2,
        "current_gradient_accumulation_steps": 1, "_metrics": defaultdict(lambda: defaultdict(list)),
        "_step_forward_tokens": 0, "_step_trained_tokens": 0, "_step_seq_len_weighted": 0, "_step_samples": 0,
        "_step_forward_s": 0,
    }  # fmt: skip
    for name, value in fixed.items():
        object.__setattr__(trl, name, value)
    ones = torch.ones(1, B * C, dtype=torch.int64)
    inputs = dict.fromkeys(("attention_mask", "input_ids", "position_ids", "shift_labels"), ones)
    inputs |= dict.fromkeys(("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k"), ones)
    inputs |= {"token_index": flat, "old_log_probs": case.rollout.flatten()[flat], "segment_id": flat // C}
    inputs |= {"advantages": advantages[:, None].expand(B, C).flatten()[flat], "tree_max_seqlens": torch.ones(1, 2)}
    inputs |= {"global_n_tokens": torch.tensor([len(flat)]), "mean_seq_len": torch.ones(1)}
    inputs["global_n_forward_tokens"] = torch.ones(1)
    inputs["old_log_probs"], inputs["segment_id"] = case.rollout.flatten()[flat], flat // C
    theirs = trl.compute_loss(lambda **_: passed, inputs)
    torch.testing.assert_close(loss, theirs, atol=1e-6, rtol=0)
    mine, other = (torch.autograd.grad(value, case.logprobs, retain_graph=True)[0] for value in (loss, theirs))
    assert mine.abs().max() > 1e-3
    torch.testing.assert_close(mine, other, atol=1e-6, rtol=0)


def test_a_reward_that_nobody_could_give_is_left_out_as_trl_leaves_it():
    case = Case(3, wrong=0.3)
    case.rewards[4:8] = torch.tensor([0.0, 1.0, 1.0, torch.nan])
    assert 0 < case.rewards.isnan().sum() < B
    for scale in ("group", "batch", "none"):
        their_advantages, _ = peer(case, scale_rewards=scale)
        our_advantages, _ = ours(case, f"algo.advantage.scale={scale}")
        torch.testing.assert_close(our_advantages, their_advantages, atol=1e-6, rtol=0)


def test_trl_s_trainer_and_our_module_make_the_same_steps(toy, tmp_path, monkeypatch):
    """algo=trl_default and GRPOConfig's defaults, on the same completions: after each rollout of two updates the weights are
    equal. With SGD, since Adam's steps magnify rounding."""
    from datasets import Dataset
    from helpers.learning import episode, make_module
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    rng, groups, weights = random.Random(0), [], []

    def state(model) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in model.parameters()]

    @torch.no_grad()
    def rollouts(prompts: list[str], trainer) -> dict[str, list]:
        """Make up completions, whose engine is a little off, and far off for one, and note them."""
        weights.append(state(trainer.model))
        asked = [tokenizer(prompt).input_ids for prompt in prompts]
        said = [[rng.randrange(30, 90) for _ in range(rng.randint(2, 6))] + [tokenizer.eos_token_id] for _ in prompts]
        logprobs = []
        for i, (question, ids) in enumerate(zip(asked, said, strict=True)):
            logits = trainer.model(torch.tensor([question + ids])).logits[0, len(question) - 1 : -1]
            true = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
            logprobs.append([one - (0.9 if i == 3 else rng.gauss(0, 0.05)) for one in true])
        made = [episode(tuple(q), tuple(a), tuple(p)) for q, a, p in zip(asked, said, logprobs, strict=True)]
        groups.append(
            [
                [replace(s, reward=Reward(reward_of(s.turns[0].completion.ids), True)) for s in made[i : i + 4]]
                for i in (0, 4)
            ]
        )
        return {"prompt_ids": asked, "completion_ids": said, "logprobs": logprobs}

    def reward_of(ids) -> float:
        return float(sum(ids) % 7)

    def reward(completion_ids, **columns):
        return list(map(reward_of, completion_ids))

    tokenizer = AutoTokenizer.from_pretrained(toy)
    settings = GRPOConfig(
        str(tmp_path), per_device_train_batch_size=8, num_generations=4, num_iterations=2, max_completion_length=8,
        learning_rate=0.1, max_steps=8, optim="sgd", use_cpu=True, bf16=False, gradient_checkpointing=False,
        report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = Dataset.from_dict({"prompt": [f"How many coins are {i} coins?" for i in range(8)]})
    model = Pretrained(str(toy)).model()
    trainer = GRPOTrainer(model, reward, settings, rows, processing_class=tokenizer, rollout_func=rollouts)
    trainer.use_vllm, trainer._last_loaded_step = True, -1  # the samples of vLLM are corrected
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    trainer.train()
    weights.append(state(trainer.model))

    policy = Pretrained(str(toy)).model()
    module = make_module(policy, lr=0.1, max_grad_norm=1.0, num_epochs=2)
    module.algorithm = preset("algo=trl_default", "algo.num_epochs=2", "max_tokens=8")
    for number, of_rollout in enumerate(groups):
        batch = RolloutBatch(number, tokens=collate(of_rollout), scores=scores(of_rollout))
        metrics = module.training_step(batch, 0)
        assert metrics["loss/correction"] < 0.95  # of eight samples one is left out
        pairs = [*zip(state(policy), weights[number], weights[number + 1], strict=True)]
        assert max(float((now - theirs).abs().max()) for now, _, theirs in pairs) < 1e-6
        assert max(float((theirs - before).abs().max()) for _, before, theirs in pairs) > 1e-4  # it moved
    assert len(groups) == 4


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_divergences_are_trls(beta, temperature):
    """A capped teacher and a scaled student, with gradients: TRL's stable trainer, in chunks, and its GKD."""
    from helpers.models import model_of
    from trl.experimental.gkd import GKDTrainer
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    from grpo.extras.teachers.divergence import Distributions, divergences
    from grpo.extras.teachers.teaching import Teaching

    generator = torch.Generator().manual_seed(0)
    models = model_of("granite"), model_of("gemma3")  # logits / 8; a cap of 2
    states = [scale * torch.randn(2, 7, 128, generator=generator) for scale in (8, 1)]
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    student = states[0].requires_grad_()
    heads = [model.get_output_embeddings().weight for model in models]

    name = {0.0: "forward", 1.0: "reverse"}.get(beta, "jsd")
    for each in {name, "jsd"}:
        teaching = Teaching(1.0, each, jsd_beta=beta)
        pair = Distributions(models[0], student[mask]), Distributions(models[1], states[1][mask])
        mine = divergences(*pair, torch.arange(11), temperature, teaching.of_words).mean()
        theirs, _, _ = _chunked_divergence_loss(
            student, states[1], *heads, mask, beta, student_logit_scale=1 / 8, teacher_final_logit_softcapping=2.0,
            temperature=temperature,
        )  # fmt: skip
        logits = student @ heads[0].T / 8, 2 * (states[1] @ heads[1].T / 2).tanh()
        labels = torch.where(mask, 0, -100)
        gkd = GKDTrainer.generalized_jsd_loss(*logits, labels=labels, beta=beta, temperature=temperature)
        gradients = [torch.autograd.grad(loss, [student, heads[0]]) for loss in (mine, theirs, gkd)]
        assert mine > 0.01 and gradients[0][0].abs().max() > 1e-4
        for loss, of_peer in zip((theirs, gkd), gradients[1:], strict=True):
            torch.testing.assert_close(mine, loss, atol=1e-6, rtol=0)
            for ours_, peer_ in zip(gradients[0], of_peer, strict=True):
                torch.testing.assert_close(ours_, peer_, atol=1e-6, rtol=0)
                assert float((ours_ - peer_).abs().max() / peer_.abs().max()) < 1e-4


def test_iw_opd_is_trls():
    from trl.experimental.iw_opd import IWOPDTrainer

    from grpo.extras.teachers.distillation import iw_opd

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 7, generator=generator, requires_grad=True)
    ids, mask = torch.randint(7, (3, 5), generator=generator), torch.arange(5) < torch.tensor([[5], [3], [1]])
    teacher, rollout = -torch.rand(2, 3, 5, generator=generator)
    trl = object.__new__(IWOPDTrainer)
    given = {"temperature": 0.8, "iw_opd_epsilon": 1e-8, "iw_opd_gamma": 0.5, "model": SimpleNamespace(training=True)}
    for name, value in (given | {"_metrics": {"train": defaultdict(list)}}).items():
        object.__setattr__(trl, name, value)
    theirs = trl._compute_iw_opd_loss(logits, ids, torch.where(mask, ids, -100), teacher, rollout)
    own = (logits / 0.8).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    mine = (iw_opd(own, teacher, rollout, mask) * mask).sum() / mask.sum()
    one, two = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (mine, theirs))
    assert one.abs().max() > 1e-2
    torch.testing.assert_close(one, two, atol=1e-6, rtol=0)
