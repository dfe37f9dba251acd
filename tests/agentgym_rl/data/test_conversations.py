"""Conversation files in both forms, and errors that name row and field."""

from __future__ import annotations

import codecs
import json

import pytest

from agentgym_rl.data.conversations import (
    Conversation,
    TokenRecord,
    parse_conversation,
    parse_row,
    read_conversations,
    write_conversations,
)
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Message, Role

CONVERSATION = Conversation(
    "textcraft_5",
    (Message(Role.USER, "Goal: log\u2028."), Message(Role.ASSISTANT, "OK."), Message(Role.USER, "Go.")),
    (None, False, None),
)
ENTRY = {"from": "human", "value": "hello"}


@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_what_is_written_is_read_back(tmp_path, name):
    path = tmp_path / "new" / name
    write_conversations(path, [CONVERSATION, CONVERSATION])
    assert read_conversations(path) == [CONVERSATION, CONVERSATION]


def test_rows_have_the_published_fields():
    assert CONVERSATION.to_row() == {
        "item_id": "textcraft_5",
        "conversations": [
            {"from": "human", "loss": None, "value": "Goal: log\u2028."},
            {"from": "gpt", "loss": False, "value": "OK."},
            {"from": "human", "loss": None, "value": "Go."},
        ],
    }


@pytest.mark.parametrize("field", ["conversations", "messages"])
def test_role_and_content_are_read_as_well(field):
    row = {field: [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "loss": True}]}
    conversation = parse_conversation(row, "row 1")
    assert conversation.messages == (Message(Role.USER, "hi"), Message(Role.ASSISTANT, "yes"))
    assert conversation.train_flags == (None, True)
    assert conversation.item_id == ""


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "row 3: expected an object"),
        ({"item_id": "a"}, "row 3: field 'conversations' must be a list of messages, got None"),
        ({"conversations": []}, "must be a list of messages"),
        ({"item_id": [1], "conversations": [ENTRY]}, "field 'item_id' must be a string or an int"),
        ({"conversations": [ENTRY, "x"]}, r"row 3: conversations\[1\]: expected an object"),
        (
            {"conversations": [ENTRY, {"from": "bot", "value": ""}]},
            r"conversations\[1\]\.from='bot': must be one of human",
        ),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]\.content=None: must be a string"),
        ({"conversations": [ENTRY | {"loss": 1}]}, r"conversations\[0\]\.loss=1: must be true, false or null"),
    ],
)
def test_errors_name_row_and_field(tmp_path, row, message):
    path = tmp_path / "data.json"
    path.write_text(json.dumps([CONVERSATION.to_row()] * 2 + [row]))
    with pytest.raises(ConfigError, match=message):
        read_conversations(path)


def test_files_that_are_missing_empty_or_broken_are_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json cannot be read"):
        read_conversations(tmp_path / "none.json")
    for use in (read_conversations, lambda path: write_conversations(path, [CONVERSATION])):
        with pytest.raises(ConfigError, match=r"end in \.json or \.jsonl"):
            use(tmp_path / "data.txt")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="has no rows"):
        read_conversations(tmp_path / "empty.jsonl")
    (tmp_path / "broken.jsonl").write_text(json.dumps(CONVERSATION.to_row()) + "\n{")
    with pytest.raises(ConfigError, match="line 2 is not JSON"):
        read_conversations(tmp_path / "broken.jsonl")
    (tmp_path / "latin.json").write_bytes(b'["\xe9"]')
    with pytest.raises(ConfigError, match=r"latin\.json is not UTF-8"):
        read_conversations(tmp_path / "latin.json")
    (tmp_path / "object.json").write_text("{}")
    with pytest.raises(ConfigError, match="expected a list of rows"):
        read_conversations(tmp_path / "object.json")


@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path, name):
    write_conversations(tmp_path / name, [CONVERSATION])
    (tmp_path / name).write_bytes(codecs.BOM_UTF8 + (tmp_path / name).read_bytes())
    assert read_conversations(tmp_path / name) == [CONVERSATION]


RECORDED = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "sequence_ids": [0, 0, 1, 1]}
TWO_MESSAGES = [ENTRY, {"from": "gpt", "value": "hi"}]


@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_recorded_tokens_are_read_and_written(tmp_path, name):
    conversation = parse_row({"item_id": "a_1", "conversations": TWO_MESSAGES, **RECORDED}, "row 1")
    assert conversation.record == TokenRecord((5, 6, 7, 8), (0, 0, 1, 1), (0, 0, 1, 1))
    write_conversations(tmp_path / name, [conversation])
    assert read_conversations(tmp_path / name) == [conversation]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": None}, "row 1: field 'loss_mask' must be a list of ints from 0, got None"),
        ({"input_ids": [1, 2, -3, 4]}, "field 'input_ids' must be a list of ints from 0"),
        ({"input_ids": [1, 2]}, r"input_ids, loss_mask, sequence_ids differ in length: \[2, 4, 4\]"),
        ({"loss_mask": [1, 0, 0, 0]}, "field 'loss_mask' must hold 0 and 1, and begin with 0"),
        ({"loss_mask": [0, 0, 2, 1]}, "field 'loss_mask' must hold 0 and 1, and begin with 0"),
        ({"sequence_ids": [0, 0, 1, 3]}, "field 'sequence_ids' names message 3 of 2"),
    ],
)
def test_recorded_tokens_that_cannot_be_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        parse_row({"conversations": TWO_MESSAGES, **RECORDED, **change}, "row 1")
