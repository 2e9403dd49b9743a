"""A lighteval task: the problems of an evaluation of ours, graded by the last box of an answer. Start it in the folder of that
evaluation, which has samples.parquet. ROOT is the folder of this project:

    pip install lighteval==0.13.0 "huggingface_hub<2" "transformers<5.20" "xxhash<4"
    lighteval accelerate model_name=RUN/export,dtype=float32,batch_size=50 ours \\
      --custom-tasks ROOT/examples/evaluations/lighteval_task.py
"""

import re
import tempfile
from pathlib import Path

import numpy as np
from lighteval.metrics.metrics_sample import SampleLevelComputation
from lighteval.metrics.utils.metric_utils import SampleLevelMetric
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc, SamplingMethod


def ask(row: dict, task_name: str) -> Doc:
    return Doc(query=row["prompt"], choices=[row["gold"]], gold_index=0, task_name=task_name)


class Boxed(SampleLevelComputation):
    def compute(self, doc, model_response, **kwargs) -> float:
        boxes = re.findall(r"\\boxed\{([^}]*)\}", model_response.final_text[0])
        return float(boxes[-1:] == [doc.choices[0]])


boxed = SampleLevelMetric("boxed", True, SamplingMethod.GENERATIVE, Boxed(), np.mean)
folder = Path(tempfile.mkdtemp())  # lighteval reads folders
(folder / "test.parquet").symlink_to(Path("samples.parquet").absolute())
TASKS_TABLE = [
    LightevalTaskConfig(
        name="ours",
        prompt_function=ask,
        hf_repo=str(folder),
        hf_subset="default",
        hf_avail_splits=["test"],
        evaluation_splits=["test"],
        metrics=[boxed],
        generation_size=64,
        stop_sequence=[],
    )
]
