"""The networks: any Hugging Face causal LM as target, the DSpark drafter, their checkpoints and their KV pages."""
