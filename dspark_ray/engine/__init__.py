"""The serving engine without Ray: sequences, pages, packed steps, drafters, output."""
