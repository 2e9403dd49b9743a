"""Launch files: what stands in them, and that a file really trains, with scripts in place of Slurm."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from conftest import ROOT, TEST_PATH, compose_config
from helpers import programs
from helpers.runs import rows

from grpo.extras.launch.launch import launch_file, main, shared_folder
from grpo.extras.launch.skypilot import with_file
from grpo.extras.vllm_server.launch import free_ports
from grpo.system.errors import UserError
from grpo.training.checkpoints import PlainCheckpoints
from train import train

SPLIT = ["qwen32b_split", "llama70b_split"]
FOLDER = Path("/shared/run")
ONE_MACHINE = ["trainer.num_nodes=1", "deployment.server_nodes=1", "engine.sync=disk", "deployment.image=grpo"]
STUBS = {  # in place of Slurm: a file runs here, each task of a step is a process
    "sbatch": 'SLURM_JOB_ID=7 SLURM_JOB_NODELIST=localhost bash "$1"',
    "scontrol": 'if [ "$1" = show ]; then echo "$3"; else echo "$@" >> "$REQUEUED"; fi',
    "srun": """
        while [[ $1 == --* ]]; do
            case $1 in --ntasks=*) count=${1#*=};; --output=*) file=${1#*=};; --nodes=*) nodes=${1#*=};; esac
            shift
        done
        export SLURM_NTASKS=$count SLURM_NTASKS_PER_NODE=$count SLURM_NNODES=$nodes SLURM_NODELIST=localhost SLURM_JOB_NAME=grpo
        export SLURMD_NODENAME=localhost SLURM_NODEID=0
        worst=0; tasks=()
        for ((i = 0; i < count; i++)); do
            SLURM_PROCID=$i SLURM_LOCALID=$i "$@" >> "${file//%N-%t/localhost-$i}" 2>&1 &
            tasks+=($!)
        done
        for task in "${tasks[@]}"; do wait "$task"; code=$?; if [ $code -gt $worst ]; then worst=$code; fi; done
        exit $worst""",
}


def checked(text: str, tmp_path: Path, severity: str = "warning") -> str:
    """Return a shell script that bash and shellcheck accept. severity: what shellcheck refuses."""
    file = tmp_path / "file.sh"
    file.write_text(text)
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for command in (
        ["bash", "-n", file],
        *([[checker, "--shell=bash", f"--severity={severity}", file]] if checker else []),
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert not done.returncode, done.stdout + done.stderr
    return text


@pytest.mark.parametrize("name", SPLIT)
def test_a_split_run_is_one_slurm_job_and_one_list_of_addresses(name, tmp_path):
    text = checked(launch_file("slurm", [f"experiment={name}", "task.prompt='a $b'"], FOLDER), tmp_path)
    for line in ("#SBATCH --nodes=8", "#SBATCH --signal=USR1@120", "#SBATCH --requeue", "--tensor-parallel-size 4"):
        assert line in text
    assert "--nodes=4 --relative=0 --ntasks=32 --ntasks-per-node=8" in text
    assert "--nodes=4 --relative=4 --ntasks=8 --ntasks-per-node=2" in text
    assert '{"backend": "grpo"}' in text and "resume=auto hydra.run.dir=/shared/run" in text
    assert "'task.prompt='\"'\"'a $b'\"'\"''" in text  # the shell gives train.py what was given to grpo.launch


def test_a_colocated_run_has_no_servers(tmp_path):
    text = checked(launch_file("slurm", ["experiment=llama8b_8gpus"], FOLDER), tmp_path)
    assert "#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n" in text
    assert "vllm" not in text.replace("llama", "") and "servers" not in text


def test_lines_of_torchrun_name_every_server(tmp_path):
    text = launch_file("torchrun", [f"experiment={SPLIT[0]}", "engine.wait=77"], FOLDER)
    given = "\n".join(f"{name}=host" for name in ("HEAD", *(f"SERVER_{i + 1}" for i in range(4))))
    checked(f"{given}\n{text}", tmp_path, "error")  # `cd || exit` would close the shell of whoever pastes a line
    assert "--nnodes 4 --nproc-per-node 8 --max-restarts 3" in text
    assert text.count("engine.wait=") == text.count("engine.wait=77") == 1  # not a longer one after the user's
    assert text.count("vllm.entrypoints") == 8 and "CUDA_VISIBLE_DEVICES=4,5,6,7" in text
    assert "http://$SERVER_1:8000,http://$SERVER_1:8001,http://$SERVER_2:8000" in text


@pytest.mark.parametrize("kind", ["slurm", "torchrun", "compose"])
def test_servers_that_are_there_already_are_named_to_the_trainer(kind):
    words = ["engine=vllm_server", "deployment.server_nodes=0", "engine.urls=[http://gpu7:8000]", *ONE_MACHINE[-1:]]
    assert "engine.urls=[http://gpu7:8000]" in launch_file(kind, words, FOLDER)


def test_services_of_compose_have_devices_of_their_own():
    text = launch_file("compose", ["experiment=qwen32b_split", *ONE_MACHINE, "trainer.devices=4"], FOLDER)
    services = yaml.safe_load(text)["services"]
    devices = {name: one["deploy"]["resources"]["reservations"]["devices"][0] for name, one in services.items()}
    assert [device["device_ids"] for device in devices.values()] == [list("0123"), list("4567"), ["8", "9", "10", "11"]]
    assert list(services) == ["trainer", "server-0", "server-1"]
    assert services["trainer"]["command"][-1] == "engine.urls=[http://server-0:8000,http://server-1:8000]"
    assert all(one["volumes"] == ["/shared/run:/shared/run"] for one in services.values())
    assert [one["command"][0] for one in services.values()] == ["python"] * 3  # that of the image


def rented(*overrides: str, folder: Path = FOLDER) -> dict:
    """Return SkyPilot's task of these overrides."""
    return yaml.safe_load(launch_file("skypilot", list(overrides), folder))


def test_a_rented_machine_gets_the_project_and_the_files_that_an_override_names(tmp_path, monkeypatch):
    """Also a text of two lines, which must not end the script, and in which slashes and tags are no files."""
    monkeypatch.setenv("WANDB_TEAM", "me")
    monkeypatch.chdir(ROOT)
    (rows_file := tmp_path / "rows.jsonl").write_text("{}")
    words = [
        f"task.path={rows_file}",
        "task.rewards=[tests/helpers/slots.py:one,format]",
        "task.template='a\nb {prompt} in </home>: / or /tmp'",
    ]
    more = ["logger=wandb", "logger.wandb.project=${oc.env:WANDB_TEAM}", "deployment.setup=[uv pip install pint]"]
    task = rented(
        "task=jsonl", *words, *more, "deployment.gpu=A100", "trainer.devices=2", folder=Path("/home/me/My_run")
    )
    assert task["name"] == "grpo-my-run" and task["workdir"] == str(ROOT) and task["secrets"] == {"WANDB_TEAM": None}
    assert task["resources"] == {"accelerators": "A100:2"}
    assert task["file_mounts"] == {"/tmp/grpo-files/0/rows.jsonl": str(rows_file)}
    assert task["setup"].endswith("uv pip install -e '.[vllm,wandb]'\nuv pip install pint\n")
    script = checked(task["run"], tmp_path, "error")
    assert "task.path=/tmp/grpo-files/0/rows.jsonl" in script and "[tests/helpers/slots.py:one,format]" in script
    assert (
        "a\nb {prompt} in </home>: / or /tmp" in script
        and "resume=auto hydra.run.dir=outputs/launched/My_run" in script
    )
    assert script.endswith(
        "eval.py run=outputs/launched/My_run trust=true trainer.devices=2 hydra.run.dir=outputs/launched/My_run/evaluation\n"
    )


def test_files_of_one_name_and_files_that_git_ignores_have_places_of_their_own(tmp_path):
    project, mounts = tmp_path / "project", {}
    for folder in ("kept", "ignored"):
        (project / folder).mkdir(parents=True)
        (project / folder / "rows.jsonl").touch()
    (tmp_path / "rows.jsonl").touch()
    (project / ".gitignore").write_text("ignored/\n")
    subprocess.run(["git", "init", "--quiet", str(project)], check=True)
    named = [f"{folder}/rows.jsonl" for folder in (project / "kept", project / "ignored", tmp_path)]
    places = ["kept/rows.jsonl", "/tmp/grpo-files/0/rows.jsonl", "/tmp/grpo-files/1/rows.jsonl"]
    assert with_file(f"a=[{','.join(named)}]", project, mounts) == f"a=[{','.join(places)}]"
    assert mounts == dict(zip(places[1:], named[1:], strict=True))


def test_a_bucket_has_the_run_and_servers_have_gpus_of_their_own():
    servers = [
        "engine=vllm_server",
        "engine.launch=true",
        "engine.count=2",
        "engine.devices=[1,'2,3']",
        "model=qwen05b",
    ]
    task = rented(*servers, "deployment.gpu=H100", "deployment.bucket=s3://mine", "deployment.extras=[]")
    assert task["resources"] == {"accelerators": "H100:4"} and "uv pip install -e .\n" in task["setup"]
    assert task["file_mounts"] == {"/grpo-runs": {"source": "s3://mine", "mode": "MOUNT_CACHED"}}
    assert "hydra.run.dir=/grpo-runs/run\n" in task["run"]
    assert "resources" not in rented("trainer=cpu")


def test_skypilot_reads_its_task(tmp_path, monkeypatch):
    sky = pytest.importorskip("sky")
    (file := tmp_path / "task.yaml").write_text(launch_file("skypilot", ["deployment.gpu=T4"], FOLDER))
    task = sky.Task.from_yaml(str(file))
    assert task.name == "grpo-run" and next(iter(task.resources)).accelerators == {"T4": 1}


@pytest.mark.slow
def test_a_rented_machine_trains_and_evaluates(smoke, tmp_path):
    """Its script runs here, with another folder for the run. Its Python writes down what it is to run, which then runs."""
    words = [*tiny(smoke, tmp_path), "rollout.num_rollouts=1"]
    task = rented(*words, folder=tmp_path)
    text = task["run"].replace("outputs/launched", str(tmp_path))
    for there, here in task["file_mounts"].items():
        text = text.replace(there, here)
    (tmp_path / "grpo-env" / "bin").mkdir(parents=True)
    (tmp_path / "grpo-env" / "bin" / "activate").write_text(f"PATH={tmp_path}:$PATH\n")
    (tmp_path / "python").write_text('#!/bin/bash\nprintf "%q " "$@" >> "$HOME/asked"; echo >> "$HOME/asked"\n')
    (tmp_path / "python").chmod(0o755)
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", text], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    for line in (tmp_path / "asked").read_text().splitlines():
        done = programs.command(*shlex.split(line))
        assert not done.returncode, done.stdout + done.stderr
    run = tmp_path / tmp_path.name
    assert [row["step"] for row in rows(run)] == [0, 1] and (run / "evaluation" / "metrics.json").exists()


@pytest.mark.parametrize(
    ("kind", "overrides", "line"),
    [
        ("slurm", ["deployment.server_nodes=1"], "set engine=vllm_server, or server_nodes=0"),
        ("slurm", ["engine=vllm_server"], "engine=vllm_server has no servers: set deployment.server_nodes"),
        ("slurm", ["engine=vllm_server", "deployment.server_nodes=1"], "need model.path=FOLDER_OR_HUB_ID"),
        ("slurm", ["logger=wandb", "+logger.wandb.api_key=abcdefgh1234"], "logger.wandb.api_key holds a secret"),
        (
            "slurm",
            ["logger=wandb", "+logger.wandb.api_key=${oc.env:USER}abcdefgh1234"],
            "logger.wandb.api_key holds a secret",
        ),
        ("compose", ["experiment=qwen32b_split"], "is for one machine"),
        ("compose", ["trainer.num_nodes=2", "deployment.image=grpo"], "is for one machine"),
        ("compose", ["experiment=qwen32b_split", *ONE_MACHINE, "engine.sync=nccl"], "set engine.sync=disk"),
        ("compose", [], "needs deployment.image=IMAGE"),
        ("skypilot", ["trainer=cpu", "trainer.num_nodes=2"], "rents one machine: set trainer.num_nodes=1"),
        ("skypilot", [], "needs deployment.gpu=NAME"),
        ("skypilot", ["logger=wandb", "+logger.wandb.api_key=abcdefgh1234"], "logger.wandb.api_key holds a secret"),
        ("slurm", ["deployment.server_nodes=-1"], "deployment.server_nodes=-1 must be"),
        ("slurm", ["deployment.port=0"], "deployment.port=0 must be"),
    ],
)
def test_a_mistake_gets_one_line(kind, overrides, line):
    with pytest.raises(UserError) as error:
        launch_file(kind, overrides, FOLDER)
    assert line in str(error.value) and "\n" not in str(error.value) and "abcdefgh" not in str(error.value)


def test_wrong_flags_and_a_missing_sbatch_are_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    for arguments, line in (
        (["--dry"], "--dry is no flag"),
        (["--to=ray"], "must be one of slurm, torchrun, compose, skypilot"),
        ([f"hydra.run.dir={tmp_path}"], "there is no sbatch here"),
        (["hydra.run.dir=${now:%H}"], "take a path of letters"),
    ):
        with pytest.raises(UserError, match=line):
            main(arguments)
    assert not capsys.readouterr().out
    main(["--dry-run", f"hydra.run.dir={tmp_path / 'run'}"])
    assert capsys.readouterr().out.startswith("#!/bin/bash") and not (tmp_path / "run").exists()
    folder = shared_folder(["hydra.run.dir=outputs/a", "hydra.run.dir=outputs/b"])  # Hydra takes the last
    assert folder.is_absolute() and folder.name == "b"


def test_a_job_that_slurm_refuses_ends_with_the_code_of_sbatch(monkeypatch, tmp_path):
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main([f"hydra.run.dir={tmp_path / 'run'}"])
    assert ended.value.code == 3 and (tmp_path / "run" / "launch" / "job.sbatch").read_text().startswith("#!/bin/bash")


def tiny(smoke, folder: Path) -> list[str]:
    own = ("output_dir", "trainer", "hydra.run.dir", "callbacks")
    return [*(word for word in smoke() if not word.startswith(own)), "trainer=cpu", f"hydra.run.dir={folder}"]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_the_file_for_slurm_trains_and_a_preempted_job_resumes(smoke, tmp_path, devices):
    """Slurm asks one task to end. The job is queued again, resumes, and (two devices) ends with the weights of one that was not
    asked."""
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    requeued = tmp_path / "requeued"
    environment = {**os.environ, "PYTHONPATH": TEST_PATH, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment |= {"REQUEUED": str(requeued), "MASTER_PORT": str(free_ports(1)[0])}
    asked = f"+callbacks.asked={{_target_: helpers.slots.Asked, update: 1, number: {int(signal.SIGUSR1)}}}"
    weights = []
    for name, more in (("run", []), ("asked", [asked]))[2 - devices :]:
        words = [
            *tiny(smoke, tmp_path / name),
            f"trainer.devices={devices}",
            "rollout.prompts=2",
            "rollout.num_rollouts=3",
        ]
        job = [sys.executable, "-m", "grpo.launch", *words, "callbacks=[checkpoint]", *more]
        for code in ([75] if more else []) + [0]:
            done = subprocess.run(job, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
            logs = "".join(file.read_text() for file in (tmp_path / name / "launch").glob("trainer-*.log"))
            assert done.returncode == code, done.stdout + done.stderr + logs
            assert requeued.exists() == bool(more)
        assert [row["step"] for row in rows(tmp_path / name)] == [0, 1, 2, 3]
        weights.append(PlainCheckpoints().load_checkpoint(tmp_path / name / "checkpoints" / "last.ckpt")["state_dict"])
    assert requeued.read_text() == "requeue 7\n"
    assert all(torch.equal(weight, weights[-1][parameter]) for parameter, weight in weights[0].items())


def test_under_slurm_a_run_begins_at_its_beginning(smoke, monkeypatch, tmp_path):
    """Lightning would resume by itself from such a file in the working directory."""
    (tmp_path / "hpc_ckpt_1.ckpt").write_bytes(b"of another run")
    monkeypatch.chdir(tmp_path)
    for name in ("NTASKS", "NTASKS_PER_NODE", "NNODES"):
        monkeypatch.setenv(f"SLURM_{name}", "1")
    for name in ("PROCID", "LOCALID", "NODEID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    monkeypatch.setenv("SLURM_JOB_NAME", "grpo")
    train(compose_config(*smoke(f"output_dir={tmp_path / 'run'}", "rollout.num_rollouts=1")))
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1]


class KilledOnce(L.Callback):
    """Kills the process of rank 1 at its second rollout, once."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch.rollout == 1 and trainer.global_rank == 1 and not self.file.exists():
            self.file.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_the_lines_of_torchrun_train_on_two_nodes_and_start_again(smoke, tmp_path):
    """One of two nodes loses its process; the run resumes by itself, and ends with the weights of one that lost none."""
    words = """trainer.num_nodes=2 strategy=fsdp2 rollout.prompts=2 rollout.num_rollouts=3
        deployment.max_restarts=1""".split()
    words += ["callbacks.checkpoint.every=1", "trainer.timeout=200", "callbacks=[checkpoint]"]
    killed = f"+callbacks.killed={{_target_: test_launch.KilledOnce, file: {tmp_path / 'killed'}}}"
    weights = []
    for name, more in (("run", []), ("again", [killed])):
        text = launch_file("torchrun", [*tiny(smoke, tmp_path / name), *words, *more], tmp_path / name)
        text = text.replace("29500", str(free_ports(1)[0]))
        environment = {**os.environ, "PYTHONPATH": TEST_PATH, "HEAD": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        agents = [
            subprocess.Popen(["bash", "-c", text], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for _ in range(2)
        ]
        said = [agent.communicate(timeout=1800)[0].decode() for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0], said
        weights.append(PlainCheckpoints().load_checkpoint(tmp_path / name / "checkpoints" / "last.ckpt")["state_dict"])
    assert (tmp_path / "killed").exists()
    assert all(torch.equal(weight, weights[1][parameter]) for parameter, weight in weights[0].items())
