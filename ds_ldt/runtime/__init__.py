"""How a rank runs a step: module, engine, optimizer, generation."""
