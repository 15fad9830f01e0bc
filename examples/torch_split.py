"""A torch model over all GPUs of the machine: `python examples/torch_split.py`. Where torch sees none it runs on two
simulated devices, which shows that it works and says nothing of speed."""

import time

import torch

import pyxdev

GPUS = torch.cuda.device_count()
WIDTH, LAYERS, TOKENS, COUNT = (4096, 24, 1024, 32) if GPUS else (64, 6, 16, 8)
DTYPE = torch.bfloat16 if GPUS else torch.float32

torch.manual_seed(0)
with torch.device("cuda" if GPUS else "cpu"):
    block = torch.nn.TransformerEncoderLayer
    layers = [block(WIDTH, 16, 4 * WIDTH, 0.0, batch_first=True, dtype=DTYPE).eval() for _ in range(LAYERS)]
stages = pyxdev.split(layers, range(GPUS or 2))  # moves each part to its device
batches = [torch.randn(1, TOKENS, WIDTH, dtype=DTYPE) for _ in range(COUNT)]


def by_hand(x):
    for stage in stages:
        x = stage.fn(x.to(f"cuda:{stage.device}") if GPUS else x)
    return x


def rate(results):  # microbatches/s
    begin = time.perf_counter()
    for y in results:
        y.cpu()
    return COUNT / (time.perf_counter() - begin)


devices = [stage.device for stage in stages]
with torch.no_grad(), pyxdev.Executor(devices, stages, backend=None if GPUS else "sim") as pipeline:
    pairs = zip(pipeline.map(batches), map(by_hand, batches), strict=True)
    difference = max((y.float() - wanted.float()).abs().max().item() for y, wanted in pairs)
    alone, together = rate(map(by_hand, batches)), rate(pipeline.map(batches))

print(
    f"{len(devices)} devices: {together:.1f} microbatches/s; one at a time {alone:.1f} ({together / alone:.2f} times)"
)
print(f"largest difference: {difference}")
