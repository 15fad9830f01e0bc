"""A Llama model, cut into stages of consecutive layers; the same code over NumPy and over torch, in float32.

What goes through the stages (n tokens of the text, in order):

    into the first     {"tokens": (n,) int64, "start": int, "want": str}
    between            {"hidden": (n, width) float32, "start": int, "want": str}
    out of the last    {"start": int} if want is "nothing";
                       {"start": int, "want": "token", "tokens": (1,) int64} if it is "token" or "logits";
                       the latter with "logits": (vocab,) float32

`start` is the position of the first of the n tokens; a part of a text that more text follows wants nothing. What comes
out with a token is the input for the next one, so its ticket can be submitted again.

Each stage keeps the keys and values of its layers. It writes those of positions start..start+n-1 and reads those below
start+n, so a text that begins again at 0 needs no reset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyxdev.errors import FileRefused, InvalidArgument

Array = Any  # numpy.ndarray or torch.Tensor
Activation = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """The sizes of a Llama model. Queries share keys and values in groups of heads / kv_heads."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    vocab: int
    context: int
    rope_base: float
    epsilon: float

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Config:
        """Reads the `llama.*` keys of a GGUF file. FileRefused for another architecture or a missing key."""
        architecture = metadata.get("general.architecture")
        if architecture != "llama":
            raise FileRefused(f"general.architecture is {architecture!r}; the demo's model is 'llama'")
        try:
            width, heads = int(metadata["llama.embedding_length"]), int(metadata["llama.attention.head_count"])
            config = cls(
                layers=int(metadata["llama.block_count"]),
                width=width,
                heads=heads,
                kv_heads=int(metadata.get("llama.attention.head_count_kv", heads)),
                head_size=width // heads,
                hidden=int(metadata["llama.feed_forward_length"]),
                vocab=int(metadata["llama.vocab_size"]),
                context=int(metadata["llama.context_length"]),
                rope_base=float(metadata.get("llama.rope.freq_base", 10000.0)),
                epsilon=float(metadata["llama.attention.layer_norm_rms_epsilon"]),
            )
        except KeyError as error:
            raise FileRefused(f"the model file has no metadata key {error.args[0]!r}") from error
        rotated = int(metadata.get("llama.rope.dimension_count", config.head_size))
        if rotated != config.head_size:
            raise FileRefused(
                f"llama.rope.dimension_count is {rotated}; the demo rotates whole heads of {config.head_size}"
            )
        return config

    @property
    def layer_weights(self) -> int:
        """Values in the matrices of one layer."""
        attention = 2 * self.width * (self.heads + self.kv_heads) * self.head_size
        return attention + 3 * self.width * self.hidden


