"""The tokeniser of a GGUF file: byte-level BPE from the file's own vocabulary, and the chat form of its template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyxdev.errors import FileRefused

CONTROL = 3  # tokenizer.ggml.token_type of tokens that stand for no text
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class Tokenizer:
    """metadata: the `tokenizer.*` keys of a GGUF file whose vocabulary is GPT-2's kind, cut the way of SmolLM.

    Raises FileRefused for any other kind.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        for key, wanted in (("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "smollm")):
            if metadata.get(key) != wanted:
                raise FileRefused(f"{key} is {metadata.get(key)!r}; the demo knows {wanted!r}")
        if "<|im_start|>" not in metadata.get("tokenizer.chat_template", ""):
            raise FileRefused("tokenizer.chat_template does not use <|im_start|>, the only chat form the demo knows")
        tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
        types: Sequence[int] = metadata["tokenizer.ggml.token_type"]
        merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
        bpe = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
        self._tokenizer = Tokenizer(bpe)
        # Each digit is a token of its own; the rest is cut by GPT-2's expression.
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._tokenizer.decoder = decoders.ByteLevel()
        control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
        self._tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
        self.end: int = metadata["tokenizer.ggml.eos_token_id"]

    def encode(self, text: str) -> list[int]:
        """The ids of a text; control tokens that are spelled out in it are taken as such."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without control tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def chat(self, question: str) -> str:
        """One question in the form of the model's chat template, up to where the answer begins."""
        return (
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        )
