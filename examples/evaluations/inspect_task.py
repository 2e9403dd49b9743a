"""An Inspect task: the problems of an evaluation of ours, graded by the last box of an answer. FILE is its samples.parquet.

    pip install inspect-ai==0.3.285 openai pyarrow
    cd EVAL && cp ROOT/examples/evaluations/inspect_task.py .  # ROOT: the folder of this project
    LOCAL_BASE_URL=http://localhost:8000/v1 LOCAL_API_KEY=none inspect eval inspect_task.py --model openai-api/local/policy \\
      --temperature 0 --max-tokens 64
"""

import re

import pyarrow.parquet as pq
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import CORRECT, INCORRECT, Score, accuracy, scorer, stderr
from inspect_ai.solver import generate


@scorer(metrics=[accuracy(), stderr()])
def boxed():
    async def score(state, target):
        boxes = re.findall(r"\\boxed\{([^}]*)\}", state.output.completion)
        right = boxes[-1:] == [target.text]
        return Score(value=CORRECT if right else INCORRECT, answer=boxes[-1] if boxes else None)

    return score


@task
def ours(file: str = "samples.parquet") -> Task:
    rows = pq.read_table(file, columns=["item", "prompt", "gold"]).to_pylist()
    samples = [Sample(row["prompt"], target=row["gold"], id=row["item"]) for row in rows]
    return Task(samples, solver=generate(), scorer=boxed())
