import numpy as np

from pyxdev import Executor

rng = np.random.default_rng(0)
first, second = rng.standard_normal((2, 64, 64), dtype=np.float32)
stages = [lambda x: np.maximum(x @ first, 0), lambda x: x @ second]  # one for each device
batches = [rng.standard_normal((8, 64), dtype=np.float32) for _ in range(16)]

with Executor(devices=[0, 1], stages=stages, backend="sim") as pipeline:
    results = list(pipeline.map(batches))  # in order, several in flight

for x, result in zip(batches, results, strict=True):
    assert np.array_equal(result, stages[1](stages[0](x)))
print(len(results), "microbatches, the same bits as one at a time")