class LlamaStage:
    """Layers `layers` of the model as a stage. The stage with the first layer also embeds tokens, the one with the last
    layer also picks the next token.

    weights: GGUF names -> float32 arrays of namespace `xp` (numpy or torch), all on one device, matrices as
    (out, in). context: how many positions the keys and values have room for.
    """

    def __init__(self, config: Config, weights: Mapping[str, Array], layers: range, context: int, xp: Any) -> None:
        if not 0 < context <= config.context:
            raise InvalidArgument(f"{context} positions are wanted; the model has 1 to {config.context}")
        self.config = config
        self.layers = layers
        self.context = context
        self.xp = xp
        self.weights = weights
        like = weights[f"blk.{layers.start}.attn_norm.weight"]
        place = {} if xp.__name__ == "numpy" else {"device": like.device}
        room = (len(layers), 2, config.kv_heads, context, config.head_size)
        self.cache = xp.zeros(room, dtype=xp.float32, **place)
        # RoPE as in GGUF's Llama files: values 2i and 2i+1 of a head turn together, by position * base^(-2i/size).
        positions = xp.arange(context, dtype=xp.float64, **place)
        pairs = xp.arange(0, config.head_size, 2, dtype=xp.float64, **place)
        angles = positions[:, None] * config.rope_base ** (-pairs / config.head_size)
        self.cos = xp.asarray(xp.cos(angles), dtype=xp.float32)[:, None, :]
        self.sin = xp.asarray(xp.sin(angles), dtype=xp.float32)[:, None, :]
        self.positions = positions

    @property
    def first(self) -> bool:
        return self.layers.start == 0

    @property
    def last(self) -> bool:
        return self.layers.stop == self.config.layers

    def __call__(self, x: Activation) -> Activation:
        start, want = x["start"], x["want"]
        hidden = self.weights["token_embd.weight"][x["tokens"]] if self.first else x["hidden"]
        stop = start + len(hidden)
        if stop > self.context:
            raise InvalidArgument(f"position {stop - 1} is outside of the {self.context} positions there is room for")
        hidden = self.hidden(hidden, start)
        if not self.last:
            return {"hidden": hidden, "start": start, "want": want}
        if want == "nothing":
            return {"start": stop}
        logits = self.logits(hidden[-1:])[0]
        y = {"start": stop, "want": "token", "tokens": self.xp.argmax(logits).reshape(1)}
        return y | {"logits": logits} if want == "logits" else y

    def hidden(self, hidden: Array, start: int) -> Array:
        """(n, width) before the stage's layers -> (n, width) after them."""
        stop = start + len(hidden)
        later = self.positions[None, :stop] > self.positions[start:stop, None]
        mask = self.xp.asarray(self.xp.where(later, -self.xp.inf, 0.0), dtype=self.xp.float32)
        for layer in self.layers:
            hidden = hidden + self._attention(layer, hidden, start, mask)
            hidden = hidden + self._feed_forward(layer, hidden)
        return hidden

    def logits(self, hidden: Array) -> Array:
        """(n, width) after the last layer -> (n, vocab). The embedding serves as output matrix if the file has none."""
        output = self.weights.get("output.weight", self.weights["token_embd.weight"])
        return self._norm(hidden, "output_norm.weight") @ output.T

    def _attention(self, layer: int, hidden: Array, start: int, mask: Array) -> Array:
        """mask: (n, start + n), 0 where a token sees a position and -inf where it does not."""
        xp, config, name = self.xp, self.config, f"blk.{layer}."
        n, stop = len(hidden), start + len(hidden)
        groups, size = config.kv_heads, config.head_size
        x = self._norm(hidden, name + "attn_norm.weight")
        query = self._rotate((x @ self.weights[name + "attn_q.weight"].T).reshape(n, config.heads, size), start)
        key = self._rotate((x @ self.weights[name + "attn_k.weight"].T).reshape(n, groups, size), start)
        value = (x @ self.weights[name + "attn_v.weight"].T).reshape(n, groups, size)
        keys, values = self.cache[layer - self.layers.start]
        keys[:, start:stop] = key.swapaxes(0, 1)
        values[:, start:stop] = value.swapaxes(0, 1)
        # The heads of a group share its keys: one product serves all, with a row for each token and head of the group.
        query = query.reshape(n, groups, -1, size).swapaxes(0, 1).reshape(groups, -1, size)
        scores = (query @ keys[:, :stop].swapaxes(1, 2)) / size**0.5
        scores = scores.reshape(groups, n, -1, stop) + mask[:, None, :]
        weights = xp.exp(scores - xp.amax(scores, -1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True)
        mixed = weights.reshape(groups, -1, stop) @ values[:, :stop]
        mixed = mixed.reshape(groups, n, -1).swapaxes(0, 1).reshape(n, -1)
        return mixed @ self.weights[name + "attn_output.weight"].T

    def _feed_forward(self, layer: int, hidden: Array) -> Array:
        name = f"blk.{layer}."
        x = self._norm(hidden, name + "ffn_norm.weight")
        gate = x @ self.weights[name + "ffn_gate.weight"].T
        up = x @ self.weights[name + "ffn_up.weight"].T
        # gate * sigmoid(gate), in the form that cannot overflow.
        silu = gate * (0.5 + 0.5 * self.xp.tanh(0.5 * gate))
        return (silu * up) @ self.weights[name + "ffn_down.weight"].T

    def _norm(self, x: Array, name: str) -> Array:
        return x / self.xp.sqrt((x * x).mean(-1, keepdims=True) + self.config.epsilon) * self.weights[name]

    def _rotate(self, heads: Array, start: int) -> Array:
        """(n, heads, size), the first at position start."""
        stop = start + len(heads)
        cos, sin = self.cos[start:stop], self.sin[start:stop]
        even, odd = heads[..., 0::2], heads[..., 1::2]
        return self.xp.stack((even * cos - odd * sin, even * sin + odd * cos), -1).reshape(heads.shape)
