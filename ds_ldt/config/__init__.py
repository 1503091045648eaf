"""What the JSON may say: its sections, their rules, and the texts of what is wrong."""
