"""A taskset of verifiers 0.4 with a tool and a reward, in the library's own form. It knows nothing of training."""

from openai_tools import calculator
from verifiers import v1 as vf

__all__ = ["Questions"]


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None  # the tool is `calculator`, not `calculator_calculator`

    @vf.tool
    def calculator(self, expression: str) -> str:
        """Works out an expression."""
        return calculator(expression)


class Data(vf.TaskData):
    answer: str


class Question(vf.Task[Data]):
    @vf.reward
    async def right(self, task: Data, trace: vf.Trace) -> float:
        return float(f"\\boxed{{{task.answer}}}" in trace.last_reply)


class Questions(vf.Taskset[Question, vf.TasksetConfig]):
    def load(self) -> list[Question]:
        return []  # the rows come from the run

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Calculator(vf.ToolsetConfig())]


if __name__ == "__main__":  # so the library starts the server of the tools
    Calculator.run()
