"""Guards of a model whose experts are in no module: what would write or read them is refused."""

import functools
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import transformers
from torch import nn

from moecache.errors import ConfigError, MoeCacheError

logger = logging.getLogger(__name__)

IMPLEMENTATION = "moecache"
# Methods that would write, or switch the implementation, without the experts.
_GUARDED = ("save_pretrained", "push_to_hub", "set_experts_implementation")
# Another that is refused where embeddings stay quantized.
_RESIZE = "resize_token_embeddings"
# `generate` asks it for what guesses further tokens.
_GUESSING = "_get_candidate_generator"
# Attribute of a model that has its hook.
_HOOK = "_moecache_state_dict_hook"


def guard(model: nn.Module, source: Path) -> None:
    """Make a model and its parts refuse; a second call changes the source that they name.

    Parameters
    ----------
    model : Module
    source : Path
        The checkpoint that has the experts.
    """
    for module in _pretrained(model):
        refuse = functools.partial(_refuse_to_save, source)
        module.__dict__["save_pretrained"] = refuse
        # The original would make the repository first.
        module.__dict__["push_to_hub"] = refuse
        module.__dict__["set_experts_implementation"] = _refuse_to_switch
        if hasattr(type(module), _GUESSING):
            guess = functools.partial(_guess_without_mtp, weakref.ref(module))
            module.__dict__[_GUESSING] = guess
        if _HOOK not in module.__dict__:
            hook = module.register_state_dict_post_hook(_warn_of_state_dict)
            module.__dict__[_HOOK] = hook


def guard_embeddings(model: nn.Module) -> None:
    """Make a model whose embeddings stay quantized refuse to change their number."""
    for module in _pretrained(model):
        module.__dict__[_RESIZE] = _refuse_to_resize


def unguard(model: nn.Module) -> None:
    """Let a model and its parts do as they were told again."""
    for module in _pretrained(model):
        for name in (*_GUARDED, _RESIZE, _GUESSING):
            module.__dict__.pop(name, None)
        hook = module.__dict__.pop(_HOOK, None)
        if hook is not None:
            hook.remove()


def _pretrained(model: nn.Module) -> Iterator[Any]:
    return (m for m in model.modules() if isinstance(m, transformers.PreTrainedModel))


def _warn_of_state_dict(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    if not prefix:
        logger.warning(
            "transformers.state_dict_without_experts keys=%d: they are in the checkpoint alone",
            len(state),
        )


def _refuse_to_save(source: Path, *_: Any, **__: Any) -> NoReturn:
    raise MoeCacheError(
        "what would be saved has no experts, which are in the checkpoint that the model was "
        f"loaded from ({source}): copy that, or give the model all its experts first with "
        "model.moecache.detach()"
    )


def _refuse_to_resize(*_: Any, **__: Any) -> NoReturn:
    raise MoeCacheError(
        'embeddings that stay quantized cannot be resized; load the model with trunk="bf16", or '
        "get all weights back with model.moecache.detach() first"
    )


def _guess_without_mtp(model: Any, generation_config: Any, **named: Any) -> Any:
    """Return what guesses further tokens, unless that is the MTP layers of `model`, a weakref."""
    if getattr(generation_config, "use_mtp", None):
        raise ConfigError(
            "use_mtp=True is not for a model with its experts in slots: transformers would load "
            "its MTP layers with all of their experts, beside the slots and outside of their "
            "memory; use prompt_lookup_num_tokens or an assistant_model to guess further tokens"
        )
    return getattr(type(model()), _GUESSING)(model(), generation_config, **named)


def _refuse_to_switch(implementation: str | dict[str, str]) -> None:
    names = implementation.values() if isinstance(implementation, dict) else [implementation]
    for name in names:
        if name != IMPLEMENTATION:
            raise MoeCacheError(
                f"experts implementation {name!r} needs all experts in memory; get them back "
                "with model.moecache.detach() first"
            )
