"""The example of the guide: an engine of vLLM with the weights of a checkpoint."""

from __future__ import annotations

from vllm import LLM

import ray_ckpt.vllm

uri = "/shared/runs/gpt@3000"
llm = LLM(
    model=ray_ckpt.vllm.write_files(uri, "gpt-files"),
    load_format="ray_ckpt",
    model_loader_extra_config={"checkpoint": uri},
)
print(llm.generate("The weights came from"))
