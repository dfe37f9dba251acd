"""Is an answer right? Exact match and F1 as question answering usually measures them.

Both compare normalised answers: without case, punctuation, articles and superfluous white space (Rajpurkar et al.,
"SQuAD: 100,000+ Questions for Machine Comprehension of Text", 2016, section 6.1).
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)


def normalise(answer: str) -> str:
    """The part of an answer that counts. Of one that is nothing but punctuation and articles, all but the case."""
    lowered = unicodedata.normalize("NFC", answer).lower()
    kept = "".join(char for char in lowered if not _is_punctuation(char))
    return " ".join(_ARTICLE.sub(" ", kept).split()) or " ".join(lowered.split())


def _is_punctuation(char: str) -> bool:
    """ASCII's, and the like of typographic quotation marks."""
    return char in _PUNCTUATION or unicodedata.category(char).startswith("P")


def exact_match(answer: str, golds: Iterable[str]) -> bool:
    """True when the answer is one of the right ones."""
    given = normalise(answer)
    return bool(given) and any(given == normalise(gold) for gold in golds)


def f1(answer: str, golds: Iterable[str]) -> float:
    """Harmonic mean of precision and recall in words, against the gold answer that it fits best: 0..1."""
    return max((_f1(normalise(answer).split(), normalise(gold).split()) for gold in golds), default=0.0)


def _f1(given: list[str], gold: list[str]) -> float:
    common = sum((Counter(given) & Counter(gold)).values())
    return 2 * common / (len(given) + len(gold)) if common else 0.0
