"""Starts vLLM servers on this machine. None of them outlives the process that started it (`grpo.extras.network.child`).

Does not import vLLM.
"""

import json
import logging
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from grpo.engines.vllm.errors import memory_advice
from grpo.engines.vllm.settings import ARGS, CPU_ARGS, GPU_SHARE, INSTALL
from grpo.extras.network import child
from grpo.extras.network.ports import check_port
from grpo.system.errors import UserError, plural
from grpo.system.ranges import Count, Port, Whole, enforced

log = logging.getLogger(__name__)

HOST = "127.0.0.1"  # a server with these routes lets anyone change its weights
ERROR = re.compile(r"(?:^|\] )\s*(Value error, .+|[\w.]+(?:: error|Error): .+)")  # an error in a log


def command(path: str, sync: str, args: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return the environment variables and the flags for a server that this client can use. args: more flags, by name."""
    # the routes for weights; `transfer.exact_logprobs` patches the old model runner
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    flags: dict[str, Any] = {
        "model": path,
        "enable_scale_out": True,  # token ids in, token ids out
        **ARGS,
    }
    if sync == "lora":
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        flags |= {"enable_lora": True, "max_loras": 2}  # also the previous version, for completions in flight
    words = []
    for name, value in {**flags, **args}.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, Mapping):
            words += [f"--{flag}", json.dumps(dict(value))]
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, list | tuple) else [value])]
    return environment, words


def by_hand(path: str, sync: str, args: Mapping[str, Any]) -> str:
    """Return the command line that starts such a server by hand. args: more flags, by name."""
    environment, words = command(path, sync, args)
    variables = " ".join(f"{name}={value}" for name, value in environment.items())
    return f"{variables} vllm serve {shlex.join(words[1:])}"  # the model without its flag


@enforced("engine")
@dataclass(eq=False)
class Servers:
    """The vLLM servers that this run starts on this machine.

    path: the model. sync: how they will get weights. count: number of servers. port: port of the first; None: free ports.
    devices: the GPUs of each, see `visible`. args: further flags. logs: the folder of server-PORT.log.
    """

    path: str
    sync: str = "disk"
    count: Count = 1
    port: Port | None = None
    devices: Sequence[Whole | str] | None = None
    args: Mapping[str, Any] | None = None
    logs: str = "."

    def __post_init__(self) -> None:
        if find_spec("vllm") is None:
            raise UserError(f"engine.launch=true needs vLLM here: {INSTALL}; or set engine.urls to servers elsewhere")
        count, devices = self.count, self.devices
        if devices is not None and len(devices) != count:
            raise UserError(f"engine.devices={list(devices)} must name GPUs for each of engine.count={count} servers")
        self._gpus = None if devices is None else [*map(visible, devices)]
        self.ports = [self.port + i for i in range(count)] if self.port else []
        for port in self.ports:
            check_port(HOST, port)
        self.ports = self.ports or free_ports(count)
        self.folder = Path(self.logs).resolve()  # stays right if the process changes its working directory
        self._guards: dict[int, subprocess.Popen] = {}
        self._begun: dict[int, int] = {}  # by port: where in the log the latest start begins

    @property
    def urls(self) -> list[str]:
        """The addresses of the servers."""
        return [f"http://{HOST}:{port}" for port in self.ports]

    def log(self, port: int) -> Path:
        """Return the log file of the server at this port."""
        return self.folder / f"server-{port}.log"

    def start(self, port: int) -> None:
        """Start the server at this port. It answers once it has loaded the model."""
        check_port(HOST, port)
        args = {"host": HOST, "port": port, **defaults(self.devices)}
        args |= {name: value for name, value in (self.args or {}).items() if value is not None}
        more, words = command(self.path, self.sync, args)
        ours = str(Path(__file__).parents[3])  # the server must import this copy of the package
        environment = {**os.environ, **more, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # `import_vllm` may have set 0
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH")]))
        if not torch.cuda.is_available():  # else vLLM binds all servers to the same cores, and compiles for too long
            threads = max(1, (os.cpu_count() or 1) // (len(self.ports) + 1))
            of_cpu = {
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": str(threads),
                "TORCHDYNAMO_DISABLE": "1",
            }
            environment = of_cpu | environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # one process fewer
        if self._gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[self.ports.index(port)]
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log(port).open("ab") as file:
            self._begun[port] = file.tell()
            # the module, since vllm-cpu's console script fails
            server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
            self._guards[port] = child.start(server, env=environment, stdout=file, stderr=file)
        log.info("the vLLM server at port %d starts, its log is %s", port, self.log(port))

    def start_all(self) -> None:
        """Start all servers, without waiting for them."""
        for port in self.ports:
            self.start(port)

    def ended(self, port: int) -> str | None:
        """Return one line with the reason if the server at this port has ended by itself; else None."""
        process = self._guards.get(port)
        if process is None or (code := process.poll()) is None:
            return None
        with self.log(port).open("rb") as file:
            file.seek(self._begun[port])
            lines = file.read().decode(errors="replace").splitlines()
        errors = [match[1] for match in map(ERROR.search, lines) if match]
        # pydantic's error comes below a heading; otherwise the first error caused the others
        reasons = [line for line in errors if line.startswith("Value error")] or errors or [" | ".join(lines[-3:])]
        advice = memory_advice(reasons[0])
        fix = f"; {advice}" if advice else ""
        return f"the vLLM server at port {port} ended with exit code {code}: {reasons[0][:300]} (see {self.log(port)}){fix}"

    def close(self) -> None:
        """Stop all servers."""
        guards, self._guards = self._guards, {}  # from now on none counts as ended, and none is started again
        child.stop(guards.values())


def defaults(devices: Sequence | None) -> dict[str, Any]:
    """Return our defaults of engine.args, where vLLM's own do not fit."""
    if not torch.cuda.is_available():
        return {"dtype": "float32", **CPU_ARGS}
    return {} if devices is not None else {"gpu_memory_utilization": GPU_SHARE}


def visible(chosen: int | str) -> str:
    """Return CUDA_VISIBLE_DEVICES for a server on some of the GPUs that this process sees. Raises UserError if it does not.

    chosen: their numbers, counted from 0 among those that this process sees, as 1 or "2,3", or their names (GPU-..., MIG-...).
    """
    names = [name.strip() for name in str(chosen).split(",")]
    if (setting := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        ours = [name.strip() for name in takewhile(lambda name: not name.strip().startswith("-"), setting.split(","))]
        ours = [name for name in ours if name]
    elif torch.cuda.is_available():
        ours = [*map(str, range(torch.cuda.device_count()))]
    else:  # the server will say that there is none
        return ",".join(names)
    if gone := [name for name in names if name.isdecimal() and int(name) >= len(ours)]:
        seen = f"this process sees {plural(len(ours), 'GPU')}" + (
            "" if setting is None else f", CUDA_VISIBLE_DEVICES={setting}"
        )
        raise UserError(
            f"engine.devices names GPU {gone[0]}, counted from 0, and {seen}: name others, or make it visible"
        )
    return ",".join(ours[int(name)] if name.isdecimal() else name for name in names)


def check_apart(devices: Sequence[int | str] | None, own: int) -> None:
    """Raise UserError if a server would use the trainer's GPU: NCCL, which sends weights, takes one process on each.

    own: the number of the trainer's GPU among those that this process sees.
    """
    taken = visible(own)
    if devices is None or any(taken in visible(gpus).split(",") for gpus in devices):
        line = f"engine.sync=nccl takes one process on each GPU, and GPU {own} is the trainer's"
        raise UserError(f"{line}: give the servers others, as engine.devices=[{own + 1}], or set engine.sync=disk")


def free_ports(count: int) -> list[int]:
    """Return `count` different free ports."""
    with ExitStack() as all_open:  # all open at once, so that no port is found twice
        sockets = [all_open.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in sockets]
