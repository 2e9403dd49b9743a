"""The base model of the demo that sees: built on a CPU in seconds, saved as a Hugging Face folder with its processor.

An Idefics3 (arXiv 2408.12637) of 0.15 M parameters: a tower that reads 16 patches of 14 x 14 pixels, and a Llama that gets four
features of a picture. It learns questions with random answers, so it knows what an answer looks like and nothing of pictures.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, PreTrainedTokenizerFast

from grpo.env.messages import pictures_of
from grpo.env.types import State
from grpo.extras.demo.demo_model import BATCH, Row, found_or_made, make_tokenizer, save, texts, tokenize
from grpo.extras.images.door import OpenSight
from grpo.system.files import write_json
from grpo.system.ranges import Positive, Whole

RECIPE = 1  # increase it when a change of this file changes the model
SIDE, PATCH, JOINED = 56, 14, 2  # pixels of a picture and of a patch; JOINED x JOINED patches become one feature
PICTURE, AROUND, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
# of the pixels of both demos, so that a tower begins with numbers near 0
MEAN, DEVIATION = 0.2, 0.2
SPREAD = 0.04  # of the first weights


def seeing_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer as the other demos have it, with the tokens and the template of pictures."""
    tokenizer = make_tokenizer(words)
    tokenizer.add_special_tokens({"additional_special_tokens": [PICTURE, AROUND, WHOLE]})
    tokenizer.chat_template = Path(__file__).with_name("demo_seeing_chat.jinja").read_text(encoding="utf-8")
    return tokenizer


def seeing_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, places: float | None = None
) -> Idefics3ForConditionalGeneration:
    """Return a model with random weights for this tokenizer. places: see `seeing_folder`."""
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {"num_hidden_layers": 2, "initializer_range": SPREAD}
    text = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True}
    tower = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    config = Idefics3Config(
        text_config=text | sizes | ends | {"vocab_size": len(tokenizer)},
        vision_config=tower | sizes,
        scale_factor=JOINED,
        image_token_id=tokenizer.convert_tokens_to_ids(PICTURE),
        tie_word_embeddings=True,
        **ends,
    )
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        model = Idefics3ForConditionalGeneration(config).eval()
        if places is not None:
            torch.nn.init.normal_(model.base_model.vision_model.embeddings.position_embedding.weight, std=places)
        return model


def save_processor(folder: Path) -> None:
    """Write the files of a processor that takes pictures whole and scales them to SIDE x SIDE."""
    images = {"size": {"longest_edge": SIDE}, "max_image_size": {"longest_edge": SIDE}, "do_image_splitting": False}
    images |= {"image_mean": [MEAN] * 3, "image_std": [DEVIATION] * 3, "image_processor_type": "Idefics3ImageProcessor"}
    kind = {"processor_class": "Idefics3Processor"}
    write_json(folder / "preprocessor_config.json", images | kind)
    write_json(folder / "processor_config.json", {"image_seq_len": (SIDE // PATCH // JOINED) ** 2} | kind)


def with_places(rows: list[Row], conversations: list[State], sight: OpenSight) -> list[Row]:
    """Return the rows with all places of their pictures, which the model does not learn to write."""
    found = []
    for (ids, learned), conversation in zip(rows, conversations, strict=True):
        whole = sight.expanded(ids, pictures_of(conversation.messages))
        found.append(([*whole], [False] * (len(whole) - len(ids)) + learned))
    return found


def warm_up(model: Idefics3ForConditionalGeneration, rows: list[Row], lr: float) -> None:
    """Train for one pass over the rows, in their order."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for start in range(0, len(rows), BATCH):
        columns = zip(*rows[start : start + BATCH], strict=True)
        ids, learned = ([torch.tensor(values) for values in column] for column in columns)
        mask = pad_sequence([torch.ones_like(one) for one in ids], True)
        ids, learned = pad_sequence(ids, True, model.config.pad_token_id), pad_sequence(learned, True)
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        cross_entropy(logits[learned[:, 1:]], ids[learned]).backward()
        optimizer.step()
        optimizer.zero_grad()


def seeing_folder(
    guesses: Callable[[int, int], list[State]],
    seed: Whole = 0,
    steps: Whole = 60,
    lr: Positive = 2e-3,
    places: Positive | None = None,
    cache: str | None = None,
    anew: str | None = None,
) -> str:
    """Return the folder of this recipe's model. It ships with the project, or the first call makes it and later calls find it.

    guesses: called with (count, seed), returns questions about pictures with random answers. cache, anew: as in `tiny_folder`.
    places: spread of the tower's first positions; None for that of other weights, with which a feature says hardly where its
    patch is: pixels are some forty times as large.
    """
    taught = getattr(guesses, "func", guesses).__module__
    recipe = {"version": RECIPE, "seed": seed, "steps": steps, "lr": lr, "taught": taught}
    recipe |= {} if places is None else {"places": places}
    name = "seeing-" + hashlib.sha256(json.dumps([recipe, texts(guesses(20, seed))]).encode()).hexdigest()[:12]

    def make(folder: Path) -> None:
        conversations = guesses(steps * BATCH, seed)
        words = [text for conversation in texts(conversations) for text in conversation]
        tokenizer = seeing_tokenizer([text.replace(PICTURE, "") for text in words])
        model = seeing_model(tokenizer, seed, places)
        with TemporaryDirectory() as draft:  # what a sight reads
            model.config.save_pretrained(draft)
            save_processor(Path(draft))
            sight = OpenSight(draft, tokenizer)
        warm_up(
            sight.opened(model, learns=True), with_places(tokenize(tokenizer, conversations), conversations, sight), lr
        )
        save(model, tokenizer, {"name": name, **recipe}, folder, save_processor)

    return found_or_made(name, make, cache, anew)
