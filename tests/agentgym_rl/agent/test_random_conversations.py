"""A hundred random conversations under every template; `support.conversations` says what is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.conversations import (
    SHAPES,
    check_hostile_conversations,
    check_plain_conversations,
    check_records_only_grow,
    make_case_tokenizer,
)
from support.tokenizers import FAMILIES

ALL = [*FAMILIES, *SHAPES]


def each(cases: Sequence[dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case["family"])


@each([case for case in ALL if not case["rewrites_history"]])
def test_increments_are_the_full_render_and_masks_cover_exactly_what_was_sampled(case):
    check_plain_conversations(case, make_case_tokenizer(case))


@each([case for case in ALL if not case["rewrites_history"]])
def test_so_it_is_with_a_tokenizer_that_marks_the_start_of_a_text(case):
    check_plain_conversations(case, make_case_tokenizer(case, byte_level=False))


@each(ALL)
def test_hostile_contents_and_cut_turns_leave_frame_and_mask_as_they_must_be(case):
    check_hostile_conversations(case, make_case_tokenizer(case))


@each([case for case in ALL if case["rewrites_history"]])
def test_a_template_that_rewrites_history_never_changes_what_is_recorded(case):
    check_records_only_grow(case, make_case_tokenizer(case))
