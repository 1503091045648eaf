"""How weights and training states get in and out of files: checkpoints, layer files, Hugging Face models."""
