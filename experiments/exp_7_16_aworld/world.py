"""A generated world: people, companies and cities, and what the files of its folder say about them.

A world is a function of its number; the splits of the experiment are ranges of numbers. Its folder holds real files, each
written by the library that its format belongs to (or, for PDF, PNG and WAV, by servers.office and servers.media).
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from common.files import strict_json
from common.seeding import python_random
from experiments.exp_7_16_aworld.servers.desk import DAYS
from experiments.exp_7_16_aworld.servers.media import make_png, make_wav
from experiments.exp_7_16_aworld.servers.office import make_docx, make_pdf, make_pptx, make_xlsx

PEOPLE = (
    "Ada", "Bruno", "Clara", "Dario", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Leo", "Mira", "Nils",
    "Olga", "Pavel", "Rosa", "Sven", "Tilda", "Viktor",
)  # fmt: skip
COMPANIES = ("Acme", "Borealis", "Cobalt", "Delta", "Ember", "Fathom", "Granite", "Helix", "Indigo", "Juno", "Kite", "Lumen")
CITIES = ("Athens", "Bergen", "Cadiz", "Dublin", "Essen", "Faro", "Genoa", "Haifa", "Izmir", "Jena")
YEARS = (2019, 2020, 2021, 2022)
SHEETS = ("2021", "2022")
COLOURS = ((255, 190, 190), (190, 255, 190), (190, 190, 255))
STAFF, SALES, MEMO, DECK, REPORT = "staff.csv", "sales.xlsx", "memo.docx", "deck.pptx", "report.pdf"
SHARES = {"people": 6, "companies": 5, "cities": 5}
NUMBERS = range(10, 100)


@dataclass(frozen=True)
class Person:
    name: str
    age: int
    city: str
    employer: str
    page: str
    paper: str
    paper_year: int
    cited: int
    day: str


@dataclass(frozen=True)
class Company:
    """``past``: who led it in each year of the archive. ``units``: sold, per sheet. ``price``: on its picture; ``code``: in
    its sound."""

    name: str
    leader: str
    city: str
    earned: int
    price: int
    code: int
    page: str
    past: dict[str, str]
    units: dict[str, int]


@dataclass(frozen=True)
class World:
    """All facts of a world. ``cities``: city -> field -> number."""

    number: int
    people: dict[str, Person]
    companies: dict[str, Company]
    cities: dict[str, dict[str, int]]

    @property
    def digest(self) -> str:
        """Hash of all facts."""
        return hashlib.sha256(strict_json(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@functools.lru_cache(512)
def make_world(number: int) -> World:
    """The world of that number."""
    stream = python_random("aworld", number)

    def some(names: tuple[str, ...], kind: str) -> list[str]:
        return stream.sample(names, SHARES[kind])

    people, companies, cities = some(PEOPLE, "people"), some(COMPANIES, "companies"), some(CITIES, "cities")
    pages = [f"p{page}" for page in range(1, len(people) + len(companies) + 1)]
    stream.shuffle(pages)
    papers = [f"k{paper}" for paper in stream.sample(range(1, 30), len(people))]
    leaders = stream.sample(people, len(companies))

    def value() -> int:
        return stream.choice(NUMBERS)

    found = {
        name: Person(
            name, value(), stream.choice(cities), stream.choice(companies), pages.pop(), papers.pop(),
            stream.choice(YEARS), value(), stream.choice(DAYS),
        )
        for name in people
    }  # fmt: skip
    firms = {
        name: Company(
            name, leaders.pop(), stream.choice(cities), value(), value(), value(), pages.pop(),
            {str(year): stream.choice(people) for year in YEARS}, {sheet: value() for sheet in SHEETS},
        )
        for name in companies
    }  # fmt: skip
    places = {name: {field: value() for field in ("population", "height", "area")} for name in cities}
    return World(number, found, firms, places)


def html(title: str, text: str, links: list[str] | None = None) -> str:
    """A page."""
    anchors = "".join(f'<a href="{link}.html">{link}</a>' for link in links or [])
    return f"<!doctype html>\n<html><head><title>{title}</title></head>\n<body><p>{text}</p>{anchors}</body></html>\n"


def texts(world: World) -> dict[str, str]:
    """Path -> content of the text files."""
    people, companies = world.people.values(), world.companies.values()
    files = {f"site/{p.page}.html": html(p.name, f"{p.name} works at {p.employer}.") for p in people}
    for company in companies:
        staff = [p.page for p in people if p.employer == company.name]
        text = f"{company.name} is led by {company.leader}."
        files[f"site/{company.page}.html"] = html(company.name, text, staff)
        for year, leader in company.past.items():
            text = f"{company.name} was led by {leader} in {year}."
            files[f"archive/{company.name}/{year}.html"] = html(company.name, text)
    files["site/p0.html"] = html("Home", "Companies and people.", [company.page for company in companies])
    for city, fields in world.cities.items():
        files[f"encyclopaedia/{city}.txt"] = "".join(f"{name}: {value}\n" for name, value in fields.items())
    files["papers.json"] = json.dumps({p.paper: {"author": p.name, "year": p.paper_year, "cited": p.cited} for p in people})
    files["calendar.json"] = json.dumps({p.name: p.day for p in people})
    files[STAFF] = "name,age,city\n" + "".join(f"{p.name},{p.age},{p.city}\n" for p in people)
    files["notes.txt"] = "".join(f"{company.name} {company.page}\n" for company in companies)
    return files


def write_world(world: World, folder: Path) -> None:
    """Writes all files of a world below the folder."""
    companies = world.companies.values()
    files: dict[str, bytes] = {path: text.encode() for path, text in texts(world).items()}
    rows = {sheet: [["company", "units"], *([c.name, str(c.units[sheet])] for c in companies)] for sheet in SHEETS}
    files[SALES] = make_xlsx(rows)
    files[MEMO] = make_docx([f"{c.name} is led by {c.leader}." for c in companies])
    files[DECK] = make_pptx([f"{c.name} sits in {c.city}." for c in companies])
    files[REPORT] = make_pdf([f"{c.name} earned {c.earned}." for c in companies])
    for number, c in enumerate(companies):
        files[f"{c.name}.png"] = make_png(f"{c.name} costs {c.price}", COLOURS[(world.number + number) % 3])
        files[f"{c.name}.wav"] = make_wav(str(c.code))
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def world_folder(root: Path, number: int) -> Path:
    """Where a world lies below the folder of all worlds."""
    return root / f"w{number}"
