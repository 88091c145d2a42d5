"""Reads the pages of spec/ as the tests need them: sections, tables, indented blocks."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

SPEC = Path(__file__).parents[2] / "spec"
PAGES = sorted(path.name for path in SPEC.glob("*.md"))
MINUS = "−"


@lru_cache
def text(name: str) -> str:
    return (SPEC / name).read_text("utf-8")


@lru_cache
def sections(name: str) -> dict[str, str]:
    """Section number ("2", "7.1") -> body without the heading; a section includes its subsections."""
    found: dict[str, str] = {}
    headings = list(re.finditer(r"^(##+) ([0-9]+(?:\.[0-9]+)*)\.? .*$", text(name), re.MULTILINE))
    for index, heading in enumerate(headings):
        following = (h.start() for h in headings[index + 1 :] if len(h[1]) <= len(heading[1]))
        found[heading[2]] = text(name)[heading.end() : next(following, None)]
    return found


def tables(body: str) -> list[list[list[str]]]:
    """All tables of a text, each a list of rows of cells, without heading and rule."""
    found, rows = [], []
    for line in [*body.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif rows:
            found.append(rows[2:])
            rows = []
    return found


def table(name: str, section: str, index: int = 0) -> list[list[str]]:
    return tables(sections(name)[section])[index]


def indented(body: str) -> list[str]:
    """Runs of lines that are indented by four blanks, each joined to one line."""
    return [" ".join(run.split()) for run in re.findall(r"(?:^    .*\n?)+", body, re.MULTILINE)]


def code(cell: str) -> str:
    """A cell without its backticks."""
    return cell.strip("`")


def number(cell: str) -> float:
    return float(cell.replace(MINUS, "-").replace(",", ""))


def integers(cell: str) -> list[int]:
    return [int(item) for item in cell.replace(MINUS, "-").split()]


def words(cell: str) -> list[int]:
    """Hex numbers that are separated by blanks."""
    return [int(item, 16) for item in cell.split()]


def flat(body: str) -> str:
    """The text with all white space made single blanks."""
    return " ".join(body.split())
