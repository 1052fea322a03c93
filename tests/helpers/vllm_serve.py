"""The tiny model with a tokenizer that vLLM's grammars read: bytes, as tokenizer.json."""

import shutil
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_moe"


def write_bytes_model(directory: Path) -> Path:
    """Write the tiny model of the examples with a byte-level tokenizer of the same ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copyfile(EXAMPLE / name, directory / name)
    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2}
    vocabulary |= {letter: 3 + byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens([AddedToken(name) for name in ("<pad>", "</s>", "<unk>")])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    fast.save_pretrained(directory)
    return directory
