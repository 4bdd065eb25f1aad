"""What MkDocs does not do by itself: pages that are made from files outside docs/, and links to such files.

The changelog and the notebooks become pages. A link from a page to another file of the repository becomes one to the
repository's address, `Source` in pyproject.toml's `[project.urls]`; without that address it becomes plain text.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[([^\[\]]*)\]\((?!\w+:|#)([^)#]+)(#[^)]*)?\)")


def source_address() -> str | None:
    """Where the repository is, as pyproject.toml says; None if it does not."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    return str(urls["Source"]).rstrip("/") if "Source" in urls else None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the changelog and the notebooks as pages."""
    changes = (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=changes))
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        text, pictures = page_of(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files


def page_of(notebook: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by name."""
    parts, pictures = [], {}
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```py\n{source}\n```")
        for output in cell["outputs"]:
            data: dict[str, Any] = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"{notebook.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![What the code above draws]({name})")
            else:
                parts.append("```text\n" + "".join(data["text/plain"]).rstrip() + "\n```")
    parts.append(f"This page was made from the notebook [{notebook.name}](../../examples/{notebook.name}).")
    return "\n\n".join(parts) + "\n", pictures


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave docs/ to the repository, and those to notebooks to their pages."""
    here = posixpath.dirname(page.file.src_uri)

    def address(link: re.Match[str]) -> str:
        text, target = link[1], posixpath.normpath(posixpath.join("docs", here, link[2]))
        anchor = link[3] or ""
        if target.startswith("docs/"):
            return link[0]
        name = posixpath.basename(target)
        if name.endswith(".ipynb") and here != "notebooks":
            return f"[{text}](notebooks/{name.removesuffix('.ipynb')}.md{anchor})"
        repository = source_address()
        if repository is None:
            return text
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"[{text}]({repository}/{kind}/main/{target}{anchor})"

    return LINK.sub(address, markdown)
