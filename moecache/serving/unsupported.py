"""Fields of other servers that would change an answer, and are not supported."""

from typing import Any

# With each the values that change nothing, which clients send without being asked to.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI's.
    "web_search_options": (),
    # vLLM's and SGLang's.
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "grammar_lazy": (False,),
    "guided_whitespace_pattern": (),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_new_tokens": (0,),
    "min_tokens": (0,),
    "no_stop_trim": (False,),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "stop_regex": ([],),
    "stop_token_ids": ([],),
    "structural_tag": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    # llama-server's.
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "lora": ([],),
    "mirostat": (0,),
    "n_probs": (0,),
    "repeat_penalty": (1,),
    "samplers": (),
    "tfs_z": (1,),
    "top_n_sigma": (-1, 0),
    "typical_p": (1,),
    "xtc_probability": (0,),
}
