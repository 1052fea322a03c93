"""Ways to generate with transformers: in slots, the output is that of the whole model."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.offloading import generated, load_in_slots, load_whole, prompt
from tests.helpers.pairs import pairwise

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

NAMES = ("qwen3_moe", "gpt_oss", "deepseek_v3")
# Where nothing is asked of the experts that another family's would answer otherwise.
one_family = pytest.mark.parametrize("path", NAMES[:1], indirect=True, scope="module")
PADDING = 0
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
)


@pytest.fixture(name="path", scope="module", params=NAMES)
def _path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    return write_checkpoint(FAMILIES[request.param], directory / request.param, "float32")


@pytest.fixture(name="whole", scope="module")
def _whole(path: Path) -> Any:
    return load_whole(FAMILIES[path.name], path)


@pytest.fixture(name="model", scope="module")
def _model(path: Path) -> Iterator[Any]:
    model = load_in_slots(path)
    yield model
    model.moecache.close()


@pytest.fixture(name="tokenizer")
def _tokenizer(tiny_moe: Path) -> Any:
    """Return a tokenizer whose ids all models here have: of ASCII."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(tiny_moe)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "temperature": 1.3, "top_k": 20},
        {"num_beams": 3, "num_return_sequences": 2},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
    ],
    ids=["greedy", "sampled", "beams", "static_cache", "no_cache", "penalties"],
)
def test_every_logit_of_a_generation_is_the_whole_models(
    model: Any, whole: Any, options: dict[str, Any]
) -> None:
    """And with them every token; a quarter of the experts has slots."""
    outcomes = []
    for each in (whole, model):
        torch.manual_seed(11)
        out = generated(each, return_dict_in_generate=True, output_logits=True, **options)
        outcomes.append((out.sequences, torch.stack(out.logits)))

    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert torch.equal(outcomes[0][1], outcomes[1][1])
    assert model.moecache.stats().num_evictions > 0


@one_family
def test_left_padded_prompts_of_several_lengths_are_continued_equally(
    model: Any, whole: Any
) -> None:
    """Padding is routed like any token, and changes nothing."""
    ids = torch.tensor([[5, 17, 99, 3, 64, 28], [PADDING] * 3 + [7, 8, 9], [PADDING] * 5 + [77]])
    options = {"attention_mask": (ids != PADDING).long()}

    assert torch.equal(generated(model, ids, **options), generated(whole, ids, **options))


@one_family
def test_rows_of_a_batch_are_sequences_of_their_own(path: Path, tmp_path: Path) -> None:
    """From the prompt to the last token; the next batch is another, and replays as it ran."""
    from moecache.study import Trace
    from moecache.study.replay import replay

    trace_path = tmp_path / "trace.npz"
    model = load_in_slots(path, record_trace=trace_path, prefetch="off", warmpin=0)
    with model.moecache as runtime:
        for ids in (prompt().reshape(4, 2), prompt()):
            generated(model, ids, num_tokens=3)
        live = runtime.stats()

    trace = Trace.load(trace_path)
    found = replay(trace, "echo", live.capacity)
    prompts, decoded = [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 2, 3] * 2
    assert trace.sequence.tolist() == prompts + decoded + [4] * 10
    assert (found.num_hits, found.num_misses) == (live.num_hits, live.num_misses)


@pytest.mark.parametrize("slots", [1, 3])
def test_fewer_slots_than_a_token_has_experts_change_nothing(
    path: Path, whole: Any, slots: int
) -> None:
    """A step takes as many waves as it needs."""
    model = load_in_slots(path, None, slots=slots)
    ids = prompt()

    with model.moecache, torch.no_grad():
        assert torch.equal(model(ids).logits, whole(ids).logits)
        assert torch.equal(generated(model, num_tokens=6), generated(whole, num_tokens=6))


