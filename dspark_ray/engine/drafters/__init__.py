"""Drafters: dspark (and dflash), a small causal LM, n-gram lookup; one Protocol in base.py."""
