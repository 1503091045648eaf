"""Who is who and who holds which layers: arithmetic without torch."""
