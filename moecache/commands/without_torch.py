"""Text without torch: the model of a command, of files that programs alone compute.

Torch and transformers take seconds to import, and the model half of one to build, with the disk
idle; what files say is enough for the families that have recipes of files.
"""

import argparse
import functools
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moecache.commands import collector
from moecache.commands.ranks import num_ranks, rank_options
from moecache.commands.start_line import StartLine
from moecache.commands.texts import OnTokenizer
from moecache.decoding.files.chat import has_sandbox
from moecache.decoding.files.known import NoTextModelError
from moecache.decoding.files.model import TextModel
from moecache.decoding.files.opening import open_text_model, read_tokenizer
from moecache.decoding.files.recipes import FileModel
from moecache.decoding.files.trunk import Trunk
from moecache.decoding.prefixes import PrefixCache
from moecache.decoding.safetensors.tokenizer_files import find_tokenizer_files
from moecache.decoding.sampler import Mask, Sampler
from moecache.decoding.streams import Stopped, TokenTimes
from moecache.errors import MissingDependencyError
from moecache.kernels import default_compute
from moecache.runtime.runtime import ExpertRuntime
from moecache.stores import CheckpointStore, SafetensorsStore
from moecache.units import format_bytes

if TYPE_CHECKING:
    from moecache.decoding.files.served import Served


def why_torch(arguments: argparse.Namespace, store: str | CheckpointStore, *, is_chat: bool) -> str:
    """Return why a command needs torch; "" if it does not.

    Raises
    ------
    MissingDependencyError
        If torch is missing, or a small package that would do instead of it.
    """
    why = _why_torch(arguments, store)
    if why:
        if _has_torch() or isinstance(store, str):
            return why
        raise MissingDependencyError(
            f"{store.path}: {why}, and torch is not installed; install it with: "
            "pip install 'moecache[transformers]'"
        )
    missing = [] if importlib.util.find_spec("tokenizers") else ["tokenizers"]
    if is_chat and not has_sandbox():
        missing.append("jinja2 of 3.1.6 or later")
    if not missing:
        return ""
    if not _has_torch():
        raise MissingDependencyError(
            f"text of this model needs {' and '.join(missing)}; install them with: "
            "pip install 'moecache[text]'"
        )
    return f"{missing[0]} is not installed"


def _usual_compute(store: CheckpointStore) -> str:
    """Return what multiplies if nobody says it.

    Experts in numbers are torch's where it is there: its bits are transformers'.
    """
    return default_compute(store.layout) if _has_torch() else "fast"


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _why_torch(arguments: argparse.Namespace, store: str | CheckpointStore) -> str:
    """Return why torch has to compute a model; "" if programs can."""
    if isinstance(store, str):
        return "it is a name on the hub"
    options = {
        "--device": arguments.device != "cpu",
        "--dtype": arguments.dtype is not None,
        "--compute": arguments.compute == "torch",
    }
    for option, is_given in options.items():
        if is_given:
            return f"{option} is computed by torch's way"
    if num_ranks() > 1:
        return "experts are spread over ranks"
    if (arguments.compute or _usual_compute(store)) == "torch":
        return "torch multiplies its experts unless --compute is fast"
    return _why_files_fail(store)[0]


def text_way(store: CheckpointStore) -> str:
    """Return how commands write the texts of an open checkpoint, for those who ask."""
    why, said = _why_files_fail(store)
    if why or said is None:
        return f"with torch: {why}"
    is_torchs = _usual_compute(store) == "torch"
    option = ", with --compute fast" if is_torchs else ""
    return f"without torch{option}; the trunk takes {format_bytes(said.trunk_bytes)} then"


def _why_files_fail(store: CheckpointStore) -> tuple[str, FileModel | None]:
    """Return why files alone do not say all of a model, "" if they do; and what they say."""
    try:
        said = FileModel(store)
    except NoTextModelError as error:
        return str(error), None
    if isinstance(store, SafetensorsStore):
        return find_tokenizer_files(store.directory).why_transformers(), said
    return "", said


