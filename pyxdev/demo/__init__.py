"""A real language model as a pipeline: SmolLM2-135M-Instruct, its layers spread over the devices."""
