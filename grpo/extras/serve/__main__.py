"""Serve an engine over HTTP: token ids, text or messages in, samples and their log-probabilities out.

    python -m grpo.serve model=path model.path=FOLDER engine=transformers port=8000
    python -m grpo.serve model=path model.path=RUN/checkpoints/best    the best policy of a run
    curl localhost:8000/generate -d '{"prompt": "Hello", "n": 2}' -H 'Content-Type: application/json'

GROUP=OPTION chooses a file of conf/, KEY.KEY=VALUE sets one value. Ctrl-C stops the server after the running batch; a second
Ctrl-C stops it at once.
"""

import os
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from hydra.utils import instantiate

from grpo.apps.cli import one_line_errors, quiet
from grpo.config.appendix import of_appendix
from grpo.config.composing import composed
from grpo.config.help import described
from grpo.config.validation import check_values
from grpo.extras.network.ports import check_port, family
from grpo.system.errors import UserError

if TYPE_CHECKING:  # --help has no need of torch
    import torch

# seconds that the engine's thread waits for Python, before each operation of torch, while a request is read
SWITCH = 0.0005


def device_of(name: str | None) -> "torch.device":
    """Return torch's device of this name; auto is the accelerator if there is one, else the CPU. UserError for other names,
    and for a GPU that torch cannot use."""
    import torch

    from grpo.system.gpu import check_gpu

    if name in ("auto", None):
        check_gpu("the server", "device=cpu")
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device={name} is not a device of torch: give auto, cpu, cuda, cuda:1 or mps") from error


def secret_of(value: object) -> str | None:
    """Return the key that requests need: the given one, else GRPO_API_KEY of the environment; None for no key.

    Raises UserError, which does not contain the key, if it is not a text or is empty.
    """
    key = os.environ.get("GRPO_API_KEY") if value is None else value
    if key is not None and (not isinstance(key, str) or not key.strip()):
        raise UserError(
            "api_key must be a text that is not empty: quote numbers, or set GRPO_API_KEY in the environment"
        )
    return key


def main(arguments: Sequence[str]) -> None:
    """Load the model and serve it until Ctrl-C. arguments: overrides of conf/serve.yaml, or --help."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__.partition("\n\n")[2], described("serve"), sep="\n")
        return
    try:
        config = composed("serve", arguments)
    except Exception as error:
        if "api_key" in str(error):  # Hydra's line would contain the key
            raise UserError("api_key=... cannot be read: quote it, or set GRPO_API_KEY in the environment") from None
        raise
    api_key = secret_of(config.api_key)
    check_values(config)
    host, port = config.host, config.port
    try:
        from grpo.extras.serve.api import Server
        from grpo.extras.serve.batching import Batching
        from grpo.extras.serve.served_weights import ServedWeights
        from grpo.extras.serve.service import Service, served_name
    except ImportError as error:
        raise UserError(f"a server needs more libraries ({error}): pip install '.[serve]'") from error
    check_port(host, port)
    sys.setswitchinterval(SWITCH)
    device = device_of(config.device)
    with socket.create_server((host, port), family=family(host)) as listener:
        of_appendix("scores.door.follow_scores", tuple)()
        pretrained = instantiate(config.model)
        if pretrained.vision:
            raise UserError("a server takes no pictures yet: set model.vision=null")
        tokenizer = pretrained.tokenizer()
        renderer = instantiate(config.renderer)(tokenizer)
        vocabulary = pretrained.config().get_text_config().vocab_size
        batching = Batching(lambda: instantiate(config.engine))
        weights = ServedWeights(pretrained, device, config.weights_from)
        limits = instantiate(config.limits)
        names = [config.served_name or served_name(pretrained.path)]
        service = Service(batching, weights, tokenizer, renderer, vocabulary, limits, names)
        server = Server(service, api_key)

        def ready(loaded: Future) -> None:
            if loaded.exception():
                server.should_exit = True
                return
            url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
            known = "" if service.name == pretrained.path else f" as {service.name}"
            engine = type(batching.engine).__name__
            print(f"serving {pretrained.path}{known} with {engine} at {url}", flush=True)
            if host not in ("localhost", "::1") and not host.startswith("127.") and not api_key:
                line = "anyone who can reach this address can use it and change its weights: set GRPO_API_KEY"
                print(f"host={host}: {line}", flush=True)

        first = batching.call(weights.read)
        first.add_done_callback(ready)
        server.run(sockets=[listener])
        first.result(timeout=0)


if __name__ == "__main__":
    quiet()
    with one_line_errors("serve"):
        main(sys.argv[1:])
