"""Generate for several prompts in this process, without Ray or a server.

python examples/offline_generate.py
"""

import asyncio

from dspark_ray import AppConfig, GenerationRequest, SamplingParams
from dspark_ray.models.resolve import resolve_model
from dspark_ray.offline import chat_prompt, complete_all, load_tokenizer, open_engine

QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Write a Python function that adds two numbers.",
)


async def generate(config: AppConfig) -> None:
    tokenizer = load_tokenizer(resolve_model(config.target.model))
    # A seed makes sampling reproducible: the same text with any drafter, any load, and without drafts.
    requests = [
        GenerationRequest(
            str(index), chat_prompt(tokenizer, text), SamplingParams(temperature=0.7, seed=7, max_tokens=64)
        )
        for index, text in enumerate(QUESTIONS)
    ]
    async with open_engine(config) as engine:
        completions = await complete_all(engine, requests, concurrency=len(requests))
    for question, completion in zip(QUESTIONS, completions, strict=True):
        print(f"> {question}\n{completion.text}")
        print(f"[{len(completion.token_ids)} tokens, {completion.accepted_length:.2f} a round]\n")


def main() -> None:
    asyncio.run(generate(AppConfig()))


if __name__ == "__main__":
    main()
