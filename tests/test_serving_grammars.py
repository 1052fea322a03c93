"""Structured output: whatever a model would say, its answer is one that the request allows."""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moecache.errors import ConfigError
from tests.helpers.serving import Served, serving, write_chat_model

for package in ("torch", "transformers", "starlette", "uvicorn", "llguidance"):
    pytest.importorskip(package)
jsonschema = pytest.importorskip("jsonschema")
openai = pytest.importorskip("openai")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]
MESSAGES: Any = [{"role": "user", "content": "def main(argv=None):"}]
# ByT5's tokens are the bytes, three further on; the logits are wider than that.
END, FIRST_BYTE, NUM_LOGITS = 1, 3, 400
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"enum": [1, 20]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(name="tokenizer", scope="module")
def _tokenizer(tiny_moe: Path) -> Any:
    from moecache.integrations.transformers import generation

    return generation.load_tokenizer(str(tiny_moe))


@pytest.fixture(name="masked", scope="module")
def _masked(tokenizer: Any) -> Callable[..., Any]:
    from moecache.serving.grammars import Grammars

    grammars = Grammars(NUM_LOGITS, [END])

    def masked(grammar: Any) -> Any:
        return grammars.compile(grammar, tokenizer).new_mask()

    return masked


@pytest.fixture(name="served", scope="module")
def _served(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = write_chat_model(tiny_moe, tmp_path_factory.mktemp("served") / "tiny")
    with serving(directory, parallel=2) as served:
        yield served


def chat(client: Any, **options: Any) -> Any:
    """Ask for an answer."""
    options = {"temperature": 1, "seed": 3, "max_tokens": 80, **options}
    return client.chat.completions.create(model="tiny", messages=MESSAGES, **options)


def said(answer: Any) -> list[str]:
    """Return the texts of an answer's choices."""
    return [choice.message.content for choice in answer.choices]


def spoken(mask: Any, seed: int, *, temperature: float = 1.0, most: int = 400) -> str | None:
    """Return a text of random tokens that a mask lets through; `None` if it does not end."""
    from moecache.decoding.sampler import Sampler, Sampling

    random = np.random.default_rng(seed)
    sampler = Sampler(Sampling(temperature=temperature, seed=seed))
    likely = [FIRST_BYTE + byte for byte in b'"}],:'] + [END]
    found = bytearray()
    for _ in range(most):
        logits = random.normal(0, 3, NUM_LOGITS).astype(np.float32)
        logits[likely] += 6
        # The model's favourite is a token that its tokenizer does not have.
        logits[NUM_LOGITS - 1] = 50
        token = sampler.draw(logits, mask.allowed())
        mask.take(token)
        if token == END:
            return found.decode()
        found.append(token - FIRST_BYTE)
    return None


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(st.text('abé" \\', min_size=1, max_size=3), inner, max_size=3)
    return properties.flatmap(
        lambda fields: st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.just(fields),
                "required": st.lists(st.sampled_from(sorted(fields)), unique=True)
                if fields
                else st.just([]),
                "additionalProperties": st.booleans(),
            }
        )
    )


def _bounded(kind: str, least: str, most: str, values: st.SearchStrategy[Any]) -> Any:
    return st.tuples(values, values).map(
        lambda pair: {"type": kind, least: min(pair), most: max(pair)}
    )


_VALUES = st.none() | st.booleans() | st.integers(-99, 99) | st.text('xé"\n/', max_size=3)
SCHEMAS = st.recursive(
    st.sampled_from([{"type": kind} for kind in ("string", "integer", "boolean", "null")])
    | st.just({"type": ["string", "null"]})
    | st.just({"type": "string", "pattern": "^[a-c]{2,4}x?$"})
    | st.just({"type": "string", "format": "date"})
    | st.lists(_VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values})
    | _VALUES.map(lambda value: {"const": value})
    | _bounded("string", "minLength", "maxLength", st.integers(0, 5))
    | _bounded("integer", "minimum", "maximum", st.integers(-500, 500))
    | _bounded("number", "minimum", "maximum", st.integers(-9, 9)),
    lambda inner: (
        _objects(inner)
        | st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner)
        | st.builds(
            lambda item, least, more: {
                "type": "array",
                "items": item,
                "minItems": least,
                "maxItems": least + more,
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        )
    ),
    max_leaves=6,
)


