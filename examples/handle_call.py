"""Another Serve application on the same cluster calls the model through its handle: typed requests, no HTTP between.

make demo                              # in another terminal
python examples/handle_call.py "a lighthouse"
"""

import argparse

import ray
from ray import serve

from deployments.protocol import GenerateRequest
from dspark_ray.request import SamplingParams, SpeculationCounts


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Poet:
    """Asks the model for a poem and says how much of it came from accepted drafts."""

    def __init__(self, model_app: str) -> None:
        self._model = serve.get_app_handle(model_app).options(stream=True)

    async def write(self, subject: str) -> str:
        question = {"role": "user", "content": f"Write a four-line poem about {subject}."}
        request = GenerateRequest(messages=(question,), sampling=SamplingParams(temperature=0.0, max_tokens=80))
        text, counts = "", SpeculationCounts()
        async for chunk in self._model.generate.remote(request):
            text += chunk.text
            counts += chunk.counts
        return f"{text}\n[{counts.emitted} tokens, {counts.accepted} of {counts.admitted} verified drafts accepted]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", nargs="?", default="a lighthouse")
    parser.add_argument("--address", default="auto", help="the Ray cluster that serves it")
    parser.add_argument("--app", default="dspark", help="name of the application that serves the model")
    args = parser.parse_args()

    ray.init(address=args.address, log_to_driver=False)
    poet = serve.run(Poet.bind(args.app), name="poet", route_prefix=None)
    try:
        print(poet.write.remote(args.subject).result(timeout_s=300))
    finally:
        serve.delete("poet")


if __name__ == "__main__":
    main()
