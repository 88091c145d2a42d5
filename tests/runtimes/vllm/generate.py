"""Run in a process of its own: load a folder into vLLM, generate greedily, print tokens and their log-probabilities.

    generate.py FOLDER OPTIONS      OPTIONS is JSON: prompts, max_tokens, and keyword arguments of vllm.LLM under "llm"

One line on stdout is JSON; the engine writes others. An error of the engine ends the process with its traceback.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    folder, options = sys.argv[1], json.loads(sys.argv[2])
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4, enable_prefix_caching=False,
        **{"enforce_eager": True, "dtype": "float32", **options["llm"]},
    )  # fmt: skip
    sampling = SamplingParams(
        temperature=0, max_tokens=options["max_tokens"], logprobs=2, detokenize=False, ignore_eos=True
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in options["prompts"]]
    found = []
    for request in llm.generate(prompts, sampling, use_tqdm=False):
        output = request.outputs[0]
        ranked = [sorted((each.logprob for each in entry.values()), reverse=True) for entry in output.logprobs]
        chosen = [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
        margins = [best - second for best, second, *_ in ranked]
        found.append({"tokens": list(output.token_ids), "logprobs": chosen, "margins": margins})
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
