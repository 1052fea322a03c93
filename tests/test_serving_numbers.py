"""Numbers in schemas: llguidance rounds large ones, and some of them end its process."""

import json
from typing import Any

import pytest

from moecache.errors import ConfigError
from tests.helpers.pages import run_child

pytest.importorskip("llguidance")

from moecache.serving.grammars import Grammar
from moecache.serving.schema_numbers import without_numbers

BEYOND: dict[str, Any] = {"minimum": -1e300, "maximum": -(2**63)}
NUMBER = {"type": "number", **BEYOND}
# Each of these alone ends a process, by SIGSEGV.
DEADLY: list[dict[str, Any]] = [
    {"type": "integer", **BEYOND},
    {"type": "integer", "exclusiveMinimum": -(2**64), "exclusiveMaximum": -1e19},
    {"type": ["integer", "null"], **BEYOND},
    {"properties": {"minimum": {"type": "integer", **BEYOND}}, "required": ["minimum"]},
    {"type": "integer", "allOf": [NUMBER]},
    {"type": "integer", "anyOf": [NUMBER]},
    {"type": "integer", "$ref": "#/$defs/const", "$defs": {"const": NUMBER}},
    {"$ref": "#/x", "x": {"type": "integer", **BEYOND}},
    {
        "properties": {"a": {"type": "integer"}},
        "patternProperties": {"a": NUMBER},
        "required": ["a"],
    },
    {"const": -(2**63)},
    {"type": "integer", "enum": [1 - 2**63]},
    {"type": "integer", "const": -1e19},
]
# Reads lines of JSON; writes what becomes of each.
_COMPILE = """
import json
from llguidance import LLMatcher, LLTokenizer
from moecache.errors import ConfigError
from moecache.serving.errors import RequestError

tokens = LLTokenizer("byte")

def compiled(read):
    for line in sys.stdin:
        try:
            matcher = LLMatcher(tokens, read(json.loads(line)).source, log_level=0)
        except (ConfigError, RequestError) as error:
            print(json.dumps(["refused", str(error)]), flush=True)
        else:
            matcher.compute_logit_bias()
            print(json.dumps(["made", matcher.get_error()]), flush=True)
"""
_OF_REQUEST = """
from moecache.serving.requests import read_request

def asked(**fields):
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return read_request(json.dumps(body).encode(), chat=True, models=("m",))

def of_format(schema, strict):
    inner = {"name": "x", "schema": schema, "strict": strict}
    return asked(response_format={"type": "json_schema", "json_schema": inner}).grammar
"""
_OF_OPTION = "from moecache.commands.grammar import read_grammar"
WAYS = {
    "response_format": f"{_OF_REQUEST}\ncompiled(lambda schema: of_format(schema, True))",
    "lenient": f"{_OF_REQUEST}\ncompiled(lambda schema: of_format(schema, False))",
    "tools": f"""{_OF_REQUEST}
from types import SimpleNamespace
from moecache.integrations.answer_parts import format_of
known = format_of(SimpleNamespace(chat_template='<tool_call>"arguments"'))

def of_tool(schema):
    tool = {{"type": "function", "function": {{"name": "f", "parameters": {{
        "type": "object", "properties": {{"a": schema}}, "required": ["a"],
        **{{key: schema[key] for key in ("$defs", "x") if key in schema}},
    }}}}}}
    return asked(tools=[tool], tool_choice="required").tools.grammar(known, {{}})

compiled(of_tool)""",
    "grammar": _OF_REQUEST
    + "\ncompiled(lambda s: asked(grammar='start: a\\na: %json ' + json.dumps(s)).grammar)",
    "--json-schema": f"{_OF_OPTION}\n"
    "compiled(lambda schema: read_grammar('--json-schema', json.dumps(schema)))",
    "--grammar": f"{_OF_OPTION}\n"
    "compiled(lambda s: read_grammar('--grammar', 'start: %json\\n' + json.dumps(s)))",
}


@pytest.mark.parametrize("way", WAYS)
def test_no_schema_ends_the_process(way: str) -> None:
    """Numbers that would are refused by name, or left out where keywords are."""
    lines = "".join(f"{json.dumps(schema)}\n" for schema in DEADLY)
    child = run_child(f"{_COMPILE}\n{WAYS[way]}", stdin=lines)
    assert child.returncode == 0, (child.stdout, child.stderr[-1000:])
    found = [json.loads(line) for line in child.stdout.splitlines()]
    assert len(found) == len(DEADLY)
    for schema, (what, message) in zip(DEADLY, found, strict=True):
        if way in ("lenient", "tools"):
            assert (what, message) == ("made", ""), schema
        else:
            assert what == "refused", schema
            assert "2**53" in message
            assert "leave it out" in message


@pytest.mark.parametrize(
    ("bound", "told"),
    [
        ('"maximum": 9007199254740993', "schema has maximum 9007199254740993,"),
        ('"minimum": -1e300', "has minimum -1e\\+300,"),
        ('"exclusiveMaximum": Infinity', "has exclusiveMaximum inf,"),
        ('"exclusiveMinimum": NaN', "has exclusiveMinimum nan,"),
        (f'"maximum": {"9" * 5000}', "has maximum 1e30 or beyond,"),
        (f'"minimum": -{"9" * 5000}', "has minimum -1e30 or beyond,"),
        ('"m\\u0069nimum": 1e16', "has minimum 1e\\+16,"),
        ('"enum": [1, {"id": [9007199254740993]}]', "has enum 9007199254740993,"),
    ],
)
def test_a_number_that_is_rounded_is_told(bound: str, told: str) -> None:
    """However it is written, and by its keyword."""
    with pytest.raises(ConfigError, match=told) as refused:
        Grammar.of_lark(f'start: "a" b\nb: %json  {{"type": "integer", {bound}}}', "schema")
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": -(2**53), "maximum": 2**53},
        {"type": "number", "minimum": 0, "maximum": 1e18},
        {"properties": {"minimum": {"const": 1}, "const": {"type": "number", "maximum": 2**60}}},
        {"minimum": 1, "exclusiveMaximum": True},
        {"const": {"minimum": 5, "enum": [1.5, "9007199254740993"]}},
    ],
)
def test_what_can_be_held_is_taken(schema: dict[str, Any]) -> None:
    """Names of properties and texts are no bounds; numbers have any."""
    Grammar.of_schema(schema, "schema")
    assert without_numbers(schema) == schema


def test_a_caller_keeps_its_schema() -> None:
    """What is left out is missing in a copy."""
    schema = {"properties": {"a": {"type": "integer", "enum": [2**60]}}, "items": [dict(BEYOND)]}
    before = json.dumps(schema)
    part = Grammar.schema_part(schema, is_lenient=True)
    assert json.dumps(schema) == before
    assert '"a": {"type": "integer"}' in part
    assert '"items": [{}]' in part