@pytest.mark.parametrize(
    ("path", "prefetch", "policy"),
    pairwise(NAMES, ("off", "router", "echo"), ("lru", "lfu")),
    indirect=["path"],
    scope="module",
)
def test_neither_policy_nor_prefetch_changes_the_output(
    path: Path, whole: Any, policy: str, prefetch: str
) -> None:
    """They decide what is read when, and nothing else."""
    model = load_in_slots(path, policy=policy, prefetch=prefetch)

    with model.moecache:
        assert torch.equal(generated(model), generated(whole))


@pytest.mark.parametrize(
    ("path", "read"),
    list(zip(NAMES, ("direct", "buffered", "mmap"), strict=True)),
    indirect=["path"],
    scope="module",
)
def test_the_way_of_reading_does_not_change_the_output(path: Path, whole: Any, read: str) -> None:
    """Through the page cache, around it, or from the mapped file."""
    model = load_in_slots(path, read=read)

    with model.moecache:
        assert torch.equal(generated(model), generated(whole))


def test_what_a_forward_returns_beside_logits_is_equal(model: Any, whole: Any) -> None:
    """Router logits, auxiliary loss, loss, hidden states of every layer, attentions."""
    ids = prompt()
    outputs = [
        each(
            ids,
            labels=ids,
            output_router_logits=True,
            output_hidden_states=True,
            output_attentions=True,
        )
        for each in (whole, model)
    ]
    flat = [_tensors(output) for output in outputs]

    assert len(flat[0]) > 6
    assert flat[0].keys() == flat[1].keys()
    for name, tensor in flat[0].items():
        assert torch.equal(tensor, flat[1][name]), name


@one_family
def test_a_conversation_goes_on_from_its_cache(model: Any, whole: Any) -> None:
    """A second turn starts from the keys and values of the first."""
    outcomes = []
    for each in (whole, model):
        first = generated(each, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, torch.tensor([[9, 8, 7]])], dim=1)
        outcomes.append(generated(each, ids, past_key_values=first.past_key_values))

    assert torch.equal(*outcomes)


def test_inference_mode_and_autocast_give_the_whole_models_logits(model: Any, whole: Any) -> None:
    """Also in bfloat16, as autocast computes."""
    ids = prompt()
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, whole(ids).logits)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(ids).logits, whole(ids).logits)


def test_gradients_of_inputs_and_trunk_are_the_whole_models(path: Path, whole: Any) -> None:
    """Experts are read a second time for them; their own weights get none."""
    model = load_in_slots(path)
    inputs, parameters = [], []
    with model.moecache:
        for each in (whole, model):
            each.zero_grad()
            embedded = each.get_input_embeddings()(prompt()).detach().requires_grad_()
            each(inputs_embeds=embedded, labels=prompt()).loss.backward()
            inputs.append(embedded.grad)
            parameters.append({n: p.grad for n, p in each.named_parameters()})
    whole.zero_grad()

    torch.testing.assert_close(inputs[1], inputs[0], rtol=1e-4, atol=1e-6)
    assert len(parameters[1]) > 20
    for name, gradient in parameters[1].items():
        torch.testing.assert_close(gradient, parameters[0][name], rtol=1e-4, atol=1e-6, msg=name)


@one_family
def test_what_ran_in_inference_mode_has_gradients_later(path: Path) -> None:
    """Views of slots that were made there are kept, and are ordinary tensors."""
    model = load_in_slots(path, "100%")
    with model.moecache as offload:
        with torch.inference_mode():
            generated(model)
        embedded = model.get_input_embeddings()(prompt()).detach().requires_grad_()
        model(inputs_embeds=embedded, labels=prompt()).loss.backward()
        assert embedded.grad.abs().sum() > 0
        with torch.inference_mode():
            offload.detach()

    assert not any(parameter.is_inference() for parameter in model.parameters())


