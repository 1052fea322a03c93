"""Together: several texts of a file's model that go on side by side."""

from collections.abc import Sequence

import numpy as np

from moecache.decoding.gguf.model import PROMPT_TOKENS, TextModel
from moecache.decoding.gguf.text import Text
from moecache.decoding.prefixes import PAGE_TOKENS
from moecache.decoding.together import TextsTogether


class Together(TextsTogether[Text]):
    """Goes on with several texts of a model of a GGUF file; prompts take turns.

    Parameters
    ----------
    model : TextModel
    """

    def __init__(self, model: TextModel) -> None:
        super().__init__()
        self._model = model

    def _read_some(self, reading: Sequence[Text], *, are_steps: bool) -> None:
        text = next(text for text in reading if not any(map(text.will_find, reading)))
        # Experts are read once for a whole part, where nobody waits for it.
        num_tokens = PAGE_TOKENS if are_steps else PROMPT_TOKENS
        self._do(text, lambda: text.read(num_tokens))
        self._pass_on([text])

    def _logits(self, texts: Sequence[Text]) -> np.ndarray:
        tokens = [text.token for text in texts if text.token is not None]
        caches = [text.cache for text in texts if text.cache is not None]
        return self._model.read_together(tokens, caches)