def check_schema(masked: Callable[..., Any], schema: dict[str, Any], seed: int) -> int:
    """Speak by a schema, greedily and not; return how many texts came to their end."""
    from moecache.serving.grammars import Grammar

    num = 0
    for temperature in (0.0, 1.0):
        mask = masked(Grammar.of_schema(schema, "schema"))
        text = spoken(mask, seed, temperature=temperature)
        if text is not None:
            jsonschema.validate(json.loads(text), schema)
            num += 1
    return num


def test_what_comes_to_its_end_is_valid_by_its_schema(masked: Callable[..., Any]) -> None:
    """Of 50 random schemas, whatever the model would say."""
    ended = []

    @settings(
        max_examples=50,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(SCHEMAS, st.integers(0, 2**20))
    def check(schema: dict[str, Any], seed: int) -> None:
        ended.append(check_schema(masked, schema, seed))

    check()
    assert sum(ended) > len(ended)


def test_after_the_last_token_only_an_end_may_come(masked: Callable[..., Any]) -> None:
    """And before it none; tokens that the tokenizer does not have never come."""
    from moecache.serving.grammars import Grammar

    mask = masked(Grammar.of_regex("ab?", "regex"))
    seen = []
    for byte in b"ab":
        seen.append(np.flatnonzero(mask.allowed()).tolist())
        mask.take(FIRST_BYTE + byte)
    seen.append(np.flatnonzero(mask.allowed()).tolist())
    assert seen == [[FIRST_BYTE + 97], [END, FIRST_BYTE + 98], [END]]
    assert mask.allowed().shape == (NUM_LOGITS,)


def test_special_tokens_come_only_where_a_grammar_names_them(
    masked: Callable[..., Any], tokenizer: Any
) -> None:
    """Any text has none of them, and a name in a text is no token."""
    from moecache.serving.grammars import Grammar

    special = tokenizer.convert_tokens_to_ids("<extra_id_0>")
    named = masked(Grammar.of_lark("start: <extra_id_0>", "grammar"))
    free = masked(Grammar.of_regex("(.|\n)*", "regex"))
    assert np.flatnonzero(named.allowed()).tolist() == [special]
    assert not free.allowed()[sorted(set(tokenizer.added_tokens_decoder) - {END})].any()
    named.take(special)
    assert np.flatnonzero(named.allowed()).tolist() == [END]


def test_a_tokenizer_of_pieces_has_a_mask_of_pieces() -> None:
    """Tokens of several bytes, of parts of a character, and all that may end a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from moecache.serving.grammars import Grammar, Grammars

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        ['{"name": true, "names": false}'] * 9,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<s>", "</s>", "<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    schema = {"properties": {"names": {"const": "é☃"}}, "required": ["names"], "type": "object"}
    mask = Grammars(400, [1, 2]).compile(Grammar.of_schema(schema, "schema"), tokenizer).new_mask()
    text = '{"names": "é☃"}'
    tokens = tokenizer(text)["input_ids"]

    for token in tokens:
        assert mask.allowed()[token]
        assert not mask.allowed()[[1, 2]].any()
        mask.take(token)

    assert len(tokens) < len(text)
    assert np.flatnonzero(mask.allowed()).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"$ref": "#"}, "of no text at all"),
        ({"$ref": "http://127.0.0.1:1/x.json"}, "does not fetch"),
        ({"$ref": "file:///etc/passwd"}, "does not fetch"),
        ({"enum": [f"value {number}" for number in range(10**6)]}, "at most"),
        ({"properties": {f"p{number}": {} for number in range(1001)}}, "1001 properties"),
        (
            {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in "01"]} for i in "abc"]},
            None,
        ),
        ({"type": "nonsense"}, "nonsense"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "minItems": 10**9}, None),
        ({"type": "string", "minLength": 10**9, "maxLength": 10**9}, None),
        ({"type": "string", "pattern": "^(a+)+$"}, None),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, None),
    ],
)
def test_a_hostile_schema_is_refused_or_followed_within_bounds(
    masked: Callable[..., Any], schema: Any, text: str | None
) -> None:
    """Messages are short, and in one line."""
    from moecache.serving.grammars import Grammar

    if text is None:
        spoken(masked(Grammar.of_schema(schema, "schema")), 1, most=50)
        return
    with pytest.raises(ConfigError, match=text) as refused:
        masked(Grammar.of_schema(schema, "schema"))
    assert len(str(refused.value)) < 500
    assert "\n" not in str(refused.value)
    assert "backtrace" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "start: /a+//a+/",
        '%llguidance {"no_forcing": false}\nstart: /a{1000000000}/',
        'start: %json {"type": "array", "items": {"$ref": "#"}, "minItems": 1}',
        'root ::= "a" root',
    ],
)
def test_a_text_that_has_to_come_without_end_comes_token_by_token(
    masked: Callable[..., Any], text: str
) -> None:
    """A compiler that looks for all of it at once does not return."""
    from moecache.serving.grammars import Grammar

    assert spoken(masked(Grammar.of_text(text, "grammar")), 1, most=50) is None


def test_a_schema_that_is_nested_too_deep_is_refused(masked: Callable[..., Any]) -> None:
    """Also where Python's own writer of JSON gives up."""
    from moecache.serving.grammars import Grammar

    schema: Any = {}
    for depth in range(20_000):
        schema = {"items": schema}
        if depth in (900, 19_999):
            with pytest.raises(ConfigError, match="recursion"):
                masked(Grammar.of_schema(schema, "schema"))
    del schema


def test_a_grammar_that_grows_too_complex_ends_its_answer(client: Any) -> None:
    """With status 400, as the request is at fault; the next one is answered."""
    schema = json.dumps({"type": "object", "properties": {f"p{n}": {} for n in range(1500)}})
    with pytest.raises(openai.BadRequestError, match="make it simpler"):
        chat(client, extra_body={"grammar": f'start: "a" value\nvalue: %json {schema}'})
    assert said(chat(client, extra_body={"guided_choice": ["yes"]})) == ["yes"]


def test_chats_and_completions_are_valid_by_their_schema(client: Any) -> None:
    """Several choices, whole and in parts, greedy and drawn, with probabilities."""
    asked = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    whole = chat(client, response_format=asked, n=2, logprobs=True)
    parts = ["", ""]
    for chunk in chat(client, response_format=asked, n=2, stream=True):
        parts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    greedy = client.completions.create(
        model="tiny",
        prompt="def",
        max_tokens=80,
        temperature=0,
        extra_body={"json_schema": PERSON},
    )

    assert parts == said(whole)
    assert len(set(parts)) > 1
    assert [choice.finish_reason for choice in whole.choices] == ["stop"] * 2
    for text in (*parts, greedy.choices[0].text):
        jsonschema.validate(json.loads(text), PERSON)
    for choice in whole.choices:
        told = "".join(each.token for each in choice.logprobs.content)
        assert told.removesuffix("</s>") == choice.message.content


def test_answers_that_are_generated_together_have_masks_of_their_own(client: Any) -> None:
    """One without a grammar beside them, too: each is the one it is alone."""
    fields: list[Any] = [{"guided_regex": "(ab){9}"}, {"json_schema": PERSON}, {}]
    alone = [said(chat(client, max_tokens=20, extra_body=field)) for field in fields]
    with ThreadPoolExecutor(len(fields)) as threads:
        together = list(
            threads.map(lambda field: said(chat(client, max_tokens=20, extra_body=field)), fields)
        )
    assert together == alone


def test_a_grammar_has_schemas_as_parts(masked: Callable[..., Any]) -> None:
    """Calls of functions with arguments, say."""
    from moecache.serving.grammars import Grammar

    rules = (
        'start: "<call>" (person | stop) "</call>"',
        f'person: "person " {Grammar.schema_part(PERSON)}',
        'stop: "stop"',
    )
    found = set()
    for seed in range(6):
        text = spoken(masked(Grammar.of_lark("\n".join(rules), "tools")), seed)
        called = re.fullmatch("<call>(?:person (.*)|stop)</call>", text or "", re.DOTALL)
        assert called
        if called[1]:
            jsonschema.validate(json.loads(called[1]), PERSON)
        found.add(bool(called[1]))
    assert found == {True, False}


def test_ranks_refuse_a_grammar_by_name(
    client: Any, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a prompt is given to the others, who would not know of it."""
    monkeypatch.setattr(type(served.engine.model), "is_spread", True)
    with pytest.raises(openai.BadRequestError, match="without torchrun") as refused:
        chat(client, response_format={"type": "json_object"})
    assert refused.value.param == "response_format"


def test_an_answer_that_is_cut_says_so(client: Any) -> None:
    """And is the beginning of one that is not; a stop string ends one, too."""
    asked = {"type": "json_object"}
    cut = chat(client, response_format=asked, max_tokens=1)
    stopped = chat(client, response_format=asked, stop='"')
    assert (said(cut), cut.choices[0].finish_reason) == (["{"], "length")
    assert '"' not in said(stopped)[0]


@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        ({"guided_regex": "(ab){2}"}, "(ab){2}"),
        ({"guided_choice": ["left", 'r"ight', "é"]}, 'left|r"ight|é'),
        ({"guided_json": {"const": 7}}, "7"),
        ({"guided_grammar": 'root ::= "x" [0-9]{2} tail\ntail ::= "!" # end'}, r"x\d\d!"),
        ({"grammar": 'start: "x" NUMBER\nNUMBER: /[0-9]{2}/'}, r"x\d\d"),
        ({"json_schema": {"const": "a"}}, '"a"'),
        ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
        ({"structured_outputs": {"json": '{"enum": [1, 2]}'}}, "1|2"),
        ({"structured_outputs": {"regex": "q{3}z", "json": None}}, "q{3}z"),
        ({"response_format": {"type": "json_object", "schema": {"const": 7}}}, "7"),
        ({"response_format": {"type": "text"}, "grammar": 'root ::= "a"'}, "a"),
    ],
)
def test_each_name_of_a_grammar_is_taken(client: Any, field: Any, pattern: str) -> None:
    """Those of OpenAI, vLLM, llama-server and SGLang."""
    for temperature in (0, 1):
        text = said(chat(client, temperature=temperature, extra_body=field))[0]
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    ("field", "param", "text"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": "json"}, "response_format", "an object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        ({"grammar": "nonsense"}, "grammar", "neither Lark"),
        ({"grammar": "root ::= missing"}, "grammar", "missing"),
        ({"guided_regex": "("}, "guided_regex", "unclosed"),
        ({"guided_regex": "[^\\s\\S]"}, "guided_regex", "no text at all"),
        ({"guided_choice": []}, "guided_choice", "0 choices"),
        ({"guided_choice": ["a"], "grammar": 'root ::= "a"'}, "grammar", "leave one out"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "leave one"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "structural_tag"),
        ({"structural_tag": "a"}, "structural_tag", "not supported"),
        ({"grammar_lazy": True}, "grammar_lazy", "not supported"),
        ({"json_schema": "{"}, "json_schema", "no JSON"),
        ({"logit_bias": {"384": 1}}, "logit_bias", "384 tokens"),
    ],
)
def test_what_is_no_grammar_is_refused_by_name(
    client: Any, field: Any, param: str, text: str
) -> None:
    """Before anything is generated."""
    with pytest.raises(openai.BadRequestError, match=text) as refused:
        chat(client, extra_body=field)
    assert refused.value.param == param


def test_without_strict_what_is_not_supported_is_left_out_if_asked(client: Any) -> None:
    """`strict: false` says that the schema need not be followed to the letter."""
    schema = {"const": 3, "not": {"const": 4}}
    for strict in (None, True, False):
        asked = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema, "strict": strict},
        }
        if strict is False:
            assert said(chat(client, response_format=asked)) == ["3"]
        else:
            with pytest.raises(openai.BadRequestError, match="not"):
                chat(client, response_format=asked)


def test_a_server_without_llguidance_says_how_to_get_it(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests without a grammar are answered."""
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "llguidance" else find(name)
    )
    with pytest.raises(openai.BadRequestError, match=r"pip install 'moecache\[serve\]'"):
        chat(client, response_format={"type": "json_object"})
    assert said(chat(client, max_tokens=1))
