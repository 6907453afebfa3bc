"""Search and browser over the local site, and the archive of its earlier states. Pages are real HTML files."""

from __future__ import annotations

import functools
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

from experiments.exp_7_16_aworld.tool import Place, Server, ToolError

search = Server("search", "Finds pages of the local site.")
browser = Server("browser", "Opens pages of the local site as they are today.")
archive = Server("archive", "Earlier states of the pages of companies, by year.")
MOST_HITS = 4


class Page(NamedTuple):
    title: str
    text: str
    links: tuple[str, ...]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.title, self.paragraphs, self.links, self.inside = "", list[str](), list[str](), ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        if tag == "a":
            self.links += [value for key, value in attrs if key == "href" and value]

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "title":
            self.title = data
        elif self.inside == "p":
            self.paragraphs.append(data)


@functools.lru_cache(4096)
def read_page(path: Path) -> Page:
    """Title, text and links of an HTML file."""
    reader = _Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return Page(reader.title, " ".join(reader.paragraphs), tuple(reader.links))


def site(place: Place) -> dict[str, Page]:
    """All pages by number."""
    names = sorted(place.names("site"), key=lambda name: int(name[1:-5]))
    return {name[:-5]: read_page(place.path(f"site/{name}")) for name in names}


def page_of(place: Place, page: str) -> Page:
    """The page of that number. ToolError where there is none."""
    found = site(place).get(page)
    if found is None:
        raise ToolError("no such page")
    return found


def hits(place: Place, words: str) -> list[str]:
    """Numbers of the pages that hold all the words; those with them in the title first."""
    wanted = set(words.lower().split())
    if not wanted:
        raise ToolError("no words")
    pages = site(place)
    found = [
        name for name, page in pages.items() if wanted <= set(f"{page.title} {page.text}".lower().replace(".", "").split())
    ]
    return sorted(found, key=lambda name: not wanted <= set(pages[name].title.lower().split()))


@search.tool()
def find(place: Place, words: str) -> str:
    """Pages that hold all the words, as number and title; those with the words in their title first."""
    pages = site(place)
    return "; ".join(f"{name} {pages[name].title}" for name in hits(place, words)[:MOST_HITS]) or "nothing found"


@search.tool()
def count(place: Place, words: str) -> str:
    """How many pages hold all the words."""
    return str(len(hits(place, words)))


@search.tool()
def titles(place: Place, start: str) -> str:
    """Titles that begin like this."""
    return "; ".join(page.title for page in site(place).values() if page.title.startswith(start)) or "nothing found"


@browser.tool(needs="search.find", excludes=("archive.open",))
def open_(place: Place, page: str) -> str:
    """The text of a page, by its number."""
    return page_of(place, page).text


@browser.tool(needs="search.find", excludes=("archive.open",))
def title(place: Place, page: str) -> str:
    """The title of a page."""
    return page_of(place, page).title


@browser.tool(needs="search.find", excludes=("archive.open",))
def links(place: Place, page: str) -> str:
    """Numbers of the pages that a page links to."""
    return "; ".join(link.removesuffix(".html") for link in page_of(place, page).links) or "none"


@browser.tool(needs="browser.open", excludes=("archive.open",))
def inside(place: Place, page: str, word: str) -> str:
    """The sentences of a page that hold a word."""
    sentences = page_of(place, page).text.split(". ")
    return ". ".join(sentence for sentence in sentences if word in sentence) or "nothing found"


@browser.tool()
def home(place: Place) -> str:
    """The text of the first page."""
    return page_of(place, "p0").text


def states(place: Place, name: str) -> dict[str, Page]:
    """The kept states of a company's page, by year. ToolError where there are none."""
    folder = f"archive/{name}"
    files = place.names(folder) if name.isalnum() else []
    if not files:
        raise ToolError("nothing kept")
    return {file[:-5]: read_page(place.path(f"{folder}/{file}")) for file in files}


@archive.tool()
def list_(place: Place, name: str) -> str:
    """Years of which the archive keeps a company's page."""
    return " ".join(states(place, name))


@archive.tool(needs="archive.list", excludes=("browser.open",))
def open__(place: Place, name: str, year: int) -> str:
    """A company's page as it was in a year."""
    found = states(place, name).get(str(year))
    if found is None:
        raise ToolError("nothing kept of that year")
    return found.text


@archive.tool(needs="archive.list")
def first(place: Place, name: str) -> str:
    """The earliest kept state of a company's page."""
    return next(iter(states(place, name).values())).text


@archive.tool(needs="archive.list")
def last(place: Place, name: str) -> str:
    """The latest kept state of a company's page."""
    return list(states(place, name).values())[-1].text


@archive.tool(cost=2, needs="archive.list")
def changes(place: Place, name: str) -> str:
    """Years in which a company's page said something new."""
    kept = [(year, page.text.replace(f" in {year}", "")) for year, page in states(place, name).items()]
    return " ".join(year for (year, text), (_, before) in zip(kept[1:], kept, strict=False) if text != before) or "none"
