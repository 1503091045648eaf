"""What the edge draws: the order of samples, texts, conversations, and the names of bad samples."""
