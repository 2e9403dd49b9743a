"""Train or evaluate where train.py and eval.py are not at hand, as after an installation from a wheel.

python -m grpo train OVERRIDES
python -m grpo eval OVERRIDES
"""

import runpy
import sys

from grpo.system.root import ROOT

if __name__ == "__main__":
    if sys.argv[1:2] not in (["train"], ["eval"]):
        sys.exit(f"{__doc__}\nerror: the first word is train or eval")
    program = ROOT / f"{sys.argv.pop(1)}.py"
    sys.argv[0] = str(program)  # further devices start it again
    runpy.run_path(str(program), run_name="__main__")
