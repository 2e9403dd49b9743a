"""The house: who may import whom."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = [
    {"errors", "messages", "tokens", "ranks", "coroutines", "ports", "memory", "guard"},
    {"rl", "rows", "rowtask", "rewards", "renderer", "engine", "engines", "grading", "logprobs"}
    | {"tools", "toolcalls", "answers", "arithmetic", "workers", "sandbox", "confine", "programs"}
    | {"advantage", "kl", "loss", "correction", "entropy", "algorithm", "attention", "layout", "probe", "masters"}
    | {"optimizers", "recompute", "statistics"},
    {"rollout", "play", "calls", "scoring", "collate", "data", "policy", "evaluation", "tiny", "records"},
    {
        "module",
        "callbacks",
        "forecast",
        "trainer",
        "runs",
        "serve",
        "loggers",
        "trackers",
        "manifest",
        "card",
        "jobs",
        "sweep",
    }
    | {"scorecard", "comparison", "report", "plots", "anatomy", "show"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imports(file: Path) -> set[str]:
    """Dotted names of every module that the file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            whole = node.module == "grpo"  # from grpo import ranks
            names |= {f"grpo.{alias.name}" for alias in node.names} if whole else {node.module}
    return names


def room(module: str) -> str:
    """grpo.engines.auto -> engines"""
    return module.split(".")[1]


def test_every_file_has_a_layer_and_imports_only_its_own_or_lower_ones():
    for file in sorted((ROOT / "grpo").rglob("*.py")):
        here = file.relative_to(ROOT / "grpo").parts[0].removesuffix(".py")
        if here == "__init__":
            continue
        here = "cli" if file.name == "__main__.py" else here  # a command
        for name in imports(file):
            if name.startswith("grpo."):
                assert LEVEL[room(name)] <= LEVEL[here], f"{file.name} (layer {LEVEL[here]}) imports {name}"
            assert not name.startswith("tasks"), f"{file.name} imports {name}: tasks are named by Hydra, never imported"


def test_module_and_callbacks_do_not_know_each_other():
    assert not any(name.startswith("grpo.callbacks") for name in imports(ROOT / "grpo" / "module.py"))
    for file in (ROOT / "grpo" / "callbacks").glob("*.py"):
        assert "grpo.module" not in imports(file)


def test_only_the_composition_roots_know_hydra_and_only_engines_know_vllm():
    for file in [*(ROOT / "grpo").rglob("*.py"), *(ROOT / "tasks").rglob("*.py")]:
        libraries = {name.split(".")[0] for name in imports(file)}
        assert not libraries & {"hydra", "omegaconf"} or file.name == "cli.py", f"{file} imports hydra"
        assert "vllm" not in libraries or file.parent.name == "engines", f"{file} imports vllm"


def test_tasks_live_in_message_space():
    allowed = {
        "errors",
        "messages",
        "rl",
        "rows",
        "rowtask",
        "rewards",
        "grading",
        "answers",
        "sandbox",
        "programs",
        "scoring",
        "tools",
        "arithmetic",
    }
    for file in (ROOT / "tasks").glob("*.py"):
        ours = {room(name) for name in imports(file) if name.startswith("grpo")}
        assert ours <= allowed, f"{file.name} imports {ours - allowed}"


def test_train_py_fits_on_a_screen():
    assert len((ROOT / "train.py").read_text().splitlines()) <= 80
