"""The demo's base model: built and trained on a CPU in about four minutes, saved as a Hugging Face folder in bfloat16.

The models of the default recipes ship with the project in demo_models/, so that every machine starts from the same numbers.
After a change of a recipe, `python -m grpo.extras.demo.demo_model` makes them again.

A Llama of 1.3 M parameters first learns careful worked answers (stage 1), then hasty ones (stage 2). After that it answers too
early and is mostly wrong, but it still has the skill, and a reward can bring it out. The worked answers come from a callable, as
conversations; the model learns the assistant's messages. Its chat templates are demo_chat.jinja and demo_chat_tools.jinja.
"""

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from hydra.utils import instantiate
from platformdirs import user_cache_path
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from grpo.config.composing import composed
from grpo.env.messages import Message
from grpo.env.types import State
from grpo.system.errors import UserError
from grpo.system.files import write_json
from grpo.system.output.console import busy
from grpo.system.ranges import Positive, Share, Whole

RECIPE = 3  # increase it when a change of this file changes the model
SHIPPED = Path(__file__).with_name("demo_models")
BATCH = 32
WARM_UP = 20  # steps
LOCKED = 3600.0  # seconds for another process to make the same model, which takes minutes
SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CALL = ("<tool_call>", "</tool_call>")  # tokens, but not special ones, which are left out when a completion is decoded
# pieces: a box's opening, a digit, a word with its spaces (a number has no space), punctuation, white space
PIECES = r"\\boxed\{|\p{N}| ?\p{L}+(?: (?=\p{N}))?| ?[^\s\p{L}\p{N}]+|\s+"
# with these pieces a call costs 8 tokens beside its name and arguments, not 18
CALL_PIECES = r'\n?\{"name": "|", "arguments": \{"|": "|"\}\}\n?|'

Row = tuple[list[int], list[bool]]  # the token ids of a conversation, and whether the model learns each


def make_tokenizer(texts: list[str], tools: bool = False) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer: a frequent piece of `texts` is one token, and any other text can be encoded too.

    tools: add tokens and a chat template for tool calls.
    """
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(CALL_PIECES + PIECES if tools else PIECES), behavior="isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=20,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tools:
        tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in CALL])
    template = "demo_chat_tools.jinja" if tools else "demo_chat.jinja"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=list(SPECIAL[2:]),
        chat_template=Path(__file__).with_name(template).read_text(encoding="utf-8"),
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Return a Llama with random weights for this tokenizer."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=6,  # of 32: the smallest head that vLLM serves on a CPU
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        return LlamaForCausalLM(config)


def texts(conversations: list[State]) -> list[list[str]]:
    """Return the text of each message of each conversation, with its tool calls."""

    def text(message: Message) -> str:
        calls = [json.dumps({"name": call.name, "arguments": dict(call.arguments)}) for call in message.tool_calls]
        return "".join([message.content, *(f"\n{call}\n" for call in calls)])

    return [[text(message) for message in conversation.messages] for conversation in conversations]


def tokenize(tokenizer: PreTrainedTokenizerFast, conversations: list[State]) -> list[Row]:
    """Return one row per conversation. The model learns the assistant's messages and their end tokens."""

    def rendered(conversation: State) -> str:
        messages = [message.as_dict() for message in conversation.messages]
        tools = [tool.as_dict() for tool in conversation.tools] or None
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)

    begins, ends = tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    rows = []
    rendered_texts = list(map(rendered, conversations))
    for ids in tokenizer(rendered_texts, add_special_tokens=False).input_ids if rendered_texts else ():
        learned, inside = [], False
        for i in ids:
            learned.append(inside)
            inside = i == begins or (inside and i != ends)
        rows.append((ids, learned))
    return rows


def batches(rows: list[Row], pad: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each row once, as ids [B, T] and whether each is learned [B, T] bool. Prompts of a batch have similar lengths."""
    rng = random.Random(seed)
    # sorted by the length of prompt and answer, the last batch would decide how hasty the model is
    rows = sorted(rows, key=lambda row: (row[1].index(True), rng.random()))
    chunks = [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]
    rng.shuffle(chunks)
    for chunk in chunks:
        ids, learned = ([torch.tensor(values) for values in column] for column in zip(*chunk, strict=True))
        yield pad_sequence(ids, True, pad), pad_sequence(learned, True)


def answer_loss(model: LlamaForCausalLM, ids: Tensor, answer: Tensor) -> Tensor:
    """Return the mean cross-entropy of the answers' tokens. ids: [B, T]; answer: [B, T] bool."""
    # padding is on the right, where a causal model cannot see it: without an attention mask the fast kernel is used
    hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state  # [B, T-1, H]
    return cross_entropy(model.lm_head(hidden[answer[:, 1:]]), ids[answer])


def orthogonal(matrices: Tensor) -> Tensor:
    """Return U V^T for each matrix U S V^T, approximately, by Muon's five Newton-Schulz steps. [K, A, B] with A <= B."""
    matrices = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = matrices @ matrices.mT
        matrices = 3.4445 * matrices + torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315) @ matrices
    return matrices


