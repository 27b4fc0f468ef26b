"""A Ray Data job that completes a dataset through the served model. Needs the extra: pip install -e '.[data]'

make demo                              # in another terminal
python examples/ray_data_batch.py
"""

import argparse
from typing import Any

import ray
from ray import serve

from deployments.protocol import GenerateRequest
from dspark_ray.request import SamplingParams

COUNTRIES = ("France", "Japan", "Kenya", "Peru", "Norway", "India", "Canada", "Egypt")


class Completer:
    """Sends a whole batch at once, so that the engine decodes its rows together."""

    def __init__(self, app: str) -> None:
        self._model = serve.get_app_handle(app).options(stream=True)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        sampling = SamplingParams(temperature=0.0, max_tokens=48)
        streams = [
            self._model.generate.remote(
                GenerateRequest(messages=({"role": "user", "content": str(q)},), sampling=sampling)
            )
            for q in batch["question"]
        ]
        batch["answer"] = ["".join(chunk.text for chunk in stream) for stream in streams]
        return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="auto", help="the Ray cluster that serves it")
    parser.add_argument("--app", default="dspark", help="name of the application that serves the model")
    args = parser.parse_args()

    ray.init(address=args.address, log_to_driver=False)
    questions = [{"question": f"What is the capital of {country}?"} for country in COUNTRIES]
    answers = ray.data.from_items(questions).map_batches(
        Completer, fn_constructor_args=(args.app,), batch_size=4, concurrency=1, num_cpus=0.1
    )
    for row in answers.iter_rows():
        print(f"{row['question']}\n  {row['answer']}")


if __name__ == "__main__":
    main()
