"""Look-ahead: the next layer's own router, applied one layer early, says what is read ahead."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache.prefetch.predict import Prediction
from moecache.units import format_bytes
from tests.helpers.families import FAMILIES, write_checkpoint

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]


class Nobody:
    """A predictor that knows nothing, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.observed: list[int] = []
        self.num_sequences = 0

    def observe(self, layer: int, ids: np.ndarray) -> None:
        """Remember the layer."""
        self.observed.append(layer)

    def predict(self, layer: int, n: int) -> Prediction:
        """Remember the layer."""
        self.asked.append(layer)
        return np.empty(0, np.int32), None

    def begin_sequence(self) -> None:
        """Count."""
        self.num_sequences += 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a model in memory with four layers of experts."""
    family = FAMILIES["qwen3_moe"]
    path = write_checkpoint(family, tmp_path_factory.mktemp("look_ahead"), "float32")
    return family.model_class.from_pretrained(path).eval()


def test_a_guess_is_what_the_next_router_makes_of_this_layers_input(model: Any) -> None:
    """The chosen ones first, in the router's order; then the likeliest others."""
    from moecache.integrations.transformers import RouterLookAhead

    routers = _routers(model)
    inputs: dict[int, Any] = {}
    hooks = [
        router.register_forward_pre_hook(lambda _, args, layer=layer: inputs.update({layer: args}))
        for layer, router in enumerate(routers)
    ]
    look_ahead = RouterLookAhead(routers)
    with torch.no_grad():
        # Twice: what a router gets beside hidden states is known from the first time on.
        for token in (3, 4):
            model(input_ids=torch.tensor([[token]]))
    last = len(routers) - 1
    guess, scores = look_ahead.predict(last, 6)  # there is no layer after the last one's input

    assert len(guess) == 0
    assert scores is None
    with torch.no_grad():
        routers[last - 1](*inputs[last - 1])
        logits, _, chosen = routers[last].forward(*inputs[last - 1])
    guess, _ = look_ahead.predict(last, 6)
    top_k = chosen.shape[-1]
    assert guess[:top_k].tolist() == chosen[0].tolist()
    ranked = [e for e in logits[0].argsort(descending=True).tolist() if e not in chosen[0].tolist()]
    assert guess[top_k:].tolist() == ranked[: 6 - top_k]
    look_ahead.close()
    for hook in hooks:
        hook.remove()


def test_the_fallback_guesses_for_the_first_layer_only(model: Any) -> None:
    """It learns from every layer, and hears of sequences."""
    from moecache.integrations.transformers import RouterLookAhead

    routers, fallback = _routers(model), Nobody()
    look_ahead = RouterLookAhead(routers, fallback)
    with torch.no_grad():
        model(input_ids=torch.tensor([[3]]))
        for layer, router in enumerate(routers):
            router(torch.zeros(1, model.config.hidden_size))
            look_ahead.observe(layer, np.array([[1, 2]]))
            look_ahead.predict((layer + 1) % len(routers), 4)
    look_ahead.begin_sequence()
    look_ahead.close()

    assert fallback.asked == [0]
    assert fallback.observed == list(range(len(routers)))
    assert fallback.num_sequences == 1


def test_closing_takes_the_hooks_away(model: Any) -> None:
    """The routers are as they were; a second call does nothing."""
    from moecache.integrations.transformers import RouterLookAhead

    routers = _routers(model)
    before = [len(router._forward_pre_hooks) for router in routers]
    look_ahead = RouterLookAhead(routers)
    assert [len(router._forward_pre_hooks) for router in routers] == [n + 1 for n in before]
    look_ahead.close()
    look_ahead.close()
    assert [len(router._forward_pre_hooks) for router in routers] == before


def test_recall_on_the_trained_model_is_in_the_report(tiny_moe: Path) -> None:
    """Most of what a token of real text uses was foreseen; auto and router guess alike."""
    from moecache.integrations.transformers import load

    text = (
        b"def save(self, path):\n    with open(path, 'w') as file:\n        file.write(self.text)\n"
    )
    prompt = torch.tensor([list(text)])
    model = load(tiny_moe, memory="25%", prefetch="router")
    with model.moecache as offload, torch.no_grad():
        past = None
        for token in prompt[0]:  # one by one: a prompt at once is not foreseen
            past = model(input_ids=token.view(1, 1), past_key_values=past).past_key_values
        prefetch = offload.stats().prefetch
        report = offload.report()

    assert prefetch is not None
    assert prefetch.mode == "router"
    # Measured: 0.63 and 0.83, with the first layer, which has no layer before it.
    assert prefetch.recall_at_k > 0.5
    assert prefetch.recall_at_2k > 0.7
    assert prefetch.num_useful > 0
    assert f"recall {prefetch.recall_at_k:.2f}" in report
    assert format_bytes(offload.stats().pool_bytes) in report


@pytest.mark.parametrize(
    ("prefetch", "look_ahead"),
    [("auto", True), ("router", True), ("echo", False), ("last", False), ("off", False)],
)
def test_only_auto_and_router_look_ahead(prefetch: str, look_ahead: bool, tiny_moe: Path) -> None:
    """The other modes are the runtime's own."""
    from moecache.integrations.transformers import RouterLookAhead, load

    with load(tiny_moe, memory="25%", prefetch=prefetch).moecache as offload:
        assert isinstance(offload.runtime.predictor, RouterLookAhead) == look_ahead
        stats = offload.stats().prefetch
        assert (stats.mode if stats else "off") == prefetch
        # Routers are asked from the first token on; "auto" tries them later.
        assert (stats is not None and stats.active) == (prefetch != "off")


def test_a_predictor_of_ones_own_is_asked(tiny_moe: Path) -> None:
    """Instead of the routers."""
    from moecache.integrations.transformers import load

    nobody = Nobody()
    model = load(tiny_moe, memory="25%", prefetch=nobody)
    with model.moecache, torch.no_grad():
        model(input_ids=torch.tensor([[65]]))
    assert nobody.asked == [1, 2, 3, 4, 5, 6, 7, 0]


def _routers(model: Any) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
