"""Training frameworks: thin files over loader and executor. Nothing is imported from here."""
