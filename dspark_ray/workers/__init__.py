"""Ray Core actors: thin shells around the engine floor's plain classes."""
