"""A Hugging Face causal language model over all GPUs (or two simulated devices): `python examples/causal_lm.py`.

The layers become stages, each with a cache of keys and values for every sequence. A sequence's next token goes from the
last device to the first without the host; with as many sequences as devices, none of them waits.
"""

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import pyxdev


class Embed(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.tokens, self.rotary = model.model.embed_tokens, model.model.rotary_emb

    def forward(self, x):
        hidden = self.tokens(x["ids"])
        places = torch.arange(x["position"], x["position"] + hidden.shape[1], device=hidden.device)
        rest = {name: x[name] for name in ("position", "sequence")}
        return {"hidden": hidden, "rotary": self.rotary(hidden, places[None]), **rest}


class Block(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.caches = layer, {}

    def forward(self, x):
        if x["position"] == 0:
            self.caches[x["sequence"]] = DynamicCache()
        cache = self.caches[x["sequence"]]
        hidden = self.layer(x["hidden"], None, None, cache, position_embeddings=x["rotary"])
        return {**x, "hidden": hidden[0] if isinstance(hidden, tuple) else hidden}


class Head(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.norm, self.head = model.model.norm, model.lm_head

    def logits(self, x):
        return self.head(self.norm(x["hidden"][:, -1:]))

    def forward(self, x):
        position = x["position"] + x["hidden"].shape[1]
        return {"ids": self.logits(x).argmax(-1), "position": position, "sequence": x["sequence"]}


def make_model(**changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**{**sizes, **heads, **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def parts(model):
    return [Embed(model), *map(Block, model.model.layers), Head(model)]


def generate(pipeline, prompts, steps):
    """Each sequence's next `steps` tokens, the sequences in turn."""
    tickets = [pipeline.submit({"ids": ids, "position": 0, "sequence": n}) for n, ids in enumerate(prompts)]
    rows = [tickets]
    for _ in range(steps - 1):
        rows.append([pipeline.submit(ticket) for ticket in rows[-1]])
    return [[row[n].result()["ids"].item() for row in rows] for n in range(len(prompts))]


def by_hand(model, ids, steps):
    """The same from the whole model, without a cache."""
    for _ in range(steps):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0, -steps:].tolist()


if __name__ == "__main__":
    gpus = torch.cuda.device_count()
    model = make_model().to("cuda" if gpus else "cpu")
    prompts = [torch.randint(500, (1, 5 + n), device=model.device) for n in range(4)]
    with torch.no_grad():
        wanted = [by_hand(model, ids, 12) for ids in prompts]
        stages = pyxdev.split(parts(model), range(gpus or 2))  # moves the layers
        devices = [stage.device for stage in stages]
        with pyxdev.Executor(devices, stages, backend=None if gpus else "sim") as pipeline:
            got = generate(pipeline, prompts, 12)
    print(
        f"{len(prompts)} sequences over {len(devices)} devices, the same tokens as of the whole model: {got == wanted}"
    )
