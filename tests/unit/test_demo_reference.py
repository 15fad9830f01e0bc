"""The demo's model against another implementation: transformers' LlamaForCausalLM with the same weights.

Tolerance. Both compute in float32 but add in different orders, so they cannot agree to the bit. transformers in float64
is taken as the truth. Logits reach 38 here; float32 strays from the truth by 1e-4 at most, in either implementation.
Ours may stray by 1e-3: ten times that, and far below what a mistake costs. The smallest one we could think of, no
epsilon in the norms, costs 1.6e-2.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from pyxdev.demo.llama import Config, LlamaStage
from pyxdev.demo.model import dequantise, model_file
from pyxdev.demo.tokenizer import Tokenizer

TOLERANCE = 1e-3
TEXTS = [
    "What is 12345 + 678? It's  two\n\n\tsums\u2026 na\u00efve \U0001f642 \uff11\uff12 half\u00a0x?",
    "  def f(x):\n        return x**2   # don't, we'll see; they've done\r\n",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u4e16\u754c 3\u00b2 e\u0301 <|im_end|> end",
]
QUESTION = "Name the first three months of the year, in order, and say which of them is the shortest."

torch = pytest.importorskip("torch", reason="torch is one half of the reference")
transformers = pytest.importorskip("transformers", reason="transformers is the reference")


class Model:
    """The file read by the gguf package alone, so that nothing of ours but the demo is under test."""

    def __init__(self) -> None:
        reader = GGUFReader(model_file())
        self.metadata = {name: field.contents() for name, field in reader.fields.items()}
        self.config = Config.from_metadata(self.metadata)
        self.tokenizer = Tokenizer(self.metadata)
        self.weights: dict[str, Any] = {}
        for tensor in reader.tensors:
            shape = tuple(int(size) for size in reversed(tensor.shape))
            raw = np.asarray(tensor.data).reshape(-1).view(np.uint8)
            self.weights[tensor.name] = dequantise(raw, tensor.tensor_type.name, shape)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads gain little here, and on a busy machine they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(scope="module")
def ids(model: Model) -> list[int]:
    return model.tokenizer.encode(model.tokenizer.chat(QUESTION))


@pytest.fixture(scope="module")
def reference(model: Model) -> Any:
    """transformers' model in float64."""
    config = model.config
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.width,
            intermediate_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.context,
            rms_norm_eps=config.epsilon,
            rope_theta=config.rope_base,
            tie_word_embeddings=True,
        )
    )
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {
        "model.embed_tokens.weight": model.weights["token_embd.weight"],
        "lm_head.weight": model.weights["token_embd.weight"],
        "model.norm.weight": model.weights["output_norm.weight"],
    }
    for layer in range(config.layers):
        for ours, theirs in names.items():
            values = model.weights[f"blk.{layer}.{ours}.weight"]
            if ours in ("attn_q", "attn_k"):  # transformers turns value i with value i + size/2, GGUF 2i with 2i + 1
                values = values.reshape(-1, config.head_size // 2, 2, config.width).swapaxes(1, 2)
                values = values.reshape(-1, config.width)
            state[f"model.layers.{layer}.{theirs}.weight"] = values
    llama.load_state_dict({name: torch.from_numpy(values.copy()) for name, values in state.items()})
    return llama.double().eval()


@pytest.fixture(scope="module")
def truth(reference: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return np.asarray(reference(torch.tensor([ids])).logits[0])


def run(model: Model, ids: list[int], cuts: list[range], chunk: int, xp: Any, steps: int = 0) -> tuple[Any, list[int]]:
    """The text through stages one after the other. (logits after the last token of each chunk, generated ids)"""
    weights = {name: xp.asarray(values) for name, values in model.weights.items()}
    stages = [LlamaStage(model.config, weights, layers, len(ids) + steps, xp) for layers in cuts]
    logits, generated = [], []
    for start in range(0, len(ids), chunk):
        y = {"tokens": xp.asarray(ids[start : start + chunk]), "start": start, "want": "logits"}
        for stage in stages:
            y = stage(y)
        logits.append(np.asarray(y["logits"]))
    for _ in range(steps):
        generated.append(int(y["tokens"][0]))
        for stage in stages:
            y = stage(y)
    return np.stack(logits), generated


WHOLE = [range(30)]
FOUR = [range(8), range(8, 16), range(16, 23), range(23, 30)]


@pytest.mark.parametrize("xp", [np, torch], ids=["numpy", "torch"])
def test_logits_agree_with_transformers(model: Model, ids: list[int], truth: Any, xp: Any) -> None:
    chunk = 7
    ends = [min(start + chunk, len(ids)) - 1 for start in range(0, len(ids), chunk)]
    logits, _ = run(model, ids, FOUR, chunk, xp)
    assert np.abs(logits - truth[ends]).max() < TOLERANCE


def test_the_tolerance_tells_mistakes_apart(model: Model, ids: list[int], truth: Any) -> None:
    """Norms without their epsilon, the smallest mistake we could think of, miss the tolerance by far."""
    mistaken = copy(model)
    mistaken.config = replace(model.config, epsilon=0.0)
    logits, _ = run(mistaken, ids, WHOLE, 1, np)
    assert np.abs(logits - truth).max() > 10 * TOLERANCE


def test_greedy_text_is_that_of_transformers(model: Model, ids: list[int], reference: Any) -> None:
    """Asked about our text, transformers would have picked each of its tokens after those before it."""
    steps = 12
    _, ours = run(model, ids, FOUR, 16, np, steps)
    with torch.no_grad():
        picked = reference(torch.tensor([ids + ours])).logits[0].argmax(-1).tolist()
    assert ours == picked[len(ids) - 1 : -1]
    answer = model.tokenizer.decode(ours)
    assert "January" in answer and "February" in answer


def test_tokens_are_those_of_transformers(model: Model) -> None:
    file = model_file()
    theirs = transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    for text in [*TEXTS, QUESTION]:
        chat = model.tokenizer.chat(text)
        messages = [{"role": "user", "content": text}]
        assert chat == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ours = model.tokenizer.encode(chat)
        assert ours == theirs(chat)["input_ids"]
        assert model.tokenizer.decode(model.tokenizer.encode(text)) == text.replace("<|im_end|>", "")


def test_a_digit_stands_alone(model: Model) -> None:
    """`tokenizer.ggml.pre` "smollm" cuts at every numeric character, also before " \u00bd", which the vocabulary
    has as a whole. transformers does not read that key, so it cannot tell."""
    space, half = model.tokenizer.encode(" "), model.tokenizer.encode("\u00bd")
    assert model.tokenizer.encode(" \u00bd") == space + half
    assert len(model.tokenizer.encode("2048")) == 4
