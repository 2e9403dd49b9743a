"""The folder with conf/, tasks/, train.py and eval.py: the checkout, or grpo/project of a wheel, where setup.py puts them."""

import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
ROOT = PACKAGE.parent if (PACKAGE.parent / "conf" / "train.yaml").is_file() else PACKAGE / "project"
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # conf/ names classes of tasks/
