"""An encyclopaedia of cities (one text file each) and an index of papers (JSON)."""

from __future__ import annotations

import json
from typing import Any

from experiments.exp_7_16_aworld.tool import Place, Server, ToolError

encyclopaedia = Server("encyclopaedia", "Articles about cities.")
papers = Server("papers", "An index of papers: author, year, citations.")


def entry(place: Place, title: str) -> dict[str, str]:
    """The fields of an article. ToolError where there is no such article."""
    if not title.isalnum():
        raise ToolError("no such article")
    lines = place.path(f"encyclopaedia/{title}.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split(": ", 1) for line in lines)


@encyclopaedia.tool()
def fact(place: Place, title: str, field: str) -> str:
    """One field of an article: population, height or area."""
    found = entry(place, title)
    if field not in found:
        raise ToolError("no such field")
    return found[field]


@encyclopaedia.tool(cost=2)
def article(place: Place, title: str) -> str:
    """A whole article."""
    return "; ".join(f"{name} {value}" for name, value in entry(place, title).items())


@encyclopaedia.tool()
def fields(place: Place, title: str) -> str:
    """Names of the fields of an article."""
    return "; ".join(entry(place, title))


@encyclopaedia.tool()
def titles(place: Place) -> str:
    """Titles of all articles."""
    return "; ".join(name.removesuffix(".txt") for name in place.names("encyclopaedia"))


@encyclopaedia.tool(cost=3)
def largest(place: Place, field: str) -> str:
    """The article with the largest value of a field."""
    values = {name[:-4]: entry(place, name[:-4]).get(field, "") for name in place.names("encyclopaedia")}
    numbers = {name: int(value) for name, value in values.items() if value.isdigit()}
    if not numbers:
        raise ToolError("no such field")
    return max(numbers, key=lambda name: numbers[name])


def index(place: Place) -> dict[str, dict[str, Any]]:
    """Paper number -> author, year, citations."""
    return json.loads(place.path("papers.json").read_text(encoding="utf-8"))


def paper_of(place: Place, paper: str) -> dict[str, Any]:
    """The entry of a paper. ToolError where there is none."""
    found = index(place).get(paper)
    if found is None:
        raise ToolError("no such paper")
    return found


@papers.tool()
def author(place: Place, name: str) -> str:
    """Numbers of the papers of an author."""
    return "; ".join(number for number, paper in index(place).items() if paper["author"] == name) or "nothing found"


@papers.tool(needs="papers.author")
def cited(place: Place, paper: str) -> str:
    """How often a paper is cited."""
    return str(paper_of(place, paper)["cited"])


@papers.tool(needs="papers.author")
def year(place: Place, paper: str) -> str:
    """The year of a paper."""
    return str(paper_of(place, paper)["year"])


@papers.tool(cost=2)
def show(place: Place, paper: str) -> str:
    """A paper's whole entry."""
    return "; ".join(f"{name} {value}" for name, value in paper_of(place, paper).items())


@papers.tool(cost=2)
def top(place: Place) -> str:
    """The paper that is cited most."""
    found = index(place)
    return max(found, key=lambda number: found[number]["cited"])
