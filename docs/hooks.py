"""Hooks of MkDocs: reference pages from the packages, and links to source files."""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(path.parent for path in (ROOT / "te_models").rglob("__init__.py"))
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+)([^)#]*)(#[^)]*)?\)")


def _name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def _page(package):
    """Return the reference page of a package: one section per module."""
    modules = [
        package,
        *(path for path in sorted(package.glob("*.py")) if not path.stem.startswith("_")),
    ]
    return (
        f"# {_name(package)}\n\n" + "\n\n".join(f"::: {_name(module)}" for module in modules) + "\n"
    )


def on_config(config):
    """Add the reference pages to the navigation."""
    reference = next(entry["Reference"] for entry in config.nav if "Reference" in entry)
    reference += [f"reference/{_name(package)}.md" for package in PACKAGES]
    return config


def on_files(files, config):
    """Generate the reference pages."""
    for package in PACKAGES:
        files.append(
            File.generated(config, f"reference/{_name(package)}.md", content=_page(package))
        )
    return files


def on_page_markdown(markdown, page, **_):
    """Point links to modules at their reference, and turn links to other files outside docs/ into text."""
    here = posixpath.dirname(page.file.src_uri)

    def rewrite(link):
        text, up, target, _ = link.groups()
        path = posixpath.normpath(posixpath.join("docs", here, up, target))
        if path.startswith("docs/"):
            return link[0]
        module = ROOT / path
        if (
            not path.startswith("te_models")
            or module.suffix not in ("", ".py")
            or module.stem.startswith("_")
        ):
            return text
        package = module.parent if module.suffix else module
        return (
            f"[{text}]({posixpath.relpath(f'reference/{_name(package)}.md', here)}#{_name(module)})"
        )

    return LINK.sub(rewrite, markdown)
