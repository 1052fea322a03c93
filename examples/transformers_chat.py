"""Chat with a mixture-of-experts model in 4 GiB: python examples/transformers_chat.py MODEL."""

import sys

from transformers import AutoTokenizer, TextStreamer

from moecache.integrations.transformers import load

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = load(sys.argv[1], memory="4GiB")
chat, form = [], {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
while text := input("> "):
    chat.append({"role": "user", "content": text})
    inputs = tokenizer.apply_chat_template(chat, **form)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    answer = model.generate(**inputs, max_new_tokens=512, streamer=streamer)[0]
    new = answer[inputs["input_ids"].shape[1] :]
    chat.append({"role": "assistant", "content": tokenizer.decode(new, skip_special_tokens=True)})
print(model.moecache.report())
