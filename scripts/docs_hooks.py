"""Hooks of MkDocs: measured results and examples become pages of the site, and links lead to them.

The pages in `docs/` are written to be read in the repository, where they link to results, examples and source files.
Results and examples are pages of the site too; links to anything else that is outside of `docs/` become plain text.
"""

import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
RESULTS, EXAMPLES = ROOT / "benchmarks" / "results", ROOT / "examples"
LINK_OR_CODE = re.compile(r"(?P<code>`+[^`]+`+)|(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    nav = config.nav or []
    known = json.dumps(nav)
    more = [path.name for path in sorted((ROOT / "docs").glob("*.md")) if f'"{path.name}"' not in known]
    if more:
        nav.append({"More": more})
    others = [f"examples/{path.stem}.md" for path in sorted(EXAMPLES.iterdir()) if path.suffix in (".py", ".ipynb")]
    nav.append({"Examples": [page for page in others if f'"{page}"' not in known]})
    nav.append({"Results": [{path.stem: f"results/{path.name}"} for path in sorted(RESULTS.glob("*.md"))]})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in sorted(RESULTS.iterdir()):
        if path.suffix in (".md", ".png"):
            files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    for path in sorted(EXAMPLES.iterdir()):
        if path.suffix in (".py", ".ipynb"):
            files.append(File.generated(config, f"examples/{path.stem}.md", content=example_as_page(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    home = source_of(uri).parent
    lines, is_code = [], False
    for line in markdown.splitlines():
        if line.lstrip().startswith("```"):
            is_code = not is_code
        lines.append(line if is_code else LINK_OR_CODE.sub(lambda match: moved(match, home, uri, files), line))
    return "\n".join(lines)


def moved(match: re.Match[str], home: Path, uri: str, files: Files) -> str:
    """The link as the site has it; plain text where the site has no such page."""
    target = match["target"]
    if match["code"] or target.startswith("#") or "://" in target:
        return match[0]
    path, _, anchor = target.partition("#")
    found = uri_of((home / path).resolve())
    if found is None or files.get_file_from_path(found) is None:
        return match["text"]
    link = posixpath.relpath(found, posixpath.dirname(uri) or ".")
    return f"{match['image']}[{match['text']}]({link}{anchor and f'#{anchor}'})"


def source_of(uri: str) -> Path:
    """The file in the repository that a page is made of."""
    folder, _, name = uri.partition("/")
    if folder == "results":
        return RESULTS / name
    return EXAMPLES / name if folder == "examples" else ROOT / "docs" / uri


def uri_of(path: Path) -> str | None:
    """The page that a file of the repository becomes; None for one that becomes none."""
    if path == ROOT / "README.md":
        return "index.md"
    if path.parent == RESULTS:
        return f"results/{path.name}"
    if path.parent == EXAMPLES:
        return f"examples/{path.stem}.md"
    return path.relative_to(ROOT / "docs").as_posix() if path.is_relative_to(ROOT / "docs") else None


def example_as_page(path: Path) -> str:
    """A script, or the cells of a notebook without outputs."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return f"# {path.stem}.py\n\n```python\n{text}```\n"
    cells = json.loads(text)["cells"]
    texts = (("".join(cell["source"]), cell["cell_type"]) for cell in cells)
    return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for text, kind in texts) + "\n"
