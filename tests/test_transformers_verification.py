"""Several tokens in one forward: an expert is fetched and computed once, not once per token."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.families import FAMILIES
from tests.helpers.offloading import generated, load_in_slots

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

FAMILY = FAMILIES["qwen3_moe"]
NUM_LAYERS = len(FAMILY.expert_layers)


@dataclass
class Step:
    """What a layer was asked for in one forward."""

    num_tokens: int
    num_distinct: int


@dataclass
class Routes:
    """Steps of all layers, as hooks on the experts' routers see them."""

    steps: list[Step] = field(default_factory=list)

    def follow(self, model: Any) -> None:
        """Note what the model's routers choose from now on."""
        for path, module in model.named_modules():
            if path.endswith("mlp.gate"):
                module.register_forward_hook(self._note)

    @property
    def num_distinct(self) -> int:
        """Return the distinct experts of each step, all steps together."""
        return sum(step.num_distinct for step in self.steps)

    @property
    def num_pairs(self) -> int:
        """Return the (token, choice) pairs of all steps."""
        return sum(step.num_tokens for step in self.steps) * FAMILY.top_k

    def _note(self, router: Any, inputs: Any, output: Any) -> None:
        chosen = output[2]
        self.steps.append(Step(len(chosen), len(chosen.unique())))


@pytest.fixture(name="routes")
def _routes() -> Routes:
    return Routes()


@pytest.fixture(name="ids")
def _ids() -> Any:
    """Return a prompt whose end occurred before, so that a lookup finds candidates."""
    return torch.tensor([[5, 17, 99, 3, 64, 28, 5, 17, 99, 3, 64, 28, 5, 17]])


# One slot: nothing stays from one expert to the next. A layer's experts: no more is needed.
@pytest.mark.parametrize("slots", [1, FAMILY.num_experts])
@pytest.mark.parametrize("num_tokens", [2, 7, 40])
def test_a_step_reads_and_computes_each_distinct_expert_once(
    qwen3_moe: Path, routes: Routes, slots: int, num_tokens: int
) -> None:
    """However many of its tokens chose it, and however few slots there are."""
    model = load_in_slots(qwen3_moe, None, slots=slots, prefetch="off")
    routes.follow(model)
    with model.moecache as offload, torch.no_grad():
        model(torch.arange(num_tokens)[None] * 3 % 128)

        assert len(routes.steps) == NUM_LAYERS
        assert routes.num_distinct < routes.num_pairs
        assert offload.num_products == routes.num_distinct
        assert offload.stats().num_reads == routes.num_distinct
        assert offload.stats().num_misses == routes.num_distinct


@pytest.mark.parametrize("prefetch", ["off", "router"])
def test_prompt_lookup_verifies_with_a_product_per_distinct_expert(
    qwen3_moe: Path, whole_model: Any, routes: Routes, ids: Any, prefetch: str
) -> None:
    """Steps of several tokens are among them, and the text is that of plain decoding."""
    model = load_in_slots(qwen3_moe, None, slots=FAMILY.num_experts, prefetch=prefetch)
    routes.follow(model)
    with model.moecache as offload:
        text = generated(model, ids, num_tokens=24, prompt_lookup_num_tokens=4)

        assert torch.equal(text, generated(whole_model, ids, 24, prompt_lookup_num_tokens=4))
        verifying = [step for step in routes.steps if 1 < step.num_tokens < ids.shape[1]]
        assert len(verifying) >= 2 * NUM_LAYERS
        assert offload.num_products == routes.num_distinct < routes.num_pairs
        stats = offload.stats()
        assert stats.num_hits + stats.num_misses == routes.num_distinct
        if prefetch == "off":
            assert stats.num_reads == stats.num_misses <= routes.num_distinct


def test_an_assistant_models_candidates_are_verified_with_a_product_per_distinct_expert(
    qwen3_moe: Path, whole_model: Any, routes: Routes, ids: Any
) -> None:
    """The assistant is a model in slots too: each counts its own."""
    model, assistant = (
        load_in_slots(qwen3_moe, None, slots=FAMILY.num_experts, prefetch="off") for _ in range(2)
    )
    # As many candidates as are asked for, however sure it is of them.
    assistant.generation_config.assistant_confidence_threshold = 0.0
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    of_assistant = Routes()
    routes.follow(model)
    of_assistant.follow(assistant)
    with model.moecache as offload, assistant.moecache as of_candidates:
        text = generated(model, ids, num_tokens=16, assistant_model=assistant)

        assert torch.equal(text, generated(whole_model, ids, 16))
        assert max(step.num_tokens for step in routes.steps[NUM_LAYERS:]) > 2
        # The same model proposes what it accepts: fewer forwards than tokens.
        assert len(routes.steps) // NUM_LAYERS < 16 < len(of_assistant.steps)
        assert offload.num_products == routes.num_distinct
        assert of_candidates.num_products == of_assistant.num_distinct
        assert offload.stats().num_reads <= routes.num_distinct < routes.num_pairs


def test_decoding_one_token_computes_its_own_experts_alone(qwen3_moe: Path, routes: Routes) -> None:
    """Top-k of them per layer."""
    model = load_in_slots(qwen3_moe, prefetch="off")
    routes.follow(model)
    with model.moecache as offload:
        generated(model, torch.tensor([[9]]), num_tokens=5)

        assert {(step.num_tokens, step.num_distinct) for step in routes.steps} == {
            (1, FAMILY.top_k)
        }
        assert offload.num_products == 5 * NUM_LAYERS * FAMILY.top_k