class FileTexts:
    """The texts of a model of files; a `Texts`.

    Parameters
    ----------
    model : TextModel
    encoder : FileEncoder
    """

    def __init__(self, model: TextModel, encoder: "FileEncoder") -> None:
        self.model, self.encoder = model, encoder
        self.runtime: ExpertRuntime = model.runtime

    def report(self) -> str:
        """Return the counters, layer by layer."""
        return self.model.report()

    def served(self) -> "Served":
        """Return the model as a server asks it."""
        from moecache.decoding.files.served import Served

        return Served(self.model)

    def watch(self) -> None:
        """Return that there are no ranks."""

    def rank_figures(self) -> list[dict[str, Any]]:
        """Return no rank's figures."""
        return []

    def new_mask(self, grammar: Any) -> Mask:
        """Return what keeps a text within a grammar."""
        from moecache.serving.grammars import Grammars

        ends = sorted(self.model.ends)
        compiled = Grammars(self.model.vocabulary, ends).compile(grammar, self.encoder.tokenizer)
        mask: Mask = compiled.new_mask()
        return mask

    def open_prefixes(
        self, max_bytes: int, *, directory: Path | None = None, max_disk_bytes: int = 0
    ) -> PrefixCache:
        """Return a cache of texts' pages."""
        from moecache.decoding.files.continuing import open_prefixes

        return open_prefixes(
            self.model, max_bytes, directory=directory, max_disk_bytes=max_disk_bytes
        )

    def continue_tokens(
        self,
        ids: np.ndarray,
        stream: TokenTimes,
        *,
        max_new_tokens: int,
        temperature: float | None,
        seed: int,
        mask: Mask | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        """Generate; by default as the files say that tokens are drawn."""
        from moecache.decoding.files.continuing import continue_text, sampling_of

        tokens: list[int] = ids[0].tolist()
        sampling = sampling_of(self.model, seed, temperature=temperature)
        try:
            continue_text(
                self.model,
                tokens,
                Sampler(sampling, tokens),
                stream,
                max_new_tokens=max_new_tokens,
                mask=mask,
                prefixes=prefixes,
            )
        except Stopped:
            stream.end()


class FileEncoder:
    """The tokenizer of files, beside what their model takes; an `Encoder`.

    Parameters
    ----------
    tokenizer : FileTokenizer
    said : FileModel
    """

    def __init__(self, tokenizer: Any, said: FileModel) -> None:
        self.tokenizer = tokenizer
        self._said = said

    def encode(self, prompt: str) -> np.ndarray:
        """Return a prompt's tokens, int64 [1, tokens]."""
        return self._checked(self.tokenizer.encode(prompt))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Return a conversation's tokens with the beginning of an answer, int64 [1, tokens]."""
        return self._checked(self.tokenizer.encode_chat(messages))

    def check_chat(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise a ConfigError if there is no chat template, or it fails with such messages."""
        self.tokenizer.encode_chat(messages)

    def _checked(self, tokens: list[int]) -> np.ndarray:
        from moecache.decoding.files.continuing import prompt_of

        prompt = prompt_of(tokens, self._said.settings["vocab_size"])
        self._said.check_room(len(tokens))
        return prompt


@contextmanager
def file_texts(
    arguments: argparse.Namespace,
    store: CheckpointStore,
    line: StartLine,
    on_tokenizer: OnTokenizer,
) -> Iterator[FileTexts]:
    """Yield the texts of a model of files, and close it at the end.

    The tokenizer is made while the trunk is read; `on_tokenizer` is called before the trunk is
    waited for.
    """
    rank_options(arguments)  # there are no ranks: it refuses what is for them
    loading = line.loading
    loading.enter("opening the experts")

    def on_trunk(said: FileModel, trunk: Trunk) -> None:
        loading.enter("reading the trunk", trunk.progress)
        # By this thread, which would wait: beside it, files of cgroups took .4 s to read, as each
        # of them lets go of the interpreter's lock.
        encoders.append(FileEncoder(read_tokenizer(store), said))
        on_tokenizer(encoders[0])

    encoders: list[FileEncoder] = []
    options = {}
    if getattr(arguments, "context", None) is not None:
        options["context_tokens"] = arguments.context
    model = open_text_model(
        store,
        arguments.memory,
        policy=arguments.policy,
        scope=arguments.scope,
        prefetch=arguments.prefetch,
        read=arguments.read,
        profile=arguments.profile,
        on_trunk=on_trunk,
        prefix_memory=arguments.prefix_memory or 0,
        progress=functools.partial(loading.note, "reading experts ahead"),
        **options,
    )
    with model:
        collector.go_on()
        line.stop()
        yield FileTexts(model, encoders[0])
