"""What a server is and what its places do, as llama-server answers `/props` and `/slots`."""

from typing import Any

from moecache import __version__
from moecache.serving.answer import Answer
from moecache.serving.engine import Engine
from moecache.serving.requests import Asked


def props(engine: Engine) -> dict[str, Any]:
    """Return the properties of a server."""
    tokenizer = engine.tokenizer
    return {
        "default_generation_settings": {
            "id": 0,
            "is_processing": False,
            "n_ctx": engine.context_tokens,
            "speculative": False,
            "params": _params(engine, None),
        },
        "total_slots": engine.parallel,
        "model_alias": engine.names[0],
        "model_path": engine.path,
        "n_ctx": engine.context_tokens,
        "n_vocab": engine.checks.num_tokens,
        "chat_template": _template(tokenizer),
        "bos_token": tokenizer.bos_token or "",
        "eos_token": tokenizer.eos_token or "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"moecache {__version__}",
        "is_sleeping": False,
    }


def slots(engine: Engine) -> list[dict[str, Any]]:
    """Return the places of answers, and what is generated in each; no texts."""
    going = {answer.place: answer for answer in engine.answers}
    return [_slot(engine, place, going.get(place)) for place in range(engine.parallel)]


def _slot(engine: Engine, place: int, answer: Answer | None) -> dict[str, Any]:
    found = {
        "id": place,
        "n_ctx": engine.context_tokens,
        "speculative": False,
        "is_processing": answer is not None,
    }
    if answer is None:
        return found
    cached, read, _ = answer.stream.progress()
    num = len(answer.stream.tokens)
    return {
        **found,
        "n_prompt_tokens": answer.prompt_tokens,
        "n_prompt_tokens_processed": max(0, read - cached),
        "n_prompt_tokens_cache": cached,
        "params": _params(engine, answer.asked),
        "next_token": [
            {
                "has_next_token": num < answer.most_tokens,
                "has_new_line": False,
                "n_remain": max(0, answer.most_tokens - num),
                "n_decoded": num,
            }
        ],
    }


def _params(engine: Engine, asked: Asked | None) -> dict[str, Any]:
    """Return how tokens are drawn: as a request says, or if it says nothing."""
    given: dict[str, Any] = {}
    if asked is not None:
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        given = {name: getattr(asked, name) for name in names}
    drawn = engine.model.sampling_of(0 if asked is None else asked.seed, **given)
    return {
        "n_predict": engine.most_tokens
        if asked is None
        else asked.max_tokens or engine.most_tokens,
        "seed": -1 if asked is None else drawn.seed,
        "temperature": drawn.temperature,
        "top_k": drawn.top_k,
        "top_p": drawn.top_p,
        "min_p": drawn.min_p,
        "repeat_penalty": drawn.repetition_penalty,
        "presence_penalty": 0.0 if asked is None else asked.presence_penalty,
        "frequency_penalty": 0.0 if asked is None else asked.frequency_penalty,
        "stop": [] if asked is None else list(asked.stop),
        "stream": asked is not None and asked.stream,
    }


def _template(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template or ""
