"""Programs of `task=code` in a service: E2B (https://e2b.dev) or Modal (https://modal.com). Neither was run here.

The template or the image has this project. See docs/grading.md, "Programs that run elsewhere":

    python train.py task=code model=qwen05b 'task.rewards=[{_target_: tasks.code.passes, _partial_: true,
        sandbox: "examples/sandboxes.py:on_e2b"}]'
"""

from functools import cache
from uuid import uuid4

from grpo.extras.programs.elsewhere import job_of, result_of

PROGRAM = ["python", "-m", "grpo.extras.programs.elsewhere"]


@cache
def e2b():
    from e2b import Sandbox

    return Sandbox.create("my-template")


def on_e2b(*job, **more):
    """Run a program in E2B; the parameters are those of `run_program`."""
    file = f"/tmp/{uuid4().hex}"
    e2b().files.write(file, job_of(*job, **more))
    return result_of(e2b().commands.run(f"{' '.join(PROGRAM)} < {file}").stdout)


def on_modal(*job, **more):
    """Run a program in Modal; the parameters are those of `run_program`."""
    import modal

    app = modal.App.lookup("programs", create_if_missing=True)
    there = modal.Sandbox.create(*PROGRAM, app=app, image=modal.Image.from_registry("my-image"), block_network=True)
    there.stdin.write(job_of(*job, **more))
    there.stdin.write_eof()
    there.stdin.drain()
    return result_of(there.stdout.read())