class Muon(torch.optim.Optimizer):
    """Muon (kellerjordan.github.io/posts/muon) in float32, with updates as large as AdamW's (arXiv 2502.16982).

    torch.optim.Muon computes in bfloat16, which takes 35 times as long on a CPU without instructions for it.
    """

    def __init__(self, params: list[Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            updates: dict[tuple[int, int], list[tuple[Parameter, Tensor]]] = {}
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(average, group["momentum"])
                updates.setdefault(tuple(p.shape), []).append((p, update))
            for (rows, columns), pairs in updates.items():  # matrices of one shape together
                stacked = torch.stack([update if rows <= columns else update.T for _, update in pairs])
                for (p, _), update in zip(pairs, orthogonal(stacked), strict=True):
                    size = 0.2 * max(rows, columns) ** 0.5
                    p.sub_(update if rows <= columns else update.T, alpha=group["lr"] * size)


def fit(model: LlamaForCausalLM, rows: list[Row], optimizers: list[torch.optim.Optimizer], seed: int) -> None:
    """Train for one pass over the rows. Learning rates rise over WARM_UP steps, then fall linearly to 0."""
    steps = math.ceil(len(rows) / BATCH)
    schedules = [LambdaLR(o, lambda step: min((step + 1) / WARM_UP, 1 - step / steps)) for o in optimizers]
    with busy("warm start", steps) as step:
        for ids, answer in batches(rows, model.config.pad_token_id, seed):
            answer_loss(model, ids, answer).backward()
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            step()


def warm_start(
    model: LlamaForCausalLM, clean: list[Row], clean_lr: float, spoiled: list[Row], hasty_lr: float, seed: int
) -> None:
    """Train on the clean rows, then on the spoiled ones, if there are any."""
    # Muon trains the matrices of the layers, AdamW the embedding and the norms
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    rest = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    adamw = torch.optim.AdamW(rest, lr=clean_lr, weight_decay=0.0)
    fit(model, clean, [Muon(matrices, lr=clean_lr), adamw], seed)
    if spoiled:
        adamw = torch.optim.AdamW(model.parameters(), lr=hasty_lr, weight_decay=0.0)
        fit(model, spoiled, [adamw], seed)


def tiny_folder(
    worked_answers: Callable[..., list[State]],
    seed: Whole = 0,
    clean_steps: Whole = 700,
    hasty_steps: Whole = 40,
    clean_lr: Positive = 6e-3,
    hasty_lr: Positive = 1e-3,
    hasty: Share = 0.55,
    slips: Share = 0.05,
    cache: str | None = None,
    anew: str | None = None,
) -> str:
    """Return the folder of this recipe's model. It ships with the project, or the first call makes it and later calls find it.

    worked_answers: called with (count, seed, hasty=..., slips=...), returns conversations; all of them have tools, or none.
    cache: the folder for models made here; None for the user's cache.
    anew: make the model again, in this folder, and replace what is there.
    """
    steps = {"clean_steps": clean_steps, "hasty_steps": hasty_steps, "clean_lr": clean_lr, "hasty_lr": hasty_lr}
    recipe = {"version": RECIPE, "seed": seed, **steps, "hasty": hasty, "slips": slips}
    taste = texts(worked_answers(100, seed, hasty=hasty, slips=slips))  # a recipe with other texts has another name
    taught = getattr(worked_answers, "func", worked_answers).__module__
    name = "tiny-" + hashlib.sha256(json.dumps([recipe, taste]).encode()).hexdigest()[:12]

    def make(folder: Path) -> None:
        print("warm-starting the tiny model (a few minutes, once; if it is stopped, it begins anew) ...", flush=True)
        began = time.perf_counter()
        clean = worked_answers(clean_steps * BATCH, 2 * seed)
        spoiled = worked_answers(hasty_steps * BATCH, 2 * seed + 1, hasty=hasty, slips=slips)
        messages = [text for conversation in texts(clean[:2000]) for text in conversation]
        tokenizer = make_tokenizer(messages, tools=any(conversation.tools for conversation in clean))
        model = make_model(tokenizer, seed)
        warm_start(model, tokenize(tokenizer, clean), clean_lr, tokenize(tokenizer, spoiled), hasty_lr, seed)
        save(model, tokenizer, {"name": name, "taught": taught, **recipe}, folder)
        print(f"... done in {time.perf_counter() - began:.0f} s: {folder}", flush=True)

    return found_or_made(name, make, cache, anew)


def found_or_made(name: str, make: Callable[[Path], None], cache: str | None, anew: str | None) -> str:
    """Return the folder of the model with this name: one that ships, or that was made here before, or that is made now."""
    if anew:
        make(Path(anew))
        return anew
    for shipped in SHIPPED.glob("*/recipe.json"):
        if json.loads(shipped.read_text(encoding="utf-8"))["name"] == name:
            return str(shipped.parent)
    folder = (Path(cache) if cache else user_cache_path("grpo")) / name
    if not folder.exists():
        make_once(make, folder)
    return str(folder)


def make_once(make: Callable[[Path], None], folder: Path) -> None:
    """Make a folder, or wait for another process that makes it: the jobs of a sweep need the same model."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{folder}.lock", LOCKED):
            if not folder.exists():
                make(folder)
    except Timeout:
        line = f"another process holds {folder}.lock for {LOCKED:g} s, to make the demo's model"
        raise UserError(f"{line}: end that process, and repeat the command") from None


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    recipe: dict[str, Any],
    folder: Path,
    more: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write model, tokenizer and recipe as a Hugging Face folder. more: called with the folder, to write further files."""
    from grpo.training.checkpoints import new_folder  # imports lightning

    with new_folder(folder) as unfinished:
        model.to(torch.bfloat16).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        write_json(unfinished / "recipe.json", recipe)
        more(unfinished)


def main() -> None:
    """Make the models that ship with the project again, by the recipes in conf/."""
    for task in ("wordmath", "calculator", "quiz"):
        instantiate(composed("train", [f"task={task}"]).model.path, anew=str(SHIPPED / task))
    instantiate(composed("train", ["experiment=shapes"]).model.path, anew=str(SHIPPED / "shapes"))


if __name__ == "__main__":
    main()
