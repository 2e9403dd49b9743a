"""GSM8K: grade-school word problems with a number for an answer (arXiv 2110.14168)."""

from collections.abc import Sequence

from grpo.errors import UserError
from grpo.grading import grade
from grpo.messages import Message
from grpo.rl import Example, Reward, SingleTurn, Split, Trajectory
from grpo.rows import read_rows

INSTRUCTIONS = "Reason step by step, and put the final answer in \\boxed{}."
ONE_SHOT = """Question: A baker makes 3 trays of 12 rolls and sells 20 of them. How many rolls are left?
Answer: 3 trays of 12 rolls are 3 * 12 = 36 rolls. After 20 are sold, 36 - 20 = 16 are left. The answer is \\boxed{16}.

"""
PROMPTS = {
    "chat": lambda question: f"{question}\n\n{INSTRUCTIONS}",
    "one_shot": lambda question: f"{INSTRUCTIONS}\n\n{ONE_SHOT}Question: {question}\nAnswer:",
}


class GSM8K:
    """path: a hub id, or a folder with train.jsonl and test.jsonl; rows have `question`, and `answer` that ends in `#### 18`.

    Reward: 1 for the right number, in a \\boxed{} or after ####, plus format_reward for any answer in one of the two.
    """

    def __init__(
        self,
        path: str = "openai/gsm8k",
        prompt: str = "one_shot",
        format_reward: float = 0.1,
        train_limit: int | None = None,
        test_limit: int | None = None,
    ) -> None:
        if prompt not in PROMPTS:
            raise UserError(f"task.prompt={prompt} is not one of {', '.join(PROMPTS)}")
        self.path, self.prompt, self.format_reward = path, PROMPTS[prompt], format_reward
        self.limits = {"train": train_limit, "test": test_limit}
        self.rows: dict[Split, Sequence[Example]] = {}

    def examples(self, split: Split) -> Sequence[Example]:
        if split not in self.rows:
            self.rows[split] = read_rows(
                self.path, split, "gsm8k", ("question", "answer"), config="main", limit=self.limits[split]
            )
        return self.rows[split]

    def build(self, example: Example) -> SingleTurn:
        return SingleTurn((Message("user", self.prompt(example["question"])),))

    def score(self, example: Example, trajectory: Trajectory) -> Reward:
        text = trajectory.answer.partition("\nQuestion:")[0]  # a base model goes on to invent the next question
        return grade(text, str(example["answer"]).rpartition("####")[2].strip(), self.format_reward)
