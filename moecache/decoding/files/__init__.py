"""Models of files that run without torch: `opening.open_text_model`, `opening.read_tokenizer`."""
