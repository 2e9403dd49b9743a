"""Hooks of the site's build (mkdocs.yml): README as first page, API pages by room, source pages, formulas as MathML, and the
reference, which shows what commands print: keys, metrics, settings of other systems, cases of grading.

A page links to files of the repository as GitHub wants it. On the site such a link leads to the module's place in the API, or to
a page that shows the file.
"""

import ast
import html
import re
import sys
from pathlib import Path, PurePosixPath

import yaml
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from grading_table import table as cases_table  # noqa: E402

from grpo.config.help import described  # noqa: E402
from grpo.extras.migration.foreign import printed  # noqa: E402
from grpo.extras.preflight import CHECKS  # noqa: E402
from grpo.extras.teachers.checks import CHECKS as TAUGHT  # noqa: E402
from grpo.system.metrics import metric_table  # noqa: E402

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
TABLES = {"tests/data/architectures.md": "reference/models.md", "tests/data/written_values.md": "reference/values.md"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".ipynb": "json", ".md": "markdown"}
LAST = "---\nsearch: {boost: 0.001}\n---\n"  # of what a search finds: names of code after the pages for users
LATE = "---\nsearch: {boost: 0.5}\n---\n"  # tables, which name nearly everything, after the pages that explain it
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]+)?(?=\))")
FENCED = re.compile(r"^```.*?^```", re.S | re.M)


def rooms() -> dict[str, str]:
    """Folder below grpo/ -> its sentence: of a room, in the map of grpo/__init__.py; of others, in their own __init__.py."""
    text = (ROOT / "grpo" / "__init__.py").read_text(encoding="utf-8")
    found = dict(re.findall(r"^    ([a-z]+) {2,}(\S.*)$", text.partition("The appendices")[0], re.M))
    for file in [ROOT / "grpo/apps/__init__.py", *sorted((ROOT / "grpo/extras").glob("*/__init__.py"))]:
        sentence = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        found[str(file.parent.relative_to(ROOT / "grpo"))] = sentence.partition("\n\n")[0].replace("\n", " ")
    return found


def modules(folder: str) -> list[str]:
    """Dotted names of the modules of a folder with something public, packages included."""
    found = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        if re.search(r"^(async def|def|class) [a-zA-Z]", file.read_text(encoding="utf-8"), re.M):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            found.append(name.removesuffix(".__init__"))
    return [name for name in found if not name.endswith("__main__")]


def api_pages() -> dict[str, str]:
    pages = {"tasks": "One file for each task."} | rooms()
    texts = {}
    for room, sentence in pages.items():
        folder = room if room == "tasks" else f"grpo/{room}"
        blocks = "\n\n".join(f"::: {name}" for name in modules(folder))
        texts[f"api/{PurePosixPath(room).name}.md"] = (
            f"{LAST}# {room}\n\n{sentence[0].upper()}{sentence[1:].rstrip('.')}.\n\n{blocks}\n"
        )
    rows = "\n".join(f"| [{room}]({PurePosixPath(room).name}.md) | {sentence} |" for room, sentence in pages.items())
    texts["api/index.md"] = (
        f"{LAST}# API\n\nOne page for each room and each appendix of the code.\n\n| room | contents |\n|---|---|\n{rows}\n"
    )
    return texts


def key_blocks(program: str) -> dict[str, str]:
    """Group or first part of a key -> what --help all prints about it."""
    groups, _, keys = described(program).partition("The keys of this command line:\n\n")
    blocks: dict[str, str] = {}
    for block in [*groups.strip().split("\n\n")[1:], *re.split(r"\n(?=\S)", keys.strip())]:
        name = re.split(r"[:\s]", block)[0]
        blocks[name] = "\n\n".join(filter(None, [blocks.get(name), block]))
    return blocks


def keys_page() -> str:
    """Every key, under a heading for each group. Keys of train.py that eval.py and grpo.serve share come once."""
    text = "This is what `--help all` prints: each option (* is the default), each key with its default and meaning.\n"
    known: dict[str, str] = {}
    for config, program in (("train", ""), ("eval", " of eval.py"), ("serve", " of grpo.serve")):
        blocks = key_blocks(config)
        for name in (name for name in blocks if blocks[name] != known.get(name)):
            text += f"\n## {name}{program}\n\n```text\n{blocks[name]}\n```\n"
        known |= blocks
    return text


def systems_page() -> str:
    """The tables of other systems, and the features that were compared."""
    features = yaml.safe_load((ROOT / "tests/parity/commands.yaml").read_text(encoding="utf-8"))["features"].values()
    lines = "".join(f"| {text} |\n" for text in features if " | " in text)
    tables = re.sub(r"(?<=]\()(?=[a-z_]+\.md)", "../", printed())
    text = f"`python -m grpo.from_trl --table` prints these tables; [more](../migration.md).\n\n{tables}\n\n"
    return f"{text}## Features\n\n| feature | here |\n|---|---|\n{lines}"


def checks_page() -> str:
    """The checks of the preflight: what must hold, as their docstrings say."""
    rows = "".join(
        f"| {name} | {' '.join((check.__doc__ or '').split())} |\n" for name, check in (CHECKS | TAUGHT).items()
    )
    return f"The preflight makes these checks; [more](../preflight.md).\n\n| check | must hold |\n|---|---|\n{rows}"


