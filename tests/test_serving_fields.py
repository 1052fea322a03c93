"""Fields that say how tokens are drawn, and what is told of them, with OpenAI's client."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.serving import Served, serving, write_chat_model

for package in ("torch", "transformers", "starlette", "uvicorn"):
    pytest.importorskip(package)
openai = pytest.importorskip("openai")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{{ mood }}{% if add_generation_prompt %}assistant:{% endif %}"
)
MESSAGES: Any = [{"role": "user", "content": "def main(argv=None):"}]
NUM_TOKENS = 12
DRAWN: Any = {"temperature": 0.8, "seed": 3, "max_tokens": NUM_TOKENS}


@pytest.fixture(name="served", scope="module")
def _served(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = write_chat_model(tiny_moe, tmp_path_factory.mktemp("served") / "tiny", TEMPLATE)
    with serving(directory) as served:
        yield served


def chat(client: Any, **options: Any) -> Any:
    """Ask the question."""
    return client.chat.completions.create(model="tiny", messages=MESSAGES, **{**DRAWN, **options})


def said(answer: Any) -> list[str]:
    """Return the texts of an answer's choices."""
    return [choice.message.content for choice in answer.choices]


def test_several_choices_are_the_answers_of_seeds_that_follow_each_other(client: Any) -> None:
    """Whole and in parts; the prompt counts once."""
    alone = [chat(client, seed=seed) for seed in (3, 4, 5)]
    expected = [said(answer)[0] for answer in alone]

    found = chat(client, n=3)
    chunks = list(chat(client, n=3, stream=True, stream_options={"include_usage": True}))

    assert said(found) == expected
    assert len(set(expected)) == 3
    parts = ["", "", ""]
    for chunk in chunks[:-1]:
        parts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert parts == expected
    for usage in (found.usage, chunks[-1].usage):
        assert usage.completion_tokens == 3 * NUM_TOKENS
        assert usage.prompt_tokens == alone[0].usage.prompt_tokens


def test_probabilities_are_those_of_the_model(client: Any, served: Served) -> None:
    """Before temperature and limits; the likeliest come first; parts have all of them once."""
    import torch

    from moecache.integrations.transformers import generation

    found = chat(client, logprobs=True, top_logprobs=3)
    listed = found.choices[0].logprobs.content

    tokenizer = generation.load_tokenizer(str(served.directory))
    prompt = generation.encode_chat(tokenizer, MESSAGES)
    answer = generation.encode(tokenizer, found.choices[0].message.content)
    assert answer.shape[1] == len(listed) == NUM_TOKENS
    # A token after the other, as they were drawn: a prompt's products are of other shapes.
    rows, cache, ids = [], None, prompt
    with torch.no_grad():
        for token in answer[0]:
            out = served.engine.model.model(ids, past_key_values=cache, use_cache=True)
            rows.append(out.logits[0, -1].float())
            cache, ids = out.past_key_values, token.reshape(1, 1)
    expected = torch.stack(rows).log_softmax(-1)
    for place, entry in enumerate(listed):
        token = int(answer[0, place])
        assert entry.token == tokenizer.decode([token])
        assert bytes(entry.bytes).decode() == entry.token
        assert entry.logprob == pytest.approx(float(expected[place, token]), abs=1e-3)
        top = [other.logprob for other in entry.top_logprobs]
        best = expected[place].topk(3).values.tolist()
        assert top == pytest.approx(best, abs=1e-3)

    parts = []
    for chunk in chat(client, logprobs=True, stream=True):
        if chunk.choices[0].logprobs is not None:
            parts += chunk.choices[0].logprobs.content
    assert [(part.token, part.logprob) for part in parts] == [
        (entry.token, entry.logprob) for entry in listed
    ]
    assert chat(client).choices[0].logprobs is None


def test_a_completion_has_probabilities_in_the_old_form(client: Any) -> None:
    """Lists side by side, with the places of the tokens in the text."""
    found = client.completions.create(model="tiny", prompt="def main", logprobs=2, **DRAWN)
    told = found.choices[0].logprobs
    assert "".join(told.tokens) == found.choices[0].text
    assert all(-math.inf < each <= 0 for each in told.token_logprobs)
    assert [len(each) for each in told.top_logprobs] == [2] * NUM_TOKENS
    starts = [found.choices[0].text[offset:] for offset in told.text_offset]
    assert all(text.startswith(token) for text, token in zip(starts, told.tokens, strict=True))


def test_a_bias_forbids_a_token_and_has_another_come(client: Any, served: Served) -> None:
    """By the numbers that the tokenizer gives them."""
    from moecache.integrations.transformers import generation

    tokenizer = generation.load_tokenizer(str(served.directory))
    plain = said(chat(client, temperature=0))[0]
    first = int(generation.encode(tokenizer, plain[0])[0, 0])
    zed = int(generation.encode(tokenizer, "Z")[0, 0])

    assert said(chat(client, temperature=0, logit_bias={str(first): -100}))[0][0] != plain[0]
    assert said(chat(client, logit_bias={str(zed): 100})) == ["Z" * NUM_TOKENS]


@pytest.mark.parametrize(
    "field", ["presence_penalty", "frequency_penalty", "repetition_penalty", "min_p"]
)
def test_each_field_changes_what_is_drawn(client: Any, field: str) -> None:
    """And has the same answer twice."""
    plain = {"temperature": 3.0, "max_tokens": 40}
    value = {"min_p": 1.0, "repetition_penalty": 5.0}.get(field, 2.0)
    known = field.endswith("y_penalty") or field == "presence_penalty"
    options = {field: value} if known else {"extra_body": {field: value}}
    if field == "repetition_penalty":
        options = {"extra_body": {field: value}}

    found = [said(chat(client, **plain, **options)) for _ in range(2)]

    assert found[0] == found[1]
    assert found[0] != said(chat(client, **plain))
    if field == "min_p":
        # Nothing but the likeliest is left.
        assert found[0] == said(chat(client, temperature=0, max_tokens=40))


def test_a_template_looks_at_the_requests_variables(client: Any) -> None:
    """One that would change how the template is used is refused."""
    plain = chat(client).usage.prompt_tokens
    found = chat(client, extra_body={"chat_template_kwargs": {"mood": "gay "}})
    assert found.usage.prompt_tokens == plain + 4
    for name in ("chat_template", "continue_final_message", "tokenize", "messages", "self"):
        with pytest.raises(openai.BadRequestError, match=name) as refused:
            chat(client, extra_body={"chat_template_kwargs": {name: "{{ 1 }}"}})
        assert refused.value.param == "chat_template_kwargs"