def test_gradient_checkpointing_gives_the_same_gradients(path: Path) -> None:
    """A layer's forward runs again in its backward: experts come from slots once more."""
    gradients = []
    model = load_in_slots(path)
    with model.moecache:
        for checkpointing in (False, True):
            if checkpointing:
                model.gradient_checkpointing_enable()
                model.train()
            embedded = model.get_input_embeddings()(prompt()).detach().requires_grad_()
            model(inputs_embeds=embedded, labels=prompt(), use_cache=False).loss.backward()
            gradients.append(embedded.grad)

    assert torch.equal(*gradients)


def test_two_threads_generate_on_one_model(model: Any, whole: Any) -> None:
    """Each gets the text of its own prompt."""
    prompts = [prompt(), prompt().flip(1) + 1]
    expected = [generated(whole, ids) for ids in prompts]
    texts: dict[int, Any] = {}

    def run(index: int) -> None:
        texts[index] = generated(model, prompts[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert [torch.equal(texts[i], expected[i]) for i in range(2)] == [True, True]
    model.moecache.runtime.cache.check()


@one_family
def test_a_pipeline_writes_the_whole_models_text(model: Any, whole: Any, tokenizer: Any) -> None:
    """One prompt, and a batch of several lengths."""
    import transformers

    texts = [
        transformers.pipeline("text-generation", model=each, tokenizer=tokenizer, batch_size=2)(
            ["def f", "import os"], max_new_tokens=8, do_sample=False
        )
        for each in (whole, model)
    ]

    assert texts[0] == texts[1]
    assert texts[0][0][0]["generated_text"].startswith("def f")


@one_family
def test_a_chat_template_is_applied_as_ever(model: Any, whole: Any, tokenizer: Any) -> None:
    """What it makes of a conversation is a prompt like any other."""
    tokenizer.chat_template = CHAT_TEMPLATE
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], return_tensors="pt", return_dict=True
    )

    assert tokenizer.decode(encoded["input_ids"][0]).startswith("user: hi")
    options = {"attention_mask": encoded["attention_mask"], "num_tokens": 6}
    ids = encoded["input_ids"]
    assert torch.equal(generated(model, ids, **options), generated(whole, ids, **options))


@one_family
def test_streamers_get_each_token_as_it_comes(model: Any, whole: Any) -> None:
    """The prompt first, then one token at a time."""

    class Streamer:
        def __init__(self) -> None:
            self.seen: list[list[int]] = []

        def put(self, value: Any) -> None:
            self.seen.append(value.flatten().tolist())

        def end(self) -> None:
            self.seen.append([])

    streamer = Streamer()
    generated(model, streamer=streamer)

    *text, end = streamer.seen
    assert end == []
    assert [token for tokens in text for token in tokens] == generated(whole)[0].tolist()


def test_a_compiled_model_gives_equal_logits_and_is_compiled_once_per_shape(
    tmp_path: Path,
) -> None:
    """In one graph, which begins a sequence each time; the same shapes compile nothing anew."""
    from torch._dynamo.utils import counters

    family = FAMILIES["mixtral"]
    path = write_checkpoint(family, tmp_path / "mixtral", "float32")
    whole, model = load_whole(family, path), load_in_slots(path)
    torch._dynamo.reset()
    counters.clear()
    # "eager" takes no C++ compiler; what is compiled into graphs is the same.
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    try:
        with model.moecache, torch.no_grad():
            for ids in (prompt(), prompt() + 1):
                logits = compiled(ids, use_cache=False).logits
                assert torch.equal(logits, whole(ids, use_cache=False).logits)
            num_graphs = counters["stats"]["unique_graphs"]
            for ids in (prompt() + 2, prompt() + 3):
                assert torch.equal(compiled(ids, use_cache=False).logits, whole(ids).logits)
            assert counters["stats"]["unique_graphs"] == num_graphs > 0
            assert model.moecache.stats().num_sequences == 4
    finally:
        torch._dynamo.reset()


def _tensors(output: Any) -> dict[str, Any]:
    """Return the tensors of a model's output by name and place."""
    found = {}
    for name, value in output.items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, tuple):
            found |= {f"{name}.{i}": v for i, v in enumerate(value) if isinstance(v, torch.Tensor)}
    return found