def reference_pages() -> dict[str, str]:
    metrics = f"`python -m grpo.system.metrics` prints this table.\n\n{metric_table()}\n"
    pages = {
        "checks": ("Checks of the preflight", checks_page()),
        "keys": ("Reference of keys", keys_page()),
        "metrics": ("Reference of metrics", metrics),
        "systems": ("Settings of TRL, verl, OpenRLHF, rolo, Atropos and rl-max", systems_page()),
        "grading": (
            "Which answers are equal",
            f"The tests hold these cases; [the rules](../grading.md).\n\n{cases_table()}",
        ),
    }
    for name, title in zip(TABLES, ("Models, measured", "Values of files of rows"), strict=True):
        text = (ROOT / name).read_text(encoding="utf-8").replace("../../docs/", "../")
        pages[PurePosixPath(TABLES[name]).stem] = (title, text)
    return {f"reference/{name}.md": f"{LATE}# {title}\n\n{text}" for name, (title, text) in pages.items()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the API pages into the navigation."""
    for entry in config.nav:
        if "API" in entry:
            entry["API"] = ["api/index.md", *(f"api/{PurePosixPath(room).name}.md" for room in [*rooms(), "tasks"])]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that no file in docs/ holds."""
    texts = api_pages() | reference_pages()
    for source, page in PAGES.items():
        texts[page] = (ROOT / source).read_text(encoding="utf-8")
    for name in linked():
        fence = LANGUAGES.get(Path(name).suffix, "text")
        texts[f"source/{name}.md"] = (
            f"---\nsearch: {{exclude: true}}\n---\n# {name}\n\n````{fence}\n{(ROOT / name).read_text(encoding='utf-8')}\n````\n"
        )
    for page, text in texts.items():
        files.append(File.generated(config, page, content=text))
    return files


def linked() -> set[str]:
    """Files of the repository that a page links to and that have no page of their own."""
    found = set()
    for page in [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in PAGES)]:
        for target, _ in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
            file = (page.parent / target).resolve()
            if file.is_file() and file.is_relative_to(ROOT):
                name = str(file.relative_to(ROOT))
                if destination(name, "") == f"source/{name}.md":
                    found.add(name)
    return found


def destination(name: str, anchor: str) -> str:
    """Where the site shows a file of the repository."""
    path = PurePosixPath(name)
    if name == "grpo/extras/preflight/__init__.py":
        return "reference/checks.md"
    if name in PAGES | TABLES:
        return (PAGES | TABLES)[name] + anchor
    if path.parts[0] == "docs":
        return str(path.relative_to("docs")) + anchor
    if path.suffix == ".py" and path.parts[0] == "grpo" and len(path.parts) > 2 and path.name != "__main__.py":
        page = path.parts[2 if path.parts[1] == "extras" else 1]
        return f"api/{page}.md#{'.'.join(path.with_suffix('').parts).removesuffix('.__init__')}"
    return f"source/{name}.md"


def on_page_markdown(markdown: str, page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to files of the repository to their place on the site."""
    uri = page.file.src_uri
    if uri.startswith(("api/", "source/", "reference/")):
        return markdown
    at_root = uri in PAGES.values()
    folder = ROOT if at_root else ROOT / "docs"

    def moved(match: re.Match) -> str:
        target, anchor = match[1], match[2] or ""
        file = (folder / target).resolve()
        inside = file.is_relative_to(ROOT) and file.is_file()
        return destination(str(file.relative_to(ROOT)), anchor) if inside else match[0]

    blocks: list[str] = []

    def kept(match: re.Match) -> str:
        blocks.append(match[0])
        return f"\0{len(blocks) - 1}\0"

    text = LINK.sub(moved, FENCED.sub(kept, markdown))
    return re.sub(r"\0(\d+)\0", lambda match: blocks[int(match[1])], text)


def breakable(match: re.Match) -> str:
    """Let a long name in inline code go on in the next line after a sign, not inside a word."""
    words = re.split(r"(<[^>]*>|\s+|&\w+;)", match[2])  # tags, blanks and entities stay as they are
    cut = (w if w[:1] in "<&" else re.sub(r"(?<=\w)(?=[\[{(])|(?<=[./=,_:)}\]])(?=\w)", "<wbr>", w) for w in words)
    whole = re.sub(r"[\w-]*-[\w-]*(?![^<]*>)", r'<span class="whole">\g<0></span>', "".join(cut))  # --help
    return match[1] + whole + match[3]


def on_page_content(content: str, page, config: MkDocsConfig, files: Files) -> str:
    """Formulas become MathML, which browsers draw without a script; inline code may be broken after its signs."""

    def formula(match: re.Match) -> str:
        text = html.unescape(match[2]).strip()
        block = match[1] == "div"
        return convert(text[2:-2], display="block" if block else "inline")

    content = re.sub(r'<(span|div) class="arithmatex">(.*?)</\1>', formula, content, flags=re.S)
    parts = re.split(r"(<pre\b.*?</pre>)", content, flags=re.S)
    parts[::2] = [re.sub(r"(<code>)(.*?)(</code>)", breakable, part, flags=re.S) for part in parts[::2]]
    return "".join(parts)
