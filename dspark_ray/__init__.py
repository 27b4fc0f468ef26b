"""dspark_ray: serve Hugging Face LLMs on Ray with DSpark, the confidence-scheduled speculative decoding.

Importing this package imports neither torch nor ray: the floors below it do, each only what it needs.
"""

from dspark_ray.config import AppConfig
from dspark_ray.errors import DSparkError
from dspark_ray.request import GenerationChunk, GenerationRequest, SamplingParams

__version__ = "0.1.0"

__all__ = ["AppConfig", "DSparkError", "GenerationChunk", "GenerationRequest", "SamplingParams", "__version__"]
