"""Reward functions of a user's own."""


def easy(prompts, completions, level, **columns):
    """1 less the row's column `level`, less a hundredth for each character."""
    return [1 - each - len(text) / 100 for each, text in zip(level, completions, strict=True)]


def additions(completions, **columns):
    return [float(len(text)) if "+" in text else None for text in completions]


def short(completions, **columns):
    return [1.0]


def told(prompts, completions, **columns):
    """Prints what it gets."""
    for prompt, completion in zip(prompts, completions, strict=True):
        print("GOT", prompt, completion)
    return [float(len(completion[0]["content"])) for completion in completions]
