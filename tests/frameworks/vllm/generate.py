"""A program that names ray_ckpt in options of vLLM alone: prints modules imported early, and the tokens."""

from __future__ import annotations

import json
import sys


def main() -> None:
    from tests.frameworks.vllm.engines import engine, generate

    folder, options = sys.argv[1:]
    print("early", sorted(name for name in sys.modules if name.startswith("ray_ckpt.")))
    with engine(folder, **json.loads(options)) as llm:
        print("tokens", json.dumps(generate(llm)))


if __name__ == "__main__":  # vLLM's processes import this module again
    main()
