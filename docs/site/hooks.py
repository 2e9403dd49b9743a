"""Hooks of the site's build (mkdocs.yml): README as first page, API pages by room, source pages, formulas as MathML.

A page links to files of the repository as GitHub wants it. On the site such a link leads to the module's place in the API, or to
a page that shows the file.
"""

import html
import re
from pathlib import Path, PurePosixPath

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".ipynb": "json", ".md": "markdown"}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]+)?(?=\))")
FENCED = re.compile(r"^```.*?^```", re.S | re.M)


def rooms() -> dict[str, str]:
    """Room -> its sentence in the map of grpo/__init__.py."""
    text = (ROOT / "grpo" / "__init__.py").read_text(encoding="utf-8")
    return dict(re.findall(r"^    ([a-z]+) {2,}(\S.*)$", text.partition("The core")[0], re.M))


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
        texts[f"api/{room}.md"] = f"# {room}\n\n{sentence[0].upper()}{sentence[1:].rstrip('.')}.\n\n{blocks}\n"
    rows = "\n".join(f"| [{room}]({room}.md) | {sentence} |" for room, sentence in pages.items())
    texts["api/index.md"] = f"# API\n\nOne page for each room of the code.\n\n| room | contents |\n|---|---|\n{rows}\n"
    return texts


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the API pages into the navigation."""
    for entry in config.nav:
        if "API" in entry:
            entry["API"] = ["api/index.md", *(f"api/{room}.md" for room in [*rooms(), "tasks"])]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that no file in docs/ holds."""
    texts = api_pages()
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
    if name in PAGES:
        return PAGES[name] + anchor
    if path.parts[0] == "docs":
        return str(path.relative_to("docs")) + anchor
    if path.suffix == ".py" and path.parts[0] == "grpo" and len(path.parts) > 2 and path.name != "__main__.py":
        return f"api/{path.parts[1]}.md#{'.'.join(path.with_suffix('').parts).removesuffix('.__init__')}"
    return f"source/{name}.md"


def on_page_markdown(markdown: str, page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to files of the repository to their place on the site."""
    uri = page.file.src_uri
    if uri.startswith(("api/", "source/")):
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


def on_page_content(content: str, page, config: MkDocsConfig, files: Files) -> str:
    """Formulas become MathML, which browsers draw without a script."""

    def formula(match: re.Match) -> str:
        text = html.unescape(match[2]).strip()
        block = match[1] == "div"
        return convert(text[2:-2], display="block" if block else "inline")

    return re.sub(r'<(span|div) class="arithmatex">(.*?)</\1>', formula, content, flags=re.S)
